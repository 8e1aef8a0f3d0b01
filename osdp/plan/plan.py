"""Plan: what holds for the whole training, and the sharding plan of each of its stages.

It is the interface between planner and runtime: neither knows anything else of the other.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from osdp.codec import Savable, quote, read_json
from osdp.model.dataflow import Transfer
from osdp.model.training import Training
from osdp.plan.basis import Basis
from osdp.plan.dims import ParallelDims
from osdp.plan.schedule import Schedule, make_schedule
from osdp.plan.sharding import Decision, Mode, Prediction, ShardingPlan, Unit
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.token_slices import TokenSlices

if TYPE_CHECKING:
    from osdp.plan.explanation import PlanExplanation
    from osdp.plan.measured import MemoryReport

#: Format 6 unites two earlier ones: format 5 of plans of a whole model, and format 1 of plans with stages.
PLAN_VERSION = 6

#: How a note begins that says what of a plan was scaled, not measured.
NOT_MEASURED = "not measured: "
#: How the note begins that says how far from the best a plan may be that is not proven.
PROVEN_WITHIN = "proven to be within "


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, or the whole model if there is one.

    Attributes:
        modules: FQNs of the modules it keeps, in order; those of other stages are removed. ``("",)``, the
            root, if the model is not cut.
        sharding: Sharding of its operators over the data-parallel ranks, with its predicted cost.
        loose: FQNs of its parameters that belong to none of these modules, but to the code around them.
        forward_seconds: Compute and collectives in the forward of one microbatch.
        backward_seconds: The same in its backward.
        in_flight: Number of microbatches whose activations it holds at once.
        notes: Facts about the search of this stage.
    """

    modules: tuple[str, ...]
    sharding: ShardingPlan
    loose: tuple[str, ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    in_flight: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages hold a copy of.

    Attributes:
        stages: These stages, the owner first: checkpoints and gradient norms count only the owner's copy.
        names: First FQN of the parameter in each of these stages.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan(Savable):
    """A training plan of one or more stages, each of which is sharded by itself.

    A plan of one stage has what its ShardingPlan has, under the same names: ``plan.decisions`` is
    ``plan.stages[0].sharding.decisions``. With several stages these raise ``ValueError``.

    Attributes:
        model: Fingerprint of the ModelDesc.
        device: Fingerprint of the DeviceInfo.
        training: The training it was made for, with a local batch that is not ``None``; its microbatches are
            those of the pipeline.
        stages: All stages, in model order: ``pp`` of them or, for interleaved schedules, a multiple of it.
        memory_limit: Bytes per device it was made for.
        predicted: Simulated step; each quantity is that of the rank on which it is worst.
        optimal: Whether it is proven optimal in the decision space.
        measured_profile: Whether the prediction is based on measured segments.
        dp: Number of data-parallel ranks of each stage.
        pp: Number of ranks of a pipeline.
        tp: Number of tensor-parallel ranks of each stage.
        schedule: Name of the schedule.
        transfers: Values sent between stages.
        ties: Parameters that several stages hold a copy of.
        bubble: Predicted fraction of the ranks' time that is idle, from 0 to 1.
        peaks: Predicted peak bytes of each rank of a pipeline; empty if the model is not cut.
        tensor: Tensor-parallel plan of the ``tp`` ranks; ``None`` if ``tp`` is 1.
        token_slices: Slices into which ``train_step`` cuts sequences by default; ``None`` leaves them whole.
            Predictions are for whole sequences.
        batch_shapes: Shape of the largest tensor of each batch that it was made for; empty if not known.
        notes: Facts about the plan as a whole.
        basis: What it was searched from; ``None`` if the model is cut, or if it was not searched.
        version: Format version.
    """

    model: str
    device: str
    training: Training
    stages: tuple[StagePlan, ...]
    memory_limit: int
    predicted: Prediction
    optimal: bool
    measured_profile: bool
    dp: int
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    transfers: tuple[Transfer, ...] = ()
    ties: tuple[Tie, ...] = ()
    bubble: float = 0.0
    peaks: tuple[int, ...] = ()
    tensor: TensorParallelPlan | None = None
    token_slices: TokenSlices | None = None
    batch_shapes: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    # Plans that decide alike are equal, whatever they were found from.
    basis: Basis | None = field(default=None, compare=False, repr=False)
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise ValueError(f"plan format {self.version} is not the supported {PLAN_VERSION}; plan again")
        if self.training.local_batch is None:
            raise ValueError("the training of a plan needs a local batch; set Training(local_batch=...)")
        if not self.stages or len(self.stages) % self.pp:
            raise ValueError(
                f"{len(self.stages)} stages cannot be placed evenly on {self.pp} pipeline ranks; use a "
                f"multiple of {self.pp} stages"
            )
        twice = sorted({module for module in self.modules if self.modules.count(module) > 1})
        if twice:
            raise ValueError(
                f"every module must belong to exactly one stage; these belong to several: {', '.join(twice)}"
            )

    @property
    def dims(self) -> ParallelDims:
        """Degrees of parallelism."""
        return ParallelDims(self.pp, self.dp, self.tp)

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes the whole model: one stage, and no tensor parallelism."""
        return len(self.stages) == 1 and self.tp == 1

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank of a pipeline."""
        return len(self.stages) // self.pp

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.dims.world_size

    @property
    def local_batch(self) -> int:
        """Samples of a microbatch on one data-parallel rank."""
        assert self.training.local_batch is not None
        return self.training.local_batch

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.dp * self.local_batch * self.training.microbatches

    @property
    def samples_per_second(self) -> float:
        """Predicted training throughput over all ranks."""
        return self.global_batch / self.predicted.step_seconds

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """FQNs of the modules of all stages."""
        return tuple(module for stage in self.stages for module in stage.modules)

    # What the ShardingPlan of the only stage has

    @property
    def sharding(self) -> ShardingPlan:
        """The sharding plan of the only stage.

        Raises:
            ValueError: There are several stages.
        """
        if len(self.stages) > 1:
            raise ValueError(
                f"the plan has {len(self.stages)} stages, each with decisions of its own: read "
                "plan.stages[i].sharding, and print(plan.stage_table(i))"
            )
        return self.stages[0].sharding

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the only stage, one per operator, in trace order."""
        return self.sharding.decisions

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units of the only stage."""
        return self.sharding.units

    @property
    def modes(self) -> dict[str, Mode]:
        """Sharding strategy of each operator of the only stage, by name."""
        return self.sharding.modes

    @property
    def recomputed(self) -> tuple[str, ...]:
        """FQNs of the modules of the only stage whose activations are recomputed in backward."""
        return self.sharding.recomputed

    @property
    def reduce_each_microbatch(self) -> bool:
        """Whether gradients of the only stage are reduced after every microbatch instead of once per step."""
        return self.sharding.reduce_each_microbatch

    @property
    def is_mixed(self) -> bool:
        """Whether operators of the only stage have different strategies, or any module is recomputed."""
        return self.sharding.is_mixed

    def with_sharding(self, **changes: Any) -> "Plan":
        """This plan of one stage with changes to its ShardingPlan.

        Changes to ``predicted`` and ``optimal`` apply to the plan as well; nothing is predicted again.

        Raises:
            ValueError: There are several stages, or the changes contradict each other.
        """
        stage = replace(self.stages[0], sharding=replace(self.sharding, **changes))
        own = {name: changes[name] for name in ("predicted", "optimal") if name in changes}
        return replace(self, stages=(stage,), **own)

    def make_schedule(
        self, num_microbatches: int | None = None, name: str | None = None, *, num_slices: int = 1
    ) -> Schedule:
        """Make its schedule, or another one with the same number of stages per rank.

        Args:
            num_microbatches: Microbatches of a step; as planned if ``None``.
            name: Name of the schedule; as planned if ``None``.
            num_slices: Slices of each sequence.
        """
        return make_schedule(
            name or self.schedule,
            self.pp,
            num_microbatches or self.training.microbatches,
            stages_per_rank=self.stages_per_rank,
            num_slices=num_slices,
        )

    @property
    def summary(self) -> str:
        """One line: the modes of all operators or, if the model is cut, the degrees and the schedule."""
        if self.is_whole:
            return ", ".join(f"{name}={mode}" for name, mode in self.modes.items())
        return f"pp={self.pp}, dp={self.dp}, tp={self.tp}, schedule={self.schedule}"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the plan saved at ``path``.

        Raises:
            ValueError: The file holds no plan, or one of another format.
        """
        content = read_json(path)
        version = content.get("version", PLAN_VERSION) if isinstance(content, dict) else PLAN_VERSION
        if version != PLAN_VERSION:
            raise ValueError(
                f"{path}: a plan of format {quote(version)}; this version of osdp reads format "
                f"{PLAN_VERSION}: create it again with osdp plan, osdp cluster plan --out, make_plan(...), "
                "or OSDP(...) without plan="
            )
        return super().load(path)

    def explain(self, unit: str | None = None) -> "PlanExplanation":
        """Why it is as it is: see :func:`osdp.explain.unit_choices.explain`."""
        from osdp.explain.unit_choices import explain

        return explain(self, unit)

    def report(self, path: str | Path, measured: "MemoryReport | None" = None) -> None:
        """Write a page about it to ``path``, HTML in one file: see :mod:`osdp.report.html.page`."""
        from osdp.explain.collect import collect
        from osdp.report.html.page import html_page

        Path(path).write_text(html_page(collect(self, measured)), encoding="utf8")

    def _repr_html_(self) -> str:
        # What a notebook shows.
        from osdp.plan.explanation import PlanReport
        from osdp.report.html.page import html_summary

        return html_summary(PlanReport(self))

    def stage_table(self, stage: int) -> str:
        """Text of one stage: its units with the reasons of their decisions."""
        from osdp.report.plan_table import stage_table

        return stage_table(self, stage)

    def __str__(self) -> str:
        # The table is a report; values themselves stay free of formatting.
        from osdp.report.plan_table import plan_table

        return plan_table(self)
