"""``osdp plan --cluster --out``: the plan that runs, how to start it, and what other frameworks read."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from osdp.cluster import Cluster
from osdp.cluster_plan import ClusterPlan
from osdp.cost.cluster_stage import ClusterPrices
from osdp.cost.cluster_step import nodes_of
from osdp.report.exports import exports
from osdp.report.launch_sheet import batch_script, launch_sheet
from osdp.transformer import TransformerShape
from osdp.units import format_bytes, format_seconds


def write_runnable(
    plan: ClusterPlan,
    prices: ClusterPrices,
    model_name: str,
    changed: Mapping[str, Any],
    out: Path,
    echo: Callable[[str], None],
) -> None:
    """Write the plan that runs, and beside it how to start it and what other frameworks read.

    Args:
        plan: The layout.
        prices: What it was made with.
        model_name: As ``--model`` has it.
        changed: Fields of the shape that were changed.
        out: File of the plan.
        echo: Prints.

    Raises:
        InfeasibleError: A stage does not fit when it is traced.
        ValueError: The model cannot be built, or not cut there.
    """
    from osdp.cluster_run import runnable_plan, with_note

    shape, cluster = prices.workload.shape, prices.cluster
    model, sample = _build(model_name, changed, shape, plan.layout.samples)
    made = runnable_plan(plan, cluster, prices.workload, model, sample, rates=prices.rates)
    used = _nodes(cluster.part(nodes_of(plan.slots)))
    note = f"laid out on {used}: {plan.step_seconds:.4g} s a step by the numbers of {shape.name}"
    made = with_note(made, note)
    made.save(out)
    program = f"train.py --plan {out.name}"
    plan.save(out.with_name(f"{out.stem}.layout.json"))
    out.with_name("launch.sh").write_text(launch_sheet(plan, cluster, program), encoding="utf8")
    out.with_name("launch.sbatch").write_text(batch_script(plan, cluster, program), encoding="utf8")
    numbers = plan.peak.total - plan.peak.reserve
    echo(
        f"\ntraced, a step takes {format_seconds(made.predicted.step_seconds)} and "
        f"{format_bytes(made.predicted.peak_bytes)} beside the reserve; by its numbers "
        f"{format_seconds(plan.step_seconds)} and {format_bytes(numbers)}"
    )
    echo(f"written: {out}, {out.stem}.layout.json, launch.sh, launch.sbatch")
    for export in exports(plan, shape):
        out.with_name(export.file).write_text(export.text, encoding="utf8")
        missing = f"; cannot say: {'; '.join(export.notes)}" if export.notes else ""
        echo(f"written: {export.file}{missing}")


def _build(name: str, changed: Mapping[str, Any], shape: TransformerShape, samples: int) -> tuple[Any, Any]:
    """The model itself on the meta device, and a microbatch.

    Raises:
        ValueError: The model is in a file or a folder whose numbers were changed, or has none that is built
            like it.
    """
    from osdp.cli_models import build, described_model
    from osdp.integrations.huggingface import token_batch
    from osdp.integrations.shaped_models import model_of_shape

    is_file, is_folder = name.endswith(".json"), Path(name).is_dir()
    if (is_file or is_folder) and changed:
        raise ValueError(
            f"--out builds the model of {name}, which --set ({', '.join(changed)}) does not change: edit the "
            "file, or describe the other model"
        )
    if is_folder:
        return described_model(Path(name), samples, shape.sequence)
    if is_file and "model_type" in json.loads(Path(name).read_text(encoding="utf8")):
        return build(name, {}, samples, shape.sequence)
    return model_of_shape(shape), token_batch(samples, shape.sequence)


def _nodes(cluster: Cluster) -> str:
    return " + ".join(f"{group.count} {group.node.name}" for group in cluster.groups)
