"""``osdp cluster calibrate``: coefficients of the time model from a CSV file of measured steps."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from osdp.cli.options import Out
from osdp.cluster.calibration.calibrate import Calibration, calibrate
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
    groups = load_cluster(cluster).groups
    if len(groups) > 1:
        kinds = ", ".join(group.node.name for group in groups)
        raise ValueError(
            f"{cluster} has {len(groups)} kinds of nodes ({kinds}); calibrate each kind separately"
        )
    if recomputation not in (None, *RecomputeLayers):
        raise ValueError(f"--recomputation {recomputation}: must be one of {', '.join(RecomputeLayers)}")
    steps = read_steps(data)
    most, there = max(step.devices for step in steps), groups[0].node.devices * groups[0].count
    if most > there:
        raise ValueError(
            f"{data} has steps on {most} devices, but {cluster} has {there}: give the cluster "
            "that they ran on"
        )
    setting = Setting(groups[0].node, vocabulary, flash)
    again = assumed_recompute(steps, setting) if recomputation is None else RecomputeLayers(recomputation)
    setting = replace(setting, recompute=again)
    found = calibrate(steps, setting)
    found.save(out)
    typer.echo(_report(found, setting))


def _report(found: Calibration, setting: Setting) -> str:
    """Published and fitted value of each coefficient, and the errors of held-out steps."""
    rows: list[tuple[str, str, str]] = [("coefficient", "published", "fitted")]
    notes = []
    for field in fields(PUBLISHED):
        if field.name not in ("corrections", "error_quantile"):
            before, after = (
                _text(field.name, getattr(each, field.name)) for each in (PUBLISHED, found.rates)
            )
            rows.append((field.name, before, after))
            if field.name.endswith("_share") and getattr(found.rates, field.name) > 1:
                notes.append(
                    f"the fitted {field.name} is {after}, more than is specified: something assumed of these "
                    f"steps is wrong, such as recomputation ({setting.recompute}) or attention"
                )
    links = {"link": (setting.node.inside, found.inside), "network": (setting.node.outside, found.outside)}
    own = known_gpus().get(setting.node.gpu.name, {}).get("link_share", LINK_SHARE)
    shares = {"link": own, "network": NETWORK_SHARE}
    for kind, (specified, fitted) in links.items():
        if fitted is not None:
            rows += [
                (f"{kind} {name}", _text(name, getattr(specified, name)), _text(name, getattr(fitted, name)))
                for name in ("bandwidth", "latency")
            ]
            if fitted.bandwidth > specified.bandwidth / shares[kind]:
                notes.append(f"the fitted {kind} is faster than specified: these steps hardly determine it")
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
