"""Inputs of a step that do not depend on the sharding decisions, and the costs of the root unit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from osdp.arrays import Bools
from osdp.cost.matrix_steps import num_owners, temporary_bytes
from osdp.cost.sharding.operator_costs import OperatorCosts, cost_operators, over_group
from osdp.cost.sharding.shard_groups import shard_groups_of
from osdp.cost.sharding.strategies import NO_SHARD, ROOT, SHARD_OPTIMIZER, UnitStrategy, strategy_table
from osdp.cost.sharding.timeline import (
    Backward,
    GradientArrivals,
    Timeline,
    build_timeline,
    gradient_arrivals,
)
from osdp.cost.sharding.unit_costs import cost_units
from osdp.cost.sharding.units import UnitCosts
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import OptimizerProfile, Profile
from osdp.model.description import ModelDesc, Operator
from osdp.model.training import Training

_NO_BACKWARD = Backward(np.zeros(0), np.zeros(0), np.zeros(0))


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of devices and training used by the step simulator.

    Attributes:
        blocking: Whether FSDP2's collectives block compute.
        scales: Whether the backend can only sum (gloo), so that a bucket's only gradient is scaled in place.
        issues: Whether the host issues compute to an accelerator, so that hooks take the host's time.
        overlap: Fraction of an asynchronous all-reduce that backward hides.
        mixed_overlap: The same in a plan that also has sharded units.
        compute_overlap: Fraction of the compute beside a longer collective that does not slow it down.
        unit_overhead: Seconds of hooks per sharded unit and pass.
        gradient_overhead: Seconds of hooks per gradient of a replicated parameter and backward.
        pass_overhead: Seconds of hooks per forward and backward of the model.
        agreement: Seconds of the all-reduce by which ranks find unused sharded parameters.
        copy_bandwidth: Bytes per second of a copy into a gradient bucket.
        microbatches: Microbatches per step.
        reduce_each: Whether gradients are reduced after each microbatch.
    """

    blocking: bool
    scales: bool
    issues: bool
    overlap: float
    mixed_overlap: float
    compute_overlap: float
    unit_overhead: float
    gradient_overhead: float
    pass_overhead: float
    agreement: float
    copy_bandwidth: float
    microbatches: int
    reduce_each: bool

    @property
    def keeps_gradients(self) -> bool:
        """Whether unsharded gradients are kept from one microbatch to the next."""
        return self.microbatches > 1 and not self.reduce_each

    @property
    def adds_reduced(self) -> bool:
        """Whether reduced gradients are added to those of earlier microbatches."""
        return self.microbatches > 1 and self.reduce_each

    @property
    def reductions(self) -> int:
        """Number of gradient reductions per step."""
        return self.microbatches if self.reduce_each else 1


@dataclass(frozen=True)
class ShardingProblem:
    """One model on one set of devices under one training.

    Attributes:
        timeline: Activation memory and compute time.
        costs: Costs of the chain's operators.
        settings: Settings of devices and training.
        device: The devices.
        training: The training.
        stepped: The training as an optimizer steps parameters of these dtypes.
        profile: The profile.
        arrivals: When gradients of the chain's operators appear in backward.
        plain_saving: Seconds of the optimizer step saved by a plan that shards nothing, since its parameters
            are plain tensors instead of DTensors.
        root_group: Index of the root unit's shard group.
        matrix_temporary: Temporaries of the step of an optimizer of whole matrices; bytes.
    """

    timeline: Timeline
    costs: OperatorCosts
    settings: StepSettings
    device: DeviceInfo
    training: Training
    stepped: Training
    profile: Profile
    arrivals: GradientArrivals
    plain_saving: float = 0.0
    root_group: int = 0
    matrix_temporary: float = 0.0

    @cached_property
    def reduced_late(self) -> Bools:
        """Operators whose input needs no gradient, such as tables of embeddings, shape ``(K,)``."""
        chain = self.timeline.chain
        return np.array([op.cut is not None and not op.cut.in_backward for op in chain], dtype=bool)

    @property
    def root_strategy(self) -> UnitStrategy:
        """Strategy of operators in the root unit."""
        return ROOT._replace(group=self.root_group)


@dataclass(frozen=True, slots=True)
class RootUnitCost:
    """Memory and time of the operators outside the chain (root unit and replicated ones); bytes and seconds.

    Attributes:
        state: Parameters and optimizer states.
        has_unit: Whether there is a root unit, even one formed only by chain operators that join it.
        steps_in_shards: Whether optimizer states of replicated operators are sharded.
        unsharded: The root unit's unsharded parameters.
        low_precision: Low-precision copies of replicated parameters.
        carried: Gradients left by earlier microbatches.
        gradient: Gradients of one microbatch: those of the root unit, the buckets of replicated operators,
            and the gradients still waiting to be copied into a bucket.
        backward: Backward memory including those gradients; empty only in the cost of an empty model.
        reduce_input: What is alive in addition to these gradients while those of the root unit are copied
            into the input of its reduce-scatter.
        reduce_peak: What that reduce-scatter needs in addition to them, of which those of the root unit are
            freed by then: it may be negative.
        last_gradient: Gradient of the root unit's last parameter, which is freed later.
        last_segment: First segment of that parameter's operator; -1 if there is none.
        gradient_kept: Gradients left after backward.
        casts: Buckets that are cast to another dtype when they have been reduced: the first segment of each,
            and by how much it grows.
        cast_beside: Most bytes beside a cast.
        gather_seconds: The root unit's all-gather.
        reduce_seconds: The root unit's reduce-scatter.
        host_gather: Time the host takes to issue the root unit's all-gather to an accelerator; 0 on CPUs.
        host_reduce: The same of its reduce-scatter and of the all-reduces of replicated operators.
        average_seconds: All-reduces of replicated operators.
        num_gradients: Number of their gradients.
        step_seconds: Optimizer step of all of these operators.
        temporary: Temporaries of their optimizer step.
    """

    has_unit: bool = False
    steps_in_shards: bool = False
    state: float = 0.0
    unsharded: float = 0.0
    low_precision: float = 0.0
    carried: float = 0.0
    gradient: float = 0.0
    reduce_input: float = 0.0
    reduce_peak: float = 0.0
    last_gradient: float = 0.0
    last_segment: int = -1
    gradient_kept: float = 0.0
    casts: tuple[tuple[int, float], ...] = ()
    cast_beside: float = 0.0
    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0
    host_gather: float = 0.0
    host_reduce: float = 0.0
    average_seconds: float = 0.0
    num_gradients: float = 0.0
    step_seconds: float = 0.0
    temporary: float = 0.0
    backward: Backward = field(default=_NO_BACKWARD, compare=False)


def _all_alike(model_desc: ModelDesc) -> ModelDesc:
    """The description without operators that keep their dtype: all do."""
    if not any(operator.keeps_dtype for operator in model_desc.operators):
        return model_desc
    operators = tuple(replace(operator, keeps_dtype=False) for operator in model_desc.operators)
    return replace(model_desc, operators=operators)


def build_problem(
    model_desc: ModelDesc,
    profile: Profile,
    device: DeviceInfo,
    training: Training,
    *,
    reduce_each: bool = True,
) -> ShardingProblem:
    """Build the timeline and the operator costs of a step once, for all plans of it.

    Raises:
        ValueError: The profile was made for another model.
    """
    if training.param_dtype is None:
        model_desc = _all_alike(model_desc)
    timeline = build_timeline(model_desc, profile, device.ranks_per_core if profile.measured else 1)
    operators = (*timeline.chain, *timeline.root)
    # Plain tensors save the optimizer's overhead per DTensor.
    dtypes = [p.dtype for operator in operators for p in operator.parameters if p.trainable]
    stepped = training.stepping(dtypes, device.kind)
    model_bytes = sum(p.nbytes for operator in operators for p in operator.parameters if p.trainable)
    optimizer = _optimizer(profile, device)
    owners = num_owners(operators, training, device.world_size)
    if training.matrix_optimizer is not None and optimizer.matrices is None:
        raise ValueError(
            f"the profile does not say how long {training.matrix_optimizer} takes for whole matrices: make "
            f"one with training=Training(matrix_optimizer={training.matrix_optimizer!r})"
        )
    return ShardingProblem(
        timeline=timeline,
        costs=_with_rows(
            _operator_costs(timeline.chain, device, stepped, profile, model_bytes, owners),
            timeline.chain,
            model_desc,
            profile.local_batch,
        ),
        settings=_settings(device, training.microbatches, reduce_each or training.microbatches == 1),
        device=device,
        training=training,
        stepped=stepped,
        profile=profile,
        arrivals=gradient_arrivals(timeline, model_desc, training),
        plain_saving=len(dtypes) * (optimizer.per_dtensor - optimizer.per_tensor),
        matrix_temporary=temporary_bytes(operators, training, device.world_size),
    )


def _with_rows(
    costs: OperatorCosts, chain: Sequence[Operator], model_desc: ModelDesc, local_batch: int
) -> OperatorCosts:
    """The costs with the rows that each operator of the chain works on, as its slices do."""
    scale = local_batch / model_desc.local_batch
    rows = np.array([scale * _rows_of(operator, model_desc) for operator in chain], dtype=float)
    return replace(costs, slices=replace(costs.slices, rows=rows))


def _rows_of(operator: Operator, model_desc: ModelDesc) -> int:
    """Rows of what an operator that can be cut makes of the described batch; 0 if it cannot."""
    cut = operator.cut
    if cut is None:
        return 0
    weight = next(parameter for parameter in operator.parameters if parameter.name == cut.weight)
    width = weight.shape[1 - cut.dim] if cut.by == "rows" else weight.shape[cut.dim]
    made = [
        spec.shape
        for segment in model_desc.segments[operator.first : operator.last + 1]
        if operator.name in segment.operators
        for spec in segment.outputs
    ]
    return max((math.prod(shape[:-1]) for shape in made if shape[-1:] == (width,)), default=0)


def with_links(problem: ShardingProblem, device: DeviceInfo) -> ShardingProblem:
    """The same step on the same devices with other times of the same links, other overlaps and overheads."""
    first, *others = (
        over_group(costs, problem.timeline.chain, problem.stepped, group)
        for costs, group in zip(problem.costs.by_group, shard_groups_of(device), strict=True)
    )
    return replace(
        problem,
        device=device,
        costs=replace(first, others=tuple(others)),
        settings=_settings(device, problem.settings.microbatches, problem.settings.reduce_each),
    )


def _settings(device: DeviceInfo, microbatches: int, reduce_each: bool) -> StepSettings:
    return StepSettings(
        # On one device FSDP2 has no streams for its copies.
        blocking=device.blocking or device.world_size == 1,
        scales=device.blocking and device.world_size > 1,
        issues=not device.blocking,
        overlap=device.overlap,
        mixed_overlap=device.overlap if device.mixed_overlap is None else device.mixed_overlap,
        compute_overlap=device.compute_overlap,
        unit_overhead=device.unit_overhead,
        gradient_overhead=device.gradient_overhead,
        pass_overhead=device.pass_overhead,
        # Of accelerators the host waits for a gloo group of its own, whose latency is not known.
        agreement=device.link("all_reduce").latency if device.blocking else 0.0,
        copy_bandwidth=device.copy_bandwidth,
        microbatches=microbatches,
        reduce_each=reduce_each,
    )


def cost_root(
    problem: ShardingProblem,
    sharded: Sequence[Operator],
    replicated: Sequence[Operator],
    *,
    stepped: Sequence[Operator] = (),
    has_unit: bool,
) -> RootUnitCost:
    """Memory and time of the operators outside the chain: one root unit, one bucket per replicated operator.

    Args:
        problem: The step to plan.
        sharded: Operators in the root unit.
        replicated: Operators that are replicated.
        stepped: Operators that are replicated, with sharded optimizer states.
        has_unit: Whether there is a root unit, even one formed only by chain operators that join it.
    """
    # 1. Costs of the root unit (sharded together) and of the replicated operators (one bucket each).
    unit, unit_temporary = _cost_group(problem, sharded, problem.root_strategy)
    shard_group = problem.costs.by_group[problem.root_group].shard_group
    buckets = [*((op, NO_SHARD) for op in replicated), *((op, SHARD_OPTIMIZER) for op in stepped)]
    whole = [_cost_group(problem, [operator], strategy) for operator, strategy in buckets]

    def replicated_sum(name: str) -> float:
        return float(sum(getattr(units, name).sum() for units, _ in whole))

    trained = [op for op in sharded if any(parameter.trainable for parameter in op.parameters)]
    last = sorted(trained, key=lambda op: op.first)[-1:]
    costs = _costs_of(problem, last)
    # 2. When each gradient appears in backward, and the temporaries of the optimizer step.
    arriving = [(operator, units) for (operator, _), (units, _) in zip(buckets, whole, strict=True)]
    arrivals = _gradient_arrivals(problem, sharded, arriving)
    temporaries = [unit_temporary, *(temporary for _, temporary in whole)]
    casting = [(operator, units) for operator, units in arriving if units.casts_bucket.any()]
    adds = problem.settings.adds_reduced
    on_host = has_unit and problem.settings.issues
    return RootUnitCost(
        has_unit=has_unit,
        steps_in_shards=len(stepped) > 0,
        state=float(unit.state.sum()) + replicated_sum("state"),
        unsharded=float(unit.unsharded.sum()),
        low_precision=replicated_sum("unsharded"),
        carried=_carried(problem.settings, unit, [units for units, _ in whole]),
        gradient=sum(nbytes for _, nbytes in arrivals),
        reduce_input=float(unit.reduce_input.sum()),
        reduce_peak=float(unit.reduce_peak.sum()),
        last_gradient=float(costs.last_gradient.sum()),
        last_segment=max((op.first for op in last), default=-1),
        gradient_kept=float(unit.gradient_kept.sum()) + replicated_sum("gradient_kept"),
        casts=tuple(
            (operator.first, float(((0.0 if adds else units.gradient_kept) - units.bucket).sum()))
            for operator, units in casting
        ),
        cast_beside=max((float(units.beside_cast(adds).sum()) for _, units in casting), default=0.0),
        gather_seconds=float(unit.gather_seconds.sum()) + has_unit * shard_group.gather.latency,
        reduce_seconds=float(unit.reduce_seconds.sum()) + has_unit * shard_group.reduce_latency,
        host_gather=float(unit.host_gather.sum()) + on_host * shard_group.gather.latency,
        host_reduce=float(unit.host_reduce.sum())
        + on_host * shard_group.reduce_latency
        + replicated_sum("host_reduce"),
        average_seconds=replicated_sum("reduce_seconds"),
        num_gradients=replicated_sum("num_gradients"),
        step_seconds=float(unit.step_seconds.sum()) + replicated_sum("step_seconds"),
        temporary=float(sum(temporaries) if problem.costs.temporaries_add else max(temporaries)),
        backward=problem.timeline.backward_with(arrivals),
    )


def _carried(settings: StepSettings, sharded: UnitCosts, replicated: Sequence[UnitCosts]) -> float:
    """Gradients of operators outside the chain that earlier microbatches left."""
    if settings.microbatches == 1:
        return 0.0
    if settings.reduce_each:
        return float(sum(units.gradient_kept.sum() for units in (sharded, *replicated)))
    return float(sharded.accumulated.sum() + sum(units.bucket.sum() for units in replicated))


def _gradient_arrivals(
    problem: ShardingProblem, sharded: Sequence[Operator], replicated: Sequence[tuple[Operator, UnitCosts]]
) -> list[tuple[int, float]]:
    """Gradient bytes of each operator outside the chain, and the first segment whose backward makes them.

    An operator used twice keeps its partial gradient in autograd until its second use, in addition to a
    bucket that another operator may have opened.
    """
    settings = problem.settings

    def arriving(units: UnitCosts) -> float:
        # Kept gradients are in the bucket. Reduced ones become it, unless they are of another dtype or in
        # shards.
        anew = units.casts_bucket | units.steps_in_shards
        opened = units.bucket * (settings.microbatches == 1 or (settings.reduce_each & anew))
        return float((opened + units.received + units.largest_gradient).sum())

    whole = [(op, arriving(units)) for op, units in replicated]
    strategy = problem.root_strategy
    ours = [(op, float(_cost_group(problem, [op], strategy)[0].gradient.sum())) for op in sharded]
    last = len(problem.timeline.backward_high) - 1
    return [(op.last if op.executed else last, nbytes) for op, nbytes in (*whole, *ours)]


def _cost_group(
    problem: ShardingProblem, operators: Sequence[Operator], strategy: UnitStrategy
) -> tuple[UnitCosts, float]:
    costs = _costs_of(problem, operators)
    # No operators make no unit, so that all sums are zero.
    count = min(len(operators), 1)
    units = cost_units(
        costs, [0] * count, [len(operators)] * count, strategy_table([strategy] * count), problem.device
    )
    costs = costs.by_group[strategy.group]
    temporary = costs.temporary_whole if strategy == NO_SHARD else costs.temporary_sharded
    value = temporary[-1] if costs.temporaries_add else temporary.max(initial=0.0)
    return units, float(value)


def _costs_of(problem: ShardingProblem, operators: Sequence[Operator]) -> OperatorCosts:
    return _operator_costs(
        operators,
        problem.device,
        problem.stepped,
        problem.profile,
        problem.costs.model_bytes,
        problem.costs.owners,
    )


def _operator_costs(
    operators: Sequence[Operator],
    device: DeviceInfo,
    training: Training,
    profile: Profile,
    model_bytes: float,
    owners: int,
) -> OperatorCosts:
    return cost_operators(
        operators,
        shard_groups=shard_groups_of(device),
        training=training,
        optimizer=_optimizer(profile, device),
        host_optimizer=profile.host_optimizer,
        device_kind=device.kind,
        model_bytes=model_bytes,
        owners=owners,
    )


def _optimizer(profile: Profile, device: DeviceInfo) -> OptimizerProfile:
    return profile.optimizer.shared_by(device.ranks_per_core if profile.measured else 1)
