"""MeasuredLayout: what a step of a cluster plan took on the devices that it is for."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan, Workload
from osdp.codec import Savable

#: Names of the files of a layout to measure, and of what its steps took, which lie in the same folder.
PLANNED, MEASURED = "planned.json", "measured.json"

#: Largest deviation that is told: beyond it a step says nothing about the next one.
MOST_DEVIATION = 100.0


@dataclass(frozen=True, slots=True)
class PlannedLayout(Savable):
    """A cluster plan with what it was made for.

    Attributes:
        plan: The plan.
        workload: Model, batch and precision.
        cluster: Its cluster.
        plan_fingerprint: :func:`osdp.codec.fingerprint` of the plan that runs it.
        departures: Where the plan that runs differs from the layout. Its time then tells what that plan
            takes, and nothing about other layouts.
    """

    plan: ClusterPlan
    workload: Workload
    cluster: Cluster
    plan_fingerprint: str
    departures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredLayout(Savable):
    """Measured steps of a cluster plan.

    Attributes:
        planned: The plan, as predicted.
        seconds: Median seconds of a step; ``None`` if a device ran out of memory.
        deviation: Standard deviation of a step's seconds, as a share of the median.
        steps: Number of measured steps.
        peak_bytes: Memory in use on the fullest device, context and communicators included; ``None`` where
            that is not told.
        devices: Names of the devices that it ran on.
    """

    planned: PlannedLayout
    seconds: float | None
    deviation: float = 0.0
    steps: int = 0
    peak_bytes: int | None = None
    devices: tuple[str, ...] = ()

    @property
    def plan(self) -> ClusterPlan:
        """The plan, as predicted."""
        return self.planned.plan

    def __post_init__(self) -> None:
        known = self.seconds is None or (self.seconds > 0 and self.steps > 0)
        if not (known and 0 <= self.deviation <= MOST_DEVIATION):
            raise ValueError(
                "a measured layout has positive seconds, at least 1 step and a deviation of 0 to "
                f"{MOST_DEVIATION:g} times the median; got "
                f"seconds={self.seconds}, steps={self.steps}, deviation={self.deviation}"
            )


def kinds_of(cluster: Cluster) -> tuple[str, ...]:
    """Kinds of nodes of a cluster, with their numbers of devices."""
    return tuple(f"{group.node.name} with {group.node.devices} devices" for group in cluster.groups)


def load_measured(paths: Iterable[Path]) -> tuple[MeasuredLayout, ...]:
    """The measured layouts of files, and of all files named :data:`MEASURED` in and below folders.

    Raises:
        ValueError: A path holds none; all such paths are listed.
    """
    found: list[Path] = []
    faults = []
    for path in paths:
        files = sorted(path.rglob(MEASURED)) if path.is_dir() else [path] * path.exists()
        found += [file.resolve() for file in files]
        if not files:
            faults.append(f"{path} has no {MEASURED}")
    if faults:
        raise ValueError(
            f"{'; '.join(faults)}: osdp cluster measure writes it, for the layouts of "
            "osdp cluster plan --measure FOLDER"
        )
    # No two runs take the same times: a copied file is one measurement.
    return tuple(dict.fromkeys(MeasuredLayout.load(path) for path in dict.fromkeys(found)))
