"""Options of ``osdp cluster plan`` and ``osdp cluster estimate``, as values of the planner."""

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
from osdp.cluster.export.frameworks import MEGATRON_SCHEDULES
from osdp.cluster.file import load_cluster
from osdp.cluster.hardware import Cluster
from osdp.cluster.layer_profile import LayerProfile
from osdp.cluster.measured_layout import load_measured
from osdp.cluster.plan import CLUSTER_SCHEDULES, MIXED, RecomputeLayers, Workload
from osdp.cluster.search.measured_times import MeasuredTimes
from osdp.cluster.search.space import NODE, LayoutSpace
from osdp.cluster.targets import Target, as_trained_by
from osdp.model.description import DTYPE_BYTES
from osdp.plan.schedules import ONE_STAGE, SCHEDULE_KINDS
from osdp.text import parse_bytes

#: The schedule that takes any number of stages a rank.
INTERLEAVED = "interleaved"

_STAGES = ("0", "1", "2", "3")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """Options of both commands: a transformer, a cluster, and the given parts of the layout.

    ``plan`` chooses what is ``None`` or empty; ``estimate`` uses the simplest value.
    """

    model: Annotated[
        str,
        Option(
            help="name of a transformer, JSON file with its configuration or dimensions, or folder written "
            "by osdp profile"
        ),
    ]
    cluster: Annotated[Path, Option(help="YAML or JSON file that lists the nodes")]
    global_batch: Annotated[int, Option(min=1, help="samples per step")]
    seq: Annotated[int | None, Option(min=1, help="tokens per sample")] = None
    settings: Annotated[list[str], Option("--set", help="dimension of the model, for example layers=40")] = (
        field(default_factory=list)
    )
    tp: Annotated[int | None, Option(min=1, help="tensor-parallel degree")] = None
    pp: Annotated[int | None, Option(min=1, help="pipeline degree: number of stages")] = None
    dp: Annotated[int | None, Option(min=1, help="data-parallel degree")] = None
    cp: Annotated[
        int | None,
        Option(min=1, help="context-parallel degree: ranks that share each sequence; not run by osdp itself"),
    ] = None
    ep: Annotated[
        int | None,
        Option(min=1, help="expert-parallel degree: ranks of dp x cp that divide experts; not run by osdp"),
    ] = None
    shard_degree: Annotated[
        int | None,
        Option(
            min=2,
            help="data-parallel ranks among which a ZeRO stage shards, with copies in other groups (HSDP); "
            "by default all, and for --target fsdp those of a node where that is faster",
        ),
    ] = None
    micro_batch: Annotated[int | None, Option(min=1, help="samples per microbatch")] = None
    schedule: Annotated[str | None, Option(help="pipeline schedule")] = None
    virtual_stages: Annotated[
        int | None,
        Option(min=2, help="stages of each pipeline rank if interleaved, by default 2"),
    ] = None
    recompute: Annotated[
        str | None,
        Option(
            "--recomputation", help="recomputation: none, selective, full, or mixed: chosen layer by layer"
        ),
    ] = None
    zero: Annotated[str | None, Option(help="ZeRO stage, 0 to 3, or mixed: chosen layer by layer")] = None
    token_slices: Annotated[int | None, Option(min=1, help="number of equal slices of each sequence")] = None
    flash: Annotated[
        bool | None,
        Option(
            "--flash/--no-flash",
            help="whether FlashAttention is used; by default as calibrated, otherwise yes (but not for "
            "Megatron-LM on GPUs before Ampere)",
        ),
    ] = None
    target: Annotated[
        Target | None,
        Option(
            help="framework that is to train the plan, for what it keeps per parameter; by default 16-bit "
            "gradients and 12 bytes of states"
        ),
    ] = None
    sequence_parallel: Annotated[
        bool,
        Option(
            "--sequence-parallel",
            help="split norms, dropouts and residuals over the tensor-parallel ranks as well",
        ),
    ] = False
    overlap: Annotated[
        float | None,
        Option(
            help="fraction of the collectives of weights and gradients that overlaps with compute, 0 to 1; "
            "by default what --target hides"
        ),
    ] = None
    tensor_overlap: Annotated[
        float, Option(help="the same of tensor-parallel collectives; Megatron-LM needs --tp-comm-overlap")
    ] = 0.0
    reserve: Annotated[str, Option(help="memory of a device's context, without communicators")] = "640MiB"
    certain: Annotated[
        bool | None,
        Option(
            "--certain/--no-certain",
            help="take only layouts that fit at the end of the interval of their peak, none with (?); by "
            "default where there are some",
        ),
    ] = None
    calibration: Annotated[
        Path | None, Option(help="file written by osdp cluster calibrate, for these nodes")
    ] = None
    measured: Annotated[
        list[Path],
        Option(help="folder of --measure after osdp cluster measure, whose times count; may be repeated"),
    ] = field(default_factory=list)
    layer_times: Annotated[
        list[Path], Option(help="file written by osdp cluster layers; one for each kind of GPU")
    ] = field(default_factory=list)
    trust_code: TrustCode = False

    @property
    def fields(self) -> dict[str, Any]:
        """Dimensions of the model given by ``--set``."""
        return parse_fields(self.settings)

    def prices(self) -> ClusterPrices:
        """Costs of the model on the cluster.

        Raises:
            ValueError: A name or a file is wrong, or the calibration is for the other kind of attention.
        """
        found = None if self.calibration is None else Calibration.load(self.calibration)
        if found is not None and self.flash not in (None, found.flash):
            raise ValueError(
                f"{self.calibration} was fitted to steps with flash={found.flash}, and --"
                f"{'' if self.flash else 'no-'}flash was asked for; calibrate on such steps"
            )
        if self.seq not in (None, self.fields.get("sequence", self.seq)):
            raise ValueError(f"--seq {self.seq} and --set sequence={self.fields['sequence']} contradict")
        sizes = {} if self.seq is None else {"sequence": self.seq}
        shape = resolve_shape(self.model, {**sizes, **self.fields}, trust_code=self.trust_code)
        workload = Workload(
            shape=shape,
            global_batch=self.global_batch,
            flash=found.flash if found is not None else self.flash is not False,
            sequence_parallel=self.sequence_parallel,
            tensor_overlap=self.tensor_overlap,
            reserve=parse_bytes(self.reserve),
        )
        if self.target is not None:
            workload = as_trained_by(workload, self.target)
        if self.tensor_overlap and self._is_megatron and not self.sequence_parallel:
            raise ValueError(
                "--tensor-overlap: Megatron-LM overlaps tensor-parallel collectives with --sequence-parallel "
                "alone; add that"
            )
        if self.overlap is not None:
            workload = replace(workload, overlap=self.overlap, sharded_overlap=None)
        cluster = load_cluster(self.cluster)
        if self.half == "bfloat16" and cluster.half != "bfloat16":
            slow = ", ".join(group.node.gpu.name for group in cluster.groups if not group.node.gpu.bfloat16)
            raise ValueError(f"--target {self.target} computes in bfloat16, which {slow} does not have")
        if self.flash is not False and found is None and cluster.half == "float16" and self._is_megatron:
            # Its kernels of FlashAttention are for Ampere and later (Transformer Engine, flash-attn 2).
            if self.flash:
                older = ", ".join(g.node.gpu.name for g in cluster.groups if not g.node.gpu.bfloat16)
                raise ValueError(f"--flash: Megatron-LM has no FlashAttention for {older}; leave it out")
            workload = replace(workload, flash=False)
        profiles = [LayerProfile.load(path) for path in self.layer_times]
        _require_measured(profiles, workload, cluster, changed_fields(self.model, self.fields))
        certain = self.certain is not False
        if found is None:
            return ClusterPrices(cluster, workload, profiles=profiles, certain=certain)
        return ClusterPrices(found.apply_to(cluster), workload, found.rates, profiles, certain=certain)

    def measured_times(self, prices: ClusterPrices) -> MeasuredTimes:
        """What the layouts of ``--measured`` say about the times of all.

        Raises:
            ValueError: A path has none, or they are of another model, batch or cluster.
        """
        return MeasuredTimes(prices, load_measured(self.measured))

    @property
    def half(self) -> str | None:
        """The 16-bit format that the target computes in; ``None`` if it says none."""
        names = {"bf16": "bfloat16", "fp16": "float16"}
        return None if self.target is None else names.get(self.target.rpartition("-")[2])

    @property
    def _is_megatron(self) -> bool:
        return self.target in (Target.MEGATRON_BF16, Target.MEGATRON_FP16)

    def space(self, workload: Workload) -> LayoutSpace:
        """Choices that the options leave open.

        Raises:
            ValueError: A schedule, a kind of recomputation or a ZeRO stage is unknown or not possible.
        """
        if self.schedule not in (None, *CLUSTER_SCHEDULES):
            raise ValueError(
                f"the cluster planner does not support schedule {self.schedule!r}; it supports "
                f"{', '.join(CLUSTER_SCHEDULES)}"
            )
        if self.schedule is not None and SCHEDULE_KINDS[self.schedule].splits_backward:
            raise ValueError(
                f"schedule {self.schedule!r} computes weight gradients in a separate pass, which 16-bit "
                "weights do not allow; the cluster planner assumes 16-bit weights"
            )
        if self.virtual_stages is not None and self.schedule not in (None, INTERLEAVED):
            raise ValueError(
                f"--virtual-stages {self.virtual_stages} needs --schedule {INTERLEAVED}, not {self.schedule}"
            )
        if self.virtual_stages is not None and self.pp == 1:
            raise ValueError(f"--virtual-stages {self.virtual_stages} needs several stages, but --pp is 1")
        if self.recompute not in (None, MIXED, *RecomputeLayers):
            raise ValueError(
                f"--recomputation {self.recompute}: there are {', '.join(RecomputeLayers)}, {MIXED}"
            )
        if self.recompute == RecomputeLayers.SELECTIVE and workload.flash:
            raise ValueError(
                "--recomputation selective recomputes attention scores, which FlashAttention never stores; "
                "use --no-flash, or --recomputation full"
            )
        if self.zero not in (None, MIXED, *_STAGES):
            raise ValueError(f"--zero {self.zero}: ZeRO has the stages {', '.join(_STAGES)}, and {MIXED}")
        space = LayoutSpace(
            tp=_only(self.tp),
            pp=_only(self.pp),
            dp=_only(self.dp),
            cp=_only(self.cp),
            ep=_only(self.ep),
            samples=_only(self.micro_batch),
        )
        if self._is_megatron:
            space = self._as_megatron_runs(space, workload)
        elif self.target is not None:
            space = self._as_others_run(space)
        if self.schedule is not None:
            space = replace(space, schedules=(self.schedule,))
        if self.virtual_stages is not None:
            space = replace(space, schedules=(INTERLEAVED,), virtual_stages=(self.virtual_stages,))
        if self.token_slices is not None:
            space = replace(space, token_slices=(self.token_slices,))
        if self.recompute is not None:
            space = replace(space, recompute=(self.recompute_layers,))
        if self.shard_degree is not None:
            stages = tuple(stage for stage in space.zero if stage)
            space = replace(space, zero=stages, shard_degrees=(self.shard_degree,))
        return space if self.zero is None else replace(space, zero=(self.zero_stage,))

    def _as_megatron_runs(self, space: LayoutSpace, workload: Workload) -> LayoutSpace:
        """Without what Megatron-LM has not: sharded gradients and weights, token slices, choices by layer.

        What is asked for is kept: exports tell that it is not expressed.

        Raises:
            ValueError: It refuses to train what is asked for.
        """
        if workload.shape.decoder_layers:
            # pretrain_t5.py refuses stages, as of commit 00caa53.
            if self.pp not in (None, 1):
                raise ValueError(f"Megatron-LM trains encoder-decoders in one stage, but --pp is {self.pp}")
            space = replace(space, pp=(1,))
        space = replace(
            space,
            zero=(0, 1),
            whole_groups=True,
            token_slices=(1,),
            recompute=tuple(kind for kind in space.recompute if kind is not None),
            schedules=tuple(name for name in space.schedules if name in MEGATRON_SCHEDULES),
        )
        if workload.shape.experts and not workload.sequence_parallel:
            if self.tp not in (None, 1):
                raise ValueError(
                    "Megatron-LM trains experts beside tensor parallelism with sequence parallelism alone: "
                    "add --sequence-parallel"
                )
            space = replace(space, tp=(1,))
        return space

    def _as_others_run(self, space: LayoutSpace) -> LayoutSpace:
        """Without what DeepSpeed or torchtitan has not; what is asked for is kept, as for Megatron-LM."""
        space = replace(
            space,
            token_slices=(1,),
            recompute=tuple(kind for kind in space.recompute if kind is not None),
            zero=tuple(stage for stage in space.zero if stage is not None),
        )
        if self.target is Target.FSDP:
            # It shards gradients with states. Beside pipelines ZeRO 3 is what ZeRO 2 is.
            zero = tuple(stage for stage in space.zero if stage != 1)
            space = replace(space, zero=zero, shard_degrees=(0, NODE), torch_schedules=True)
            return space if self.zero is not None else replace(space, unstaged_zero=(3,))
        # Its PipelineModule refuses ZeRO 2 and 3, and its tensor parallelism ZeRO 3 (as exports tell).
        space = replace(space, schedules=(ONE_STAGE,), cp=space.cp or (1,))
        return space if self.zero is not None else replace(space, unstaged_zero=(2, 3), unsplit_zero=(3,))

    @property
    def schedule_name(self) -> str:
        """Schedule of an estimate: the one given, interleaved for several stages a rank, otherwise 1F1B."""
        return self.schedule or (INTERLEAVED if self.virtual_stages else ONE_STAGE)

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage, 0 by default; ``None`` if it is chosen item by item."""
        return None if self.zero == MIXED else int(self.zero or 0)

    @property
    def recompute_layers(self) -> RecomputeLayers | None:
        """Recomputation, none by default; ``None`` if it is chosen item by item."""
        return None if self.recompute == MIXED else RecomputeLayers(self.recompute or "none")


def _require_measured(
    profiles: Sequence[LayerProfile], workload: Workload, cluster: Cluster, changed: set[str]
) -> None:
    """Check that measured times are for these layers on these devices; all faults are listed."""
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
        f"layers on {found.gpu} were measured in {found.dtype}, the cluster planner assumes 16 bits: "
        "use osdp profile --param-dtype bfloat16"
        for found in profiles
        if DTYPE_BYTES.get(found.dtype) != workload.weight_bytes
    ]
    faults += [
        f"{count} files are of {gpu}; merge them by one call of osdp cluster layers"
        for gpu, count in Counter(found.gpu for found in profiles).items()
        if count > 1
    ]
    if profiles and shape.experts:
        faults.append(f"{shape.name} has experts, and osdp cluster layers measures layers of one kind")
    if profiles and (other := sorted(changed - {"layers", "name", "sequence"})):
        faults.append(f"--set {', '.join(other)} changes the layers that were measured")
    if faults:
        raise ValueError(f"--layer-times: {'; '.join(faults)}")


def _only(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)
