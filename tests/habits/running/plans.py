"""The seven plans that every habit runs under, made of a description alone: the same in every process."""

from dataclasses import replace
from itertools import cycle

from osdp import DeviceInfo, Link, ModelDesc, Plan, Training, make_plan
from osdp.cost.sharding.problem import build_problem
from osdp.hardware.device_info import COLLECTIVES
from osdp.model.description import Operator
from osdp.model.fqn import is_inside
from osdp.plan.shard_math import can_shard
from osdp.plan.sharding import Decision, Mode, Route, Unit
from osdp.profiler.roofline import estimate

#: By name: searched at the limit halfway between all sharded and all replicated; one mode for all; each
#: operator a unit of its own, in alternating modes; each operator that can be cut in two slices, each block
#: that can be recomputed.
PLANS = ("searched", "replicated", "shard_optimizer", "full_shard", "shard_grad_op", "mixed", "sliced")

_ONE_MODE = {
    "replicated": "NO_SHARD",
    "shard_optimizer": "SHARD_OPTIMIZER",
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
}


def plan_of(name: str, desc: ModelDesc, training: Training, world_size: int) -> Plan:
    """The plan ``name`` for the model that ``desc`` describes."""
    training = replace(training, local_batch=desc.local_batch)
    device = device_of(world_size)
    profile = estimate(desc, device, training)

    def made(limit: int = device.memory_limit, **options: object) -> Plan:
        limited = replace(device, memory_limit=limit)
        return make_plan(None, desc, limited, training=training, profile=profile, **options)  # type: ignore[arg-type]

    if name in _ONE_MODE:
        return made(strategy=_ONE_MODE[name], slices=(), recompute=False)
    if name == "searched":
        ends = [made(strategy=mode, slices=(), recompute=False) for mode in ("FULL_SHARD", "NO_SHARD")]
        limit = sum(plan.predicted.peak_bytes for plan in ends) // 2
        plan = made(limit)
        # Of a model this small recomputation alone may save so much; it is met in another plan.
        return plan if len(set(plan.modes.values())) > 1 else made(limit, slices=(), recompute=False)
    apart = made(strategy="FULL_SHARD", slices=(), recompute=False)
    if name == "mixed":
        return _mixed(apart, desc)
    assert name == "sliced"
    plan = _in_slices(_apart(apart, desc, {}), desc, 2)
    return plan.with_sharding(recomputed=_recomputable(desc, device, training))


def device_of(world_size: int) -> DeviceInfo:
    """Devices that nobody measured: with collectives this slow a search uses the memory it may."""
    links = tuple(Link(name, "world", world_size, 5e-4, 2e8) for name in COLLECTIVES)
    return DeviceInfo(
        memory_limit=2**40,
        kind="cpu",
        devices_per_node=world_size,
        links=links,
        flops=1e10,
        memory_bandwidth=1e10,
    )


def _mixed(plan: Plan, desc: ModelDesc) -> Plan:
    hybrid = [Mode.HYBRID_SHARD] if plan.world_size == 4 else []
    modes = cycle([Mode.FULL_SHARD, Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, *hybrid])
    return _apart(plan, desc, {op.name: next(modes) for op in desc.operators if can_shard(op)})


def _apart(plan: Plan, desc: ModelDesc, modes: dict[str, Mode]) -> Plan:
    """``plan`` with each operator a unit of its own where it can be one, in ``modes`` or FULL_SHARD.

    What is to be sharded and cannot be a unit is in that of the root, as the search has it.
    """
    operators = {op.name: op for op in desc.operators}
    units, decisions, in_root = [], [], []
    for decision in plan.decisions:
        operator = operators[decision.operator]
        mode = modes.get(operator.name, Mode.FULL_SHARD) if can_shard(operator) else Mode.NO_SHARD
        if mode.sharded and not _can_be_unit(operator):
            mode = Mode.SHARD_GRAD_OP
            in_root.append(operator.name)
        else:
            group_size = 2 if mode is Mode.HYBRID_SHARD else 0
            # All-reduces are in the plan that has this mode alone.
            route = Route.EXCHANGE if mode is Mode.SHARD_OPTIMIZER else Route.FLAT
            units.append(Unit(mode, (operator.name,), operator.modules, group_size=group_size, route=route))
        decisions.append(_decided(decision, mode))
    if in_root:
        units.insert(0, Unit(Mode.SHARD_GRAD_OP, tuple(in_root), ("",), root=True))
    return plan.with_sharding(units=tuple(units), decisions=tuple(decisions))


def _can_be_unit(operator: Operator) -> bool:
    """Whether the modules that use its parameters hold all names of them: else the root alone does.

    T5 registers its embeddings in a module that never runs beside those that do.
    """
    names = [name for parameter in operator.parameters for name in (parameter.name, *parameter.aliases)]
    return "" not in operator.modules and all(
        any(is_inside(name, module) for module in operator.modules) for name in names
    )


def _decided(decision: Decision, mode: Mode) -> Decision:
    return replace(decision, mode=mode, slices=1, sliced_by="", slices_kept=0)


def _in_slices(plan: Plan, desc: ModelDesc, count: int) -> Plan:
    """``plan`` with each operator that can be cut, and is a sharded unit below the root, in slices."""
    sharded = {unit.operators[0] for unit in plan.units if unit.mode.sharded and not unit.root}
    ways = {op.name: op.cut.by for op in desc.operators if op.name in sharded and _can_be_cut(op, count)}
    decisions = tuple(
        replace(decision, slices=count, sliced_by=ways[decision.operator])
        if decision.operator in ways
        else decision
        for decision in plan.decisions
    )
    return plan.with_sharding(decisions=decisions)


def _can_be_cut(operator: Operator, count: int) -> bool:
    if operator.cut is None or operator.cut.slices not in (0, count):
        return False
    shapes = {parameter.name.rpartition(".")[2]: parameter.shape for parameter in operator.parameters}
    shape = shapes.get(operator.cut.weight.rpartition(".")[2])
    return shape is not None and shape[operator.cut.dim] >= count


def _recomputable(desc: ModelDesc, device: DeviceInfo, training: Training) -> tuple[str, ...]:
    """FQNs of the blocks that the search may recompute where there are samples enough for it to pay."""
    training = replace(training, local_batch=desc.local_batch * (64 if desc.batch_is_free else 1))
    timeline = build_problem(desc, estimate(desc, device, training), device, training).timeline
    possible = zip(timeline.chain, timeline.recompute.possible, strict=True)
    return tuple(dict.fromkeys(op.block for op, allowed in possible if allowed and op.block))
