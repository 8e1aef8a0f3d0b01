"""ShardingPlan: the decision for each operator of a model or a stage, its predicted cost and its reason."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property


class Mode(StrEnum):
    """Sharding strategy of an operator over the data-parallel ranks; names as in PyTorch's ShardingStrategy.

    The OSDP paper (IJCAI 2023, doi 10.24963/ijcai.2023/238) calls NO_SHARD "DP" and FULL_SHARD "ZDP".
    SHARD_GRAD_OP is FSDP2's: sharded outside forward and backward, unsharded from forward to backward.
    SHARD_OPTIMIZER keeps whole parameters on every rank and shards their optimizer states (ZeRO's stage 1, as
    ``torch.distributed.optim.ZeroRedundancyOptimizer`` does by whole parameters): gradients are reduced in
    buckets, each rank updates its shard, and shards are gathered once a step.
    HYBRID_SHARD, the paper's group sharding, is FULL_SHARD inside each group and replication across groups.

    What a mode means is written where it counts. A new one has to be added to the arrays in
    ``osdp.cost.sharding`` (``strategies``, ``units``, ``unit_costs``, ``memory``, ``time``), to the units
    that the search offers (``candidates``, ``initial_plans`` and ``explain`` of ``osdp.search.sharding``),
    and to what runs it (``osdp.runtime.sharding.fsdp_units``).
    """

    NO_SHARD = "NO_SHARD"
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"

    @property
    def sharded(self) -> bool:
        """Whether each rank stores only a shard of the parameters."""
        return self not in (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER)


#: The modes that need no groups of ranks.
UNGROUPED = (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)


class Route(StrEnum):
    """Algorithm of the collectives of a sharded unit.

    The paper's communication with groups is ``TWO_STEP``: shards are sent to the other groups once and are
    gathered inside each group; gradients are reduced inside the groups first. ``EXCHANGE`` replaces the
    backend's reduce-scatter by an exchange of shards and local sums, and the first step of a two-step
    all-gather by an exchange; ``EXCHANGE_ALL`` the all-gather in one step, too. Gradients of SHARD_OPTIMIZER
    are all-reduced (``FLAT``) or exchanged.
    """

    FLAT = "flat"
    EXCHANGE = "exchange"
    EXCHANGE_ALL = "exchange_all"
    TWO_STEP = "two_step"
    TWO_STEP_EXCHANGE = "two_step_exchange"

    @property
    def in_two_steps(self) -> bool:
        """Whether it communicates across groups and inside them in two successive steps."""
        return self in (Route.TWO_STEP, Route.TWO_STEP_EXCHANGE)

    @property
    def by_exchange(self) -> bool:
        """Whether it reduces by an exchange of shards and local sums."""
        return self in (Route.EXCHANGE, Route.EXCHANGE_ALL, Route.TWO_STEP_EXCHANGE)

    @property
    def gathers_by_exchange(self) -> bool:
        """Whether its all-gather, in one step, is an exchange: from each rank to every other, into place."""
        return self is Route.EXCHANGE_ALL


class MatrixStep(StrEnum):
    """Who orthogonalizes the matrices of an operator that an optimizer of whole matrices steps.

    One rank, to which the others send their parts, or every rank, from parts that all gather.
    """

    OWNED = "owned"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for one operator.

    Attributes:
        operator: Its name.
        modules: FQNs of the modules that use it.
        parameters: FQNs of its parameters, the first name of each tied one.
        nbytes: Bytes of its unsharded parameters.
        mode: Its sharding strategy.
        reason: Why it was chosen, with the cost of the next-best choice.
        slices: Number of slices it runs in; 1 if it is not split.
        sliced_by: The dimension that is cut: ``"output"`` or ``"input"`` features, or ``"rows"`` of a
            vocabulary.
        slices_kept: Number of slices that stay unsharded from forward to backward, as under SHARD_GRAD_OP;
            the others are gathered again in backward.
        matrix_step: How its matrices are stepped; ``None`` if element by element.
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
    matrix_step: MatrixStep | None = None

    def __post_init__(self) -> None:
        if self.slices < 1 or (self.slices > 1) != bool(self.sliced_by):
            raise ValueError(
                f"operator {self.operator!r} has slices={self.slices} and sliced_by={self.sliced_by!r}: "
                "slices must be at least 1, and sliced_by is set if and only if there are several"
            )
        if not 0 <= self.slices_kept <= (self.slices if self.slices > 1 and self.mode.sharded else 0):
            raise ValueError(
                f"operator {self.operator!r} ({self.mode}, {self.slices} slices) has slices_kept="
                f"{self.slices_kept}: only a sharded operator in slices keeps slices unsharded, at most all"
            )


@dataclass(frozen=True, slots=True)
class Unit:
    """Operators that share their collectives; contiguous in the trace, except for the root unit.

    Attributes:
        mode: Sharding strategy of all of them.
        operators: Their names, in trace order.
        modules: FQNs of the modules to wrap together: none contains another, and together they hold the
            parameters of these operators and of no other unit that has not been wrapped before.
        root: Whether it is the root unit: gathered before everything else and unsharded until the end.
        offloaded: Whether its shards, their gradients and their optimizer states are kept in host memory.
        group_size: Number of neighbouring ranks in a group: those that HYBRID_SHARD shards over, or those
            inside which a two-step route gathers; 0 without groups.
        route: Algorithm of its collectives.
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
                f"the unit of {', '.join(self.operators)} has group_size={self.group_size} with {self.mode} "
                f"and route {self.route}: HYBRID_SHARD and two-step routes need groups of 2 or more ranks "
                "and exclude each other; every other unit has group_size=0"
            )
        routes = tuple(Route)
        if not self.mode.sharded:
            routes = (Route.FLAT, Route.EXCHANGE) if self.mode is Mode.SHARD_OPTIMIZER else (Route.FLAT,)
        if self.route not in routes:
            raise ValueError(
                f"the unit of {', '.join(self.operators)} is {self.mode}, which has no {self.route} route, "
                f"only {' and '.join(routes)}"
            )
        if self.offloaded and (self.root or not self.mode.sharded):
            where = "the root's" if self.root else self.mode.value
            raise ValueError(
                f"the unit of {', '.join(self.operators)} is {where}: only sharded units other than the "
                "root's can be offloaded to host memory"
            )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Simulated time and memory of a step; seconds and bytes on the worst rank.

    Attributes:
        step_seconds: One training step with all its microbatches.
        compute_seconds: Forward and backward.
        communication_seconds: Exposed communication: collectives that block compute, and the part of the
            others that is not overlapped; and what the runtime's hooks take beyond compute.
        optimizer_seconds: The optimizer step.
        peak_bytes: Peak of the live tensor bytes.
        peak_moment: The moment of the step at which the peak is reached.
        state_bytes: Parameters, gradients and optimizer states that are kept throughout the step.
        spread: How far ``step_seconds`` may be off, relative to it, since measured figures spread; 0 where
            that is not known.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    optimizer_seconds: float
    peak_bytes: int
    peak_moment: str
    state_bytes: int
    # Predictions that agree are equal, however sure they are.
    spread: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class ShardingPlan:
    """How a model, or one stage of it, is sharded over data-parallel ranks.

    Attributes:
        decisions: One per operator, in trace order.
        units: All units; every operator is in exactly one.
        predicted: Simulated time and memory of a step.
        optimal: Whether it is proven optimal in the decision space.
        reduce_each_microbatch: Whether gradients are reduced after every microbatch, or once a step.
        recomputed: FQNs of the modules whose activations are recomputed in backward.
    """

    decisions: tuple[Decision, ...]
    units: tuple[Unit, ...]
    predicted: Prediction
    optimal: bool
    reduce_each_microbatch: bool = True
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        decided = [decision.operator for decision in self.decisions]
        placed = [name for unit in self.units for name in unit.operators]
        if sorted(decided) != sorted(placed) or len(set(decided)) != len(decided):
            odd = sorted(set(decided) ^ set(placed)) or sorted({n for n in placed if placed.count(n) > 1})
            raise ValueError(
                "every operator needs exactly one decision and must be in exactly one unit; these violate "
                f"it: {', '.join(odd)}"
            )
        cut = {decision.operator for decision in self.decisions if decision.slices > 1}
        for barred, where in (("offloaded", "be offloaded"), ("group_size", "be in a unit with groups")):
            held = [n for unit in self.units if getattr(unit, barred) for n in unit.operators if n in cut]
            if held:
                raise ValueError(f"operators in slices cannot {where}: {', '.join(held)}")

    @cached_property
    def by_operator(self) -> dict[str, Decision]:
        """Decision of each operator, by name."""
        return {decision.operator: decision for decision in self.decisions}

    @cached_property
    def modes(self) -> dict[str, Mode]:
        """Sharding strategy of each operator, by name."""
        return {decision.operator: decision.mode for decision in self.decisions}

    @cached_property
    def decided(self) -> Hashable:
        """What it decides, without reasons and predictions: equal where a model does the same."""
        decisions = tuple(replace(decision, reason="") for decision in self.decisions)
        return self.units, decisions, self.recomputed, self.reduce_each_microbatch

    @cached_property
    def fsdp_units(self) -> tuple[Unit, ...]:
        """The units that FSDP2 shards.

        Left out are operators in slices, which shard themselves, and units without parameter elements.
        """
        return tuple(
            unit
            for unit in self.units
            if unit.mode.sharded
            and not any(self.by_operator[operator].slices > 1 for operator in unit.operators)
            and any(self.by_operator[operator].nbytes for operator in unit.operators)
        )

    def parameters_of(self, unit: Unit) -> tuple[str, ...]:
        """FQNs of the parameters of ``unit``, in trace order."""
        return tuple(
            name
            for decision in self.decisions
            if decision.operator in unit.operators
            for name in decision.parameters
        )

    @property
    def is_mixed(self) -> bool:
        """Whether operators have different strategies, or any module is recomputed."""
        ways = {(decision.mode, decision.slices, decision.slices_kept) for decision in self.decisions}
        return len(ways) > 1 or len(self.recomputed) > 0
