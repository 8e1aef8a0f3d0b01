"""Steps that the time model itself gives, as if they had been measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from osdp.cluster.calibration.measured_step import COLUMNS, MeasuredStep
from osdp.cluster.calibration.step_model import Fitted, Setting, StepModel
from osdp.cluster.cost.rates import PUBLISHED, Efficiencies
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeGroup, NodeType

NODE = NodeType(
    "node", Gpu("gpu", 300e12, 80 * 2**30, 2e12, 108), 8, NetworkLink(2e11, 7e-6), NetworkLink(5e10, 2e-5)
)
CLUSTER = Cluster((NodeGroup(NODE, 64),))
SETTING = Setting(CLUSTER)
#: Far from what is published.
TRUE = Efficiencies(0.9, 0.35, 0.5, 1.1e-4, blend=0.2, sum_seconds=6e-5, step_seconds=1e-3)


def grid() -> tuple[MeasuredStep, ...]:
    """Layouts of small models on one node, none of them measured."""
    return tuple(
        MeasuredStep(tp * dp * pp, 8 * dp * samples, samples, hidden, 16, layers, 1024, tp, dp, pp, 1.0)
        for hidden in (1024, 2048)
        for layers in (8, 24)
        for tp, dp, pp in ((1, 2, 1), (1, 1, 4), (2, 1, 1), (2, 2, 2), (4, 2, 1), (8, 1, 1))
        for samples in (1, 4, 8)
    )


def fitted(
    rates: Efficiencies = PUBLISHED,
    inside: NetworkLink = NODE.inside,
    outside: NetworkLink = NODE.outside,
) -> Fitted:
    """Coefficients and links of the one kind of node."""
    node = replace(NODE, inside=inside, outside=outside)
    return Fitted(rates, Cluster((NodeGroup(node, 64),)))


def timed(
    steps: Sequence[MeasuredStep],
    rates: Efficiencies = PUBLISHED,
    inside: NetworkLink = NODE.inside,
    outside: NetworkLink = NODE.outside,
) -> tuple[MeasuredStep, ...]:
    """The same with the seconds that the model gives them."""
    seconds = StepModel(steps, SETTING).seconds(fitted(rates, inside, outside)).tolist()
    return tuple(replace(step, seconds=s) for step, s in zip(steps, seconds, strict=True))


def write_csv(path: Path, steps: Sequence[MeasuredStep]) -> Path:
    """A file as :func:`osdp.cluster.calibration.measured_step.read_steps` reads it."""
    rows = [
        (s.devices, s.global_batch, s.samples, s.hidden, s.heads, s.layers, s.sequence, s.tp, s.dp, s.pp)
        for s in steps
    ]
    lines = [",".join(map(str, (*row, 1e3 * s.seconds))) for row, s in zip(rows, steps, strict=True)]
    path.write_text("\ufeff" + "\r\n".join([",".join(COLUMNS), *lines]) + "\r\n", encoding="utf8")
    return path
