"""What ``osdp cluster plan`` and ``osdp cluster estimate`` are asked for, and what the planner calls it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from osdp.cli.models import changed_fields, parse_fields, resolve_shape
from osdp.cli.options import TrustCode
from osdp.cluster.calibration.calibrate import Calibration
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.file import load_cluster
from osdp.cluster.hardware import Cluster
from osdp.cluster.layer_profile import LayerProfile
from osdp.cluster.plan import CLUSTER_SCHEDULES, MIXED, RecomputeLayers, Workload
from osdp.cluster.search.space import LayoutSpace
from osdp.model.description import DTYPE_BYTES
from osdp.plan.schedules import SCHEDULE_KINDS
from osdp.text import parse_bytes

_STAGES = ("0", "1", "2", "3")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """Options of both commands: a transformer, a cluster, and what of the layout is given.

    What is ``None`` or empty is chosen by ``plan``; ``estimate`` takes the simplest.
    """

    model: Annotated[
        str,
        Option(
            help="name of a transformer, a JSON file of its configuration or numbers, or a described folder"
        ),
    ]
    cluster: Annotated[Path, Option(help="YAML or JSON file of the nodes there are")]
    global_batch: Annotated[int, Option(min=1, help="samples of a step")]
    seq: Annotated[int | None, Option(min=1, help="tokens of a sample")] = None
    settings: Annotated[list[str], Option("--set", help="number of the model, for example layers=40")] = (
        field(default_factory=list)
    )
    tp: Annotated[int | None, Option(min=1, help="ranks that compute each layer together")] = None
    pp: Annotated[int | None, Option(min=1, help="stages of a pipeline")] = None
    dp: Annotated[int | None, Option(min=1, help="data-parallel ranks")] = None
    micro_batch: Annotated[int | None, Option(min=1, help="samples of a microbatch")] = None
    schedule: Annotated[str | None, Option(help="order of the stages")] = None
    recompute: Annotated[str | None, Option("--recomputation", help="none, selective, full or mixed")] = None
    zero: Annotated[str | None, Option(help="stage of ZeRO, 0 to 3, or mixed: decided layer by layer")] = None
    token_slices: Annotated[int | None, Option(min=1, help="equal slices of each sequence")] = None
    flash: Annotated[
        bool | None,
        Option(
            "--flash/--no-flash", help="whether scores of attention are never written; as calibrated, or yes"
        ),
    ] = None
    overlap: Annotated[float, Option(help="part of the collectives that compute hides, 0 to 1")] = 0.0
    reserve: Annotated[str, Option(help="of each device, for the framework")] = "1GiB"
    calibration: Annotated[
        Path | None, Option(help="file that osdp cluster calibrate wrote, of these nodes")
    ] = None
    layer_times: Annotated[
        list[Path], Option(help="file that osdp cluster layers wrote; one for each kind of GPU")
    ] = field(default_factory=list)
    trust_code: TrustCode = False

    @property
    def fields(self) -> dict[str, Any]:
        """Numbers of the model that were set."""
        return parse_fields(self.settings)

    def prices(self) -> ClusterPrices:
        """The model and the cluster, priced.

        Raises:
            ValueError: A name or a file is wrong, or the calibration is of the other kind of attention.
        """
        found = None if self.calibration is None else Calibration.load(self.calibration)
        if found is not None and self.flash not in (None, found.flash):
            raise ValueError(
                f"{self.calibration} was fitted to steps with flash={found.flash}, and --"
                f"{'' if self.flash else 'no-'}flash was asked for; calibrate on such steps"
            )
        sizes = {} if self.seq is None else {"sequence": self.seq}
        shape = resolve_shape(self.model, {**sizes, **self.fields}, trust_code=self.trust_code)
        workload = Workload(
            shape=shape,
            global_batch=self.global_batch,
            flash=found.flash if found is not None else self.flash is not False,
            overlap=self.overlap,
            reserve=parse_bytes(self.reserve),
        )
        cluster = load_cluster(self.cluster)
        profiles = [LayerProfile.load(path) for path in self.layer_times]
        _require_measured(profiles, workload, cluster, changed_fields(self.model, self.fields))
        if found is None:
            return ClusterPrices(cluster, workload, profiles=profiles)
        return ClusterPrices(found.applied(cluster), workload, found.rates, profiles)

    def space(self, workload: Workload) -> LayoutSpace:
        """What is left to choose for a workload.

        Raises:
            ValueError: A schedule, a way to recompute or a stage of ZeRO is unknown.
        """
        if self.schedule not in (None, *CLUSTER_SCHEDULES):
            raise ValueError(
                f"schedule {self.schedule!r} is not known here; there are {', '.join(CLUSTER_SCHEDULES)}"
            )
        if self.schedule is not None and SCHEDULE_KINDS[self.schedule].splits_backward:
            raise ValueError(
                f"schedule {self.schedule!r} computes weight gradients in a separate pass, which 16-bit "
                "weights do not allow; the cluster planner assumes 16-bit weights"
            )
        if self.recompute not in (None, MIXED, *RecomputeLayers):
            raise ValueError(
                f"--recomputation {self.recompute}: there are {', '.join(RecomputeLayers)}, {MIXED}"
            )
        if self.recompute == RecomputeLayers.SELECTIVE and workload.flash:
            raise ValueError(
                "--recomputation selective drops the scores of attention, which flash attention never keeps; "
                "say --no-flash, or full"
            )
        if self.zero not in (None, MIXED, *_STAGES):
            raise ValueError(f"--zero {self.zero}: ZeRO has the stages {', '.join(_STAGES)}, and {MIXED}")
        space = LayoutSpace(
            tp=_only(self.tp), pp=_only(self.pp), dp=_only(self.dp), samples=_only(self.micro_batch)
        )
        if self.schedule is not None:
            space = replace(space, schedules=(self.schedule,))
        if self.token_slices is not None:
            space = replace(space, token_slices=(self.token_slices,))
        if self.recompute is not None:
            space = replace(space, recompute=(self.way_to_recompute,))
        return space if self.zero is None else replace(space, zero=(self.stage_of_zero,))

    @property
    def stage_of_zero(self) -> int | None:
        """The stage asked for, 0 by default; ``None`` if it is decided item by item."""
        return None if self.zero == MIXED else int(self.zero or 0)

    @property
    def way_to_recompute(self) -> RecomputeLayers | None:
        """What is computed again, nothing by default; likewise."""
        return None if self.recompute == MIXED else RecomputeLayers(self.recompute or "none")


def _require_measured(
    profiles: Sequence[LayerProfile], workload: Workload, cluster: Cluster, changed: set[str]
) -> None:
    """Refuse measured times that are not of these layers on these devices; all faults at once."""
    shape, here = workload.shape, [group.node.gpu.name for group in cluster.groups]
    faults = [
        f"layers of {found.model} were measured on {found.gpu}, not of {shape.name}"
        for found in profiles
        if found.model != shape.name
    ]
    faults += [
        f"layers on {found.gpu} are {found.hidden} wide, those of {shape.name} {shape.hidden}"
        for found in profiles
        if found.hidden != shape.hidden
    ]
    faults += [
        f"{found.gpu} is none of the cluster's {', '.join(here)}"
        for found in profiles
        if found.gpu not in here
    ]
    faults += [
        f"layers on {found.gpu} were measured in {found.dtype}, plans on a cluster compute in 16 bits; say "
        "osdp profile --param-dtype bfloat16"
        for found in profiles
        if DTYPE_BYTES.get(found.dtype) != workload.weight_bytes
    ]
    faults += [
        f"{count} files are of {gpu}; merge them by one call of osdp cluster layers"
        for gpu, count in Counter(found.gpu for found in profiles).items()
        if count > 1
    ]
    if profiles and (other := sorted(changed - {"layers", "name", "sequence"})):
        faults.append(f"--set {', '.join(other)} makes other layers than were measured")
    if faults:
        raise ValueError(f"--layer-times: {'; '.join(faults)}")


def _only(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)
