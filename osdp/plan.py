"""Plan: what was decided, what it is predicted to cost, and why. The only word both sides share."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from osdp import codec
from osdp.training import Training

if TYPE_CHECKING:
    from osdp.pipeline_plan import PipelinePlan

PLAN_VERSION = 5


class Mode(StrEnum):
    """How the parameters of an operator live on the data-parallel ranks; names as in PyTorch.

    The OSDP paper (IJCAI 2023, doi 10.24963/ijcai.2023/238) calls NO_SHARD "DP" and FULL_SHARD "ZDP".
    SHARD_GRAD_OP is FSDP2's: sharded outside forward and backward, whole from forward to backward.
    HYBRID_SHARD, the paper's group sharding, is FULL_SHARD inside each group and replication across groups.
    """

    NO_SHARD = "NO_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"

    @property
    def sharded(self) -> bool:
        """Whether each rank stores only a shard."""
        return self is not Mode.NO_SHARD


#: The modes that need no groups of ranks.
UNGROUPED = (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)


class Route(StrEnum):
    """How the collectives of a sharded unit go.

    The paper's communication with groups is ``TWO_STEP``: shards cross to the other groups once, and are
    gathered inside; gradients are reduced inside first. ``EXCHANGE`` replaces the backend's reduce-scatter by
    an exchange of shards and local sums, and the first step of a gather in two steps by an exchange.
    """

    FLAT = "flat"
    EXCHANGE = "exchange"
    TWO_STEP = "two_step"
    TWO_STEP_EXCHANGE = "two_step_exchange"

    @property
    def in_two_steps(self) -> bool:
        """Whether it goes across groups and inside of them one after the other."""
        return self in (Route.TWO_STEP, Route.TWO_STEP_EXCHANGE)

    @property
    def by_exchange(self) -> bool:
        """Whether reductions are exchanges with local sums."""
        return self in (Route.EXCHANGE, Route.TWO_STEP_EXCHANGE)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one operator.

    Attributes:
        operator: Its name.
        modules: FQNs of the modules that use it.
        parameters: FQNs of its parameters, the first name of each.
        nbytes: Its whole parameter bytes.
        mode: How it is sharded.
        reason: Why, with what the next-best choice would have cost.
        slices: In how many slices it runs; 1 if it is not split.
        sliced_by: What is cut: ``"output"`` or ``"input"`` features, or ``"rows"`` of a vocabulary.
        slices_kept: How many of the slices stay gathered from forward to backward, as under SHARD_GRAD_OP;
            the others are gathered again.
    """

    operator: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    nbytes: int
    mode: Mode
    reason: str = ""
    slices: int = 1
    sliced_by: str = ""
    slices_kept: int = 0

    def __post_init__(self) -> None:
        if self.slices < 1 or (self.slices > 1) != bool(self.sliced_by):
            raise ValueError(
                f"operator {self.operator!r} is said to run in {self.slices} slices of "
                f"{self.sliced_by or 'nothing'}"
            )
        if not 0 <= self.slices_kept <= (self.slices if self.slices > 1 and self.mode.sharded else 0):
            raise ValueError(
                f"operator {self.operator!r}, {self.mode} in {self.slices} slices, is said to keep "
                f"{self.slices_kept} of them gathered"
            )


@dataclass(frozen=True, slots=True)
class Unit:
    """Operators that share their collectives; contiguous in the trace, except for the root unit.

    Attributes:
        mode: Mode of all of them.
        operators: Their names, in trace order.
        modules: FQNs of the modules to wrap together: none contains another, and together they hold the
            parameters of the operators and of no other unit that is not wrapped before.
        root: Whether it is the root's unit: gathered before everything else and kept to the end.
        offloaded: Whether its shards, their gradients and optimizer states live in host memory.
        group_size: Ranks of a group, which are neighbours: those that HYBRID_SHARD shards over, or those that
            a route in two steps gathers inside of; 0 without groups.
        route: How its collectives go.
    """

    mode: Mode
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    root: bool = False
    offloaded: bool = False
    group_size: int = 0
    route: Route = Route.FLAT

    def __post_init__(self) -> None:
        grouped = self.mode is Mode.HYBRID_SHARD or self.route.in_two_steps
        if grouped != (self.group_size > 1) or (self.mode is Mode.HYBRID_SHARD and self.route.in_two_steps):
            raise ValueError(
                f"the unit of {', '.join(self.operators)} has groups of {self.group_size} ranks for "
                f"{self.mode} by a {self.route} route: HYBRID_SHARD and routes in two steps, one of the two, "
                "need groups of 2 or more, and nothing else has any"
            )
        if self.route is not Route.FLAT and not self.mode.sharded:
            raise ValueError(
                f"the unit of {', '.join(self.operators)} is NO_SHARD: it has no {self.route} route"
            )
        if self.offloaded and (self.root or not self.mode.sharded):
            where = "the root's" if self.root else self.mode.value
            raise ValueError(
                f"the unit of {', '.join(self.operators)} is {where}: only sharded units other than the "
                "root's can live in host memory"
            )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the judge expects of a step; seconds and bytes on the worst rank.

    Attributes:
        step_seconds: One optimizer step with all its microbatches.
        compute_seconds: Forward and backward.
        communication_seconds: Collectives that hold up compute, and what sticks out of the others.
        optimizer_seconds: The optimizer step.
        peak_bytes: Highest live tensor bytes.
        peak_moment: When that is.
        state_bytes: Parameters, gradients and optimizer states that live through the step.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    optimizer_seconds: float
    peak_bytes: int
    peak_moment: str
    state_bytes: int


@dataclass(frozen=True)
class Plan:
    """A training plan.

    Attributes:
        model: Fingerprint of the ModelDesc.
        device: Fingerprint of the DeviceInfo.
        training: The training it was made for; its local batch is a number.
        world_size: Data-parallel ranks.
        memory_limit: Bytes per device it was made for.
        reduce_each_microbatch: Whether gradients are reduced after every microbatch, or once a step.
        decisions: One per operator, in trace order.
        units: All units; every operator is in exactly one.
        recomputed: FQNs of the modules whose activations are computed again in backward.
        predicted: What the judge expects.
        measured_profile: Whether the prediction rests on measured segments.
        optimal: Whether it is proven best in the decision space.
        notes: Facts about the plan as a whole.
        version: Of this format.
    """

    model: str
    device: str
    training: Training
    world_size: int
    memory_limit: int
    reduce_each_microbatch: bool
    decisions: tuple[Decision, ...]
    units: tuple[Unit, ...]
    predicted: Prediction
    measured_profile: bool
    optimal: bool
    recomputed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise ValueError(f"plan format {self.version} is not the supported {PLAN_VERSION}; plan again")
        if self.training.local_batch is None:
            raise ValueError("the training of a plan needs a local batch")
        decided = [decision.operator for decision in self.decisions]
        placed = [name for unit in self.units for name in unit.operators]
        if sorted(decided) != sorted(placed) or len(set(decided)) != len(decided):
            odd = sorted(set(decided) ^ set(placed)) or sorted({n for n in placed if placed.count(n) > 1})
            raise ValueError(f"every operator must be decided once and be in one unit; not so: {odd}")
        cut = {decision.operator for decision in self.decisions if decision.slices > 1}
        for barred, where in (("offloaded", "live in host memory"), ("group_size", "have groups of ranks")):
            held = [n for unit in self.units if getattr(unit, barred) for n in unit.operators if n in cut]
            if held:
                raise ValueError(f"operators in slices cannot {where}: {', '.join(held)}")

    @cached_property
    def modes(self) -> dict[str, Mode]:
        """Mode of each operator."""
        return {decision.operator: decision.mode for decision in self.decisions}

    @property
    def local_batch(self) -> int:
        """Samples per device and microbatch."""
        assert self.training.local_batch is not None
        return self.training.local_batch

    @property
    def global_batch(self) -> int:
        """Samples of all devices in one step."""
        return self.world_size * self.local_batch * self.training.microbatches

    @property
    def samples_per_second(self) -> float:
        """Predicted training throughput over all ranks."""
        return self.global_batch / self.predicted.step_seconds

    @property
    def is_mixed(self) -> bool:
        """Whether operators live in more than one way: modes, slices, recomputation."""
        ways = {(decision.mode, decision.slices, decision.slices_kept) for decision in self.decisions}
        return len(ways) > 1 or len(self.recomputed) > 0

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan | PipelinePlan":
        """The plan saved at ``path``; that of a pipeline if it has stages.

        Raises:
            ValueError: It is not a plan, or of an unsupported version.
        """
        # Plans of pipelines are made of these.
        from osdp.pipeline_plan import PipelinePlan, has_stages

        return PipelinePlan.load(path) if has_stages(path) else codec.load(cls, path)

    def __str__(self) -> str:
        # The table is a report; values themselves stay free of formatting.
        from osdp.report.table import plan_table

        return plan_table(self)
