"""``osdp cluster plan --out``: a runnable plan, launch scripts, and configurations of other frameworks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from osdp.cli.cluster.exports import write_exports
from osdp.cli.cluster.request import ClusterRequest
from osdp.cli.models import (
    build,
    changed_fields,
    described_source,
    is_folder,
    load_described_model,
    require_no_code,
)
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import nodes_of
from osdp.cluster.export.launch_scripts import batch_script, launch_script
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan
from osdp.cluster.search.space import LayoutSpace
from osdp.cluster.transformer import TransformerShape
from osdp.codec import read_json
from osdp.errors import InfeasibleError
from osdp.model.more_blocks import LEAST_BLOCKS
from osdp.text import format_bytes, format_seconds, wrapped

if TYPE_CHECKING:
    from torch import nn

    from osdp.plan.plan import Plan
    from osdp.plan.tensor_parallel import TensorParallelPlan


def runnable_space(space: LayoutSpace) -> LayoutSpace:
    """The layouts of a space that the runtime can run.

    Raises:
        ValueError: It has context parallelism alone.
    """
    if space.cp and 1 not in space.cp:
        raise ValueError(
            f"--out and --measure write plans for osdp's own runtime, which has no context parallelism: "
            f"leave --cp {space.cp[0]} out, or write configurations of other frameworks alone, by --export "
            "FOLDER"
        )
    return replace(space, cp=(1,))


def traced_prices(prices: ClusterPrices, request: ClusterRequest) -> ClusterPrices:
    """The same costs with activations traced from the model, where none were measured."""
    from osdp.cluster.runnable import traced_layers

    shape = prices.workload.shape
    typer.echo(f"tracing {shape.name} for what its layers keep", err=True)
    model, sample = _build(request, shape, None)
    traced = traced_layers(model, sample, prices.workload, few_blocks=_few_blocks(request, shape))
    basis = prices.cluster, prices.workload, prices.rates, prices.profiles
    return ClusterPrices(*basis, traced, certain=prices.certain)


def require_measurable(request: ClusterRequest) -> None:
    """Check before the search that layouts can be trained on random tokens.

    Raises:
        ValueError: The model and its batch come from a function, or another framework is to train it.
    """
    if request.target is not None:
        raise ValueError(
            f"--measure trains layouts in osdp's own runtime, not as --target {request.target} does: leave "
            "one of them out"
        )
    if is_folder(request.model) and described_source(Path(request.model)).is_from_function:
        raise ValueError(
            f"--measure trains language models on random tokens, and that of {request.model} comes from a "
            "function with its own batch: write its plan by --out, and time steps of your own script"
        )


def is_measurable(request: ClusterRequest, shape: TransformerShape) -> bool:
    """Whether ``--measure`` can write layouts of the model."""
    try:
        require_measurable(request)
        require_buildable(request, shape)
    except ValueError:
        return False
    return True


def write_runnable(
    plans: Sequence[ClusterPlan], prices: ClusterPrices, request: ClusterRequest, out: Path
) -> ClusterPlan:
    """Write the first layout that fits when traced, with launch scripts and configurations of frameworks.

    Args:
        plans: Layouts, best first.
        prices: Costs that they were made with.
        request: Options that name the model.
        out: File of the plan.

    Returns:
        That layout.

    Raises:
        InfeasibleError: None of them fits when it is traced.
        ValueError: The model cannot be built or cut at the stage boundaries.
    """
    plan, made, model = first_that_fits(plans, prices, request)
    files = write_plan(plan, made, model, prices, out, f"train.py --plan {out.name}")
    numbers = plan.peak.total - plan.peak.reserve
    typer.echo("")
    told = (
        f"traced, a step takes {format_seconds(made.predicted.step_seconds)} and "
        f"{format_bytes(made.predicted.peak_bytes)} in addition to the reserve; from its dimensions "
        f"{format_seconds(plan.step_seconds)} and {format_bytes(numbers)}; the traced ones are of the plan "
        "that is written, the others ranked the layouts"
    )
    typer.echo(wrapped(told))
    typer.echo(wrapped(f"written to {out.parent}: {', '.join(files)}"))
    write_exports(out.parent, plan, prices, request.half)
    return plan


def write_plan(
    plan: ClusterPlan, made: "Plan", model: Any, prices: ClusterPrices, out: Path, program: str
) -> list[str]:
    """Write a runnable plan with its layout, launch scripts, and the configuration of its model.

    Args:
        plan: The layout.
        made: The plan that runs it.
        model: The model; without a ``config``, no configuration is written.
        prices: Costs that the layout was made with.
        out: File of the plan; the others lie beside it.
        program: What the scripts start, with its arguments.

    Returns:
        Names of the files.
    """
    shape, cluster = prices.workload.shape, prices.cluster
    used = _nodes(cluster.part(nodes_of(plan.slots)))
    seconds = format_seconds(plan.step_seconds)
    note = f"layout on {used}: estimated {seconds} a step from the dimensions of {shape.name}"
    replace(made, notes=(*made.notes, note)).save(out)
    plan.save(out.with_name(f"{out.stem}.layout.json"))
    texts = {
        "launch.sh": launch_script(plan, cluster, program),
        "launch.sbatch": batch_script(plan, cluster, program),
    }
    if hasattr(model, "config"):
        texts[f"{out.stem}.config.json"] = model.config.to_json_string(use_diff=False)
    for name, text in texts.items():
        out.with_name(name).write_text(text, encoding="utf8")
    return [out.name, f"{out.stem}.layout.json", *texts]


def first_that_fits(
    plans: Sequence[ClusterPlan], prices: ClusterPrices, request: ClusterRequest
) -> tuple[ClusterPlan, "Plan", Any]:
    """The first layout that fits when it is traced, its plan and its model.

    Raises:
        InfeasibleError: None of them fits.
        ValueError: The model cannot be built or cut at the stage boundaries.
    """
    from osdp.cluster.runnable import runnable_plan
    from osdp.integrations.huggingface.shaped_models import tensor_plan_of_shape

    shape, shared = prices.workload.shape, prices.workload.sequence_parallel
    few = _few_blocks(request, shape)
    tensor_plans: dict[int, TensorParallelPlan] = {}
    for row, plan in enumerate(plans, start=1):
        model, sample = _build(request, shape, plan.layout.samples)
        tp = plan.layout.degrees.tp
        if tp > 1 and tp not in tensor_plans and _is_built_of_shape(request):
            tensor_plans[tp] = tensor_plan_of_shape(model, shape, tp, sequence_parallel=shared)
        basis = plan, prices.cluster, prices.workload, model, sample
        try:
            made = runnable_plan(*basis, rates=prices.rates, tensor_plan=tensor_plans.get(tp), few_blocks=few)
        except InfeasibleError as error:
            if row == len(plans):
                raise
            cause = str(error).splitlines()[0]
            typer.echo(wrapped(f"row {row} does not fit when its stages are traced: {cause}"))
        else:
            return plan, made, model
    raise ValueError("a runnable plan needs at least 1 layout, got none")


def require_buildable(request: ClusterRequest, shape: TransformerShape) -> None:
    """Check before the search that the model can be built.

    Args:
        request: Options that name the model.
        shape: Its shape.

    Raises:
        ValueError: The model has experts, the folder names code that is not trusted, ``--set`` changes a
            model that is in a file or a folder, or no known class has these dimensions.
    """
    from osdp.integrations.huggingface.shaped_models import family_of

    name = request.model
    if shape.experts:
        raise ValueError(
            f"--out and --measure write plans for osdp's own runtime, which has no expert parallelism, and "
            f"{shape.name} has experts: write configurations of other frameworks alone, by --export FOLDER, "
            "or let osdp plan shard the model"
        )
    if is_folder(name) and not request.trust_code:
        require_no_code(Path(name))
    if not (_has_model(name) or is_folder(name)):
        family_of(shape)
    elif other := sorted(changed_fields(name, request.fields)):
        raise ValueError(
            f"--out, --measure and --measured build the model of {name}, which --set {', '.join(other)} does "
            "not change: edit the file, or profile the other model"
        )


def _has_model(name: str) -> bool:
    """Whether it is a configuration file of transformers."""
    return name.endswith(".json") and "model_type" in read_json(name)


def _is_built_of_shape(request: ClusterRequest) -> bool:
    """Whether the model is built from the dimensions of its shape alone."""
    return not (is_folder(request.model) or _has_model(request.model))


def _few_blocks(request: ClusterRequest, shape: TransformerShape) -> "nn.Module | None":
    """The model with as many blocks as are traced for all; ``None`` if it is traced whole."""
    from osdp.integrations.huggingface.shaped_models import blocks_of_shape

    if not _is_built_of_shape(request) or shape.decoder_layers or shape.layers <= LEAST_BLOCKS:
        return None
    return blocks_of_shape(shape, LEAST_BLOCKS)


def _build(request: ClusterRequest, shape: TransformerShape, samples: int | None) -> tuple[Any, Any]:
    """The model on the meta device, and a microbatch of ``samples``, of its own or one sample if ``None``."""
    from osdp.integrations.huggingface.models import token_batch
    from osdp.integrations.huggingface.shaped_models import model_of_shape

    name = request.model
    if is_folder(name):
        return load_described_model(Path(name), samples, shape.sequence, trust_code=request.trust_code)
    if _has_model(name):
        return build(name, {}, samples or 1, shape.sequence)
    return model_of_shape(shape), token_batch(samples or 1, shape.sequence)


def _nodes(cluster: Cluster) -> str:
    return " + ".join(f"{group.count} {group.node.name}" for group in cluster.groups)
