"""``osdp cluster calibrate``: coefficients of the time model from a CSV file of measured steps."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from osdp.cli.options import Out
from osdp.cluster.calibration.calibrate import OF_DEVICES, SHARED, Calibration, calibrate
from osdp.cluster.calibration.measured_step import read_steps
from osdp.cluster.calibration.step_model import Setting, assumed_recompute
from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.file import LINK_SHARE, NETWORK_SHARE, known_gpus, load_cluster
from osdp.cluster.plan import RecomputeLayers
from osdp.text import align, format_seconds, wrapped


def calibrate_steps(
    data: Annotated[Path, typer.Option(help="CSV file of measured steps, with the columns of vTrain")],
    cluster: Annotated[Path, typer.Option(help="YAML or JSON file of the nodes that they ran on")],
    vocabulary: Annotated[int, typer.Option(help="vocabulary size")] = 50257,
    flash: Annotated[bool, typer.Option(help="whether the steps used FlashAttention")] = False,
    recomputation: Annotated[
        str | None,
        typer.Option(
            help="none, selective or full; by default full if a step would not fit otherwise, else none"
        ),
    ] = None,
    out: Out = Path("calibration.json"),
) -> None:
    """Fit the time model to measured steps, for --calibration; print its error on held-out steps."""
    there = load_cluster(cluster)
    if recomputation not in (None, *RecomputeLayers):
        raise ValueError(f"--recomputation {recomputation}: must be one of {', '.join(RecomputeLayers)}")
    steps = read_steps(data)
    most = max(step.devices for step in steps)
    if most > there.num_devices:
        raise ValueError(
            f"{data} has steps on {most} devices, but {cluster} has {there.num_devices}: give the cluster "
            "that they ran on"
        )
    setting = Setting(there, vocabulary, flash)
    again = assumed_recompute(steps, setting) if recomputation is None else RecomputeLayers(recomputation)
    setting = replace(setting, recompute=again)
    found = calibrate(steps, setting)
    found.save(out)
    typer.echo(_report(found, setting))


def _report(found: Calibration, setting: Setting) -> str:
    """Published and fitted value of each coefficient, and the errors of held-out steps."""
    rows: list[tuple[str, str, str]] = [("coefficient", "published", "fitted")]
    notes = []
    nodes = {group.node.name: group.node for group in setting.cluster.groups}
    several = len(found.links) > 1

    def compare(before: object, after: object, names: Iterable[str], of: str = "", kind: str = "") -> None:
        of = f"{of} " if of and several else ""
        for name in names:
            value = getattr(after, name)
            told = f"{of}{kind} {name}".strip() if kind else f"{of}{name}"
            rows.append((told, _text(name, getattr(before, name)), _text(name, value)))
            if name.endswith("_share") and value > 1:
                notes.append(
                    f"the fitted {told} is {_text(name, value)}, more than is specified: something assumed "
                    f"of these steps is wrong, such as recomputation ({setting.recompute}) or attention"
                )

    for gpu in dict.fromkeys(nodes[links.node].gpu.name for links in found.links):
        compare(PUBLISHED, found.rates.on(gpu), OF_DEVICES, gpu)
    compare(PUBLISHED, found.rates, SHARED)
    for links in found.links:
        node = nodes[links.node]
        own = known_gpus().get(node.gpu.name, {}).get("link_share", LINK_SHARE)
        for kind, specified, fitted, share in (
            ("link", node.inside, links.inside, own),
            ("network", node.outside, links.outside, NETWORK_SHARE),
        ):
            if fitted is not None:
                compare(specified, fitted, ("bandwidth", "latency"), node.name, kind)
                if fitted.bandwidth > specified.bandwidth / share:
                    notes.append(
                        f"the fitted {kind} of {node.name} is faster than specified: these steps hardly "
                        "determine it"
                    )
    attention = "FlashAttention" if found.flash else "attention that stores its scores"
    told = (
        f"{found.steps} steps of {len(found.rates.corrections)} kinds of layers, recompute "
        f"{setting.recompute}, {attention}; {found.folds}-fold cross-validation: mean error "
        f"{found.mean_error:.1%}, median {found.median_error:.1%}"
    )
    return "\n".join([align(rows, right=(1, 2)), *map(wrapped, notes), wrapped(told)])


def _text(name: str, value: float) -> str:
    """A coefficient with its unit, which its name tells."""
    if name == "bandwidth":
        return f"{value / 1e9:.4g} GB/s"
    if name == "latency" or name.endswith("_seconds"):
        return format_seconds(value)
    return f"{value:.4g}"
