"""Validation of a plan against a model and a mesh: all differences at once, before anything is changed."""

from collections.abc import Iterator

from torch import nn

from osdp.errors import PlanMismatchError
from osdp.model.fqn import is_inside
from osdp.nn.embeddings import check_embeddings
from osdp.plan.plan import Plan
from osdp.plan.sharded_units import wrap_order
from osdp.plan.sharding import Mode, ShardingPlan, Unit
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain import check_plain
from osdp.runtime.sharding.sliced import slice_faults


def check_plan(model: nn.Module, plan: Plan, stage: int, world_size: int) -> None:
    """Raise unless a stage of ``plan`` fits ``model`` and the number of data-parallel ranks.

    Args:
        model: The plain model, or the model of the stage.
        plan: The plan.
        stage: Index of the stage.
        world_size: Number of data-parallel ranks.

    Raises:
        ValueError: The model is wrapped already, cannot be wrapped, or has an embedding that no plan can
            train.
        PlanMismatchError: The plan is for another model or world size; lists every difference.
    """
    check_plain(model)
    check_embeddings(model)
    differences = []
    if plan.dp != world_size:
        differences.append(f"it is for {plan.dp} ranks, there are {world_size}")
    owned, sharding = owned_parameters(model), plan.stages[stage].sharding
    differences += _unknown_modules(model, sharding)
    differences += _parameter_differences(sharding, owned)
    differences += _mode_differences(sharding, plan.dp)
    if not differences:
        differences += slice_faults(model, sharding)
        differences += _unit_differences(sharding, owned)
    if differences:
        raise PlanMismatchError(differences)


def check_backend(sharding: ShardingPlan, device: str, backend: str) -> None:
    """Raise if a plan needs messages from rank to rank that the backend does not have for the device.

    Raises:
        ValueError: It does; names what needs them.
    """
    needing = {
        unit.mode for unit in sharding.units if unit.mode is Mode.SHARD_OPTIMIZER or unit.route.by_exchange
    }
    if needing and device != "cpu" and backend == "gloo":
        raise ValueError(
            f"gloo sends no tensors on {device} from rank to rank, as {' and '.join(sorted(needing))} "
            'needs: initialise the process group with backend="nccl", or plan without it'
        )


def check_double_backward(plan: ShardingPlan) -> None:
    """Raise unless a backward under ``plan`` can itself be differentiated.

    Gathering, slicing and recomputation happen in the first backward, outside the graph of the second.

    Raises:
        ValueError: It cannot be; lists the decisions that prevent it.
    """
    faults = [f"{name} is {mode}" for name, mode in plan.modes.items() if mode.sharded]
    faults += [f"{d.operator} runs in {d.slices} slices" for d in plan.decisions if d.slices > 1]
    faults += [f"{fqn} is recomputed" for fqn in plan.recomputed]
    if faults:
        shown = ", ".join(faults[:5]) + (f" and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ValueError(
            "double_backward=True needs a plan that replicates everything and recomputes nothing, but "
            f"{shown}; plan with double_backward=True"
        )


def _unknown_modules(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for decision in plan.decisions:
        for module in decision.modules:
            if module not in known:
                yield f"operator {decision.operator!r} is used by module {module!r}, which the model lacks"
    for unit in plan.units:
        for module in unit.modules:
            if module not in known:
                yield f"the unit of {unit.operators[0]!r} wraps module {module!r}, which the model lacks"
    for module in plan.recomputed:
        if module not in known or not module:
            yield f"module {module!r} is to be recomputed, which the model lacks"
        if plan.recomputed.count(module) > 1 or any(
            other != module and is_inside(module, other) for other in plan.recomputed
        ):
            yield f"module {module!r} is to be recomputed twice"


def _parameter_differences(plan: ShardingPlan, owned: dict[str, ParameterSites]) -> Iterator[str]:
    decided: set[str] = set()
    for decision in plan.decisions:
        missing = [name for name in decision.parameters if name not in owned]
        for name in missing:
            yield f"operator {decision.operator!r} has parameter {name!r}, which the model lacks"
        decided.update(decision.parameters)
        nbytes = sum(owned[name].parameter.nbytes for name in decision.parameters if name in owned)
        if not missing and nbytes != decision.nbytes:
            yield f"operator {decision.operator!r} has {nbytes} bytes, the plan says {decision.nbytes}"
    for name in owned:
        if name not in decided:
            yield f"parameter {name!r} of the model is in no operator of the plan"


def _mode_differences(plan: ShardingPlan, world_size: int) -> Iterator[str]:
    for unit in plan.units:
        for operator in unit.operators:
            if plan.modes[operator] is not unit.mode:
                yield f"operator {operator!r} is decided {plan.modes[operator]} but its unit is {unit.mode}"
        if unit.group_size and (world_size % unit.group_size or unit.group_size == world_size):
            yield (
                f"the unit of {unit.operators[0]!r} has groups of {unit.group_size} ranks, which must be "
                f"several and divide {world_size}"
            )
    if sum(unit.root for unit in plan.units if unit.mode.sharded) > 1:
        yield "more than one sharded unit is the root's"


def _unit_differences(plan: ShardingPlan, owned: dict[str, ParameterSites]) -> Iterator[str]:
    order = wrap_order(plan.fsdp_units)
    by_operator = {operator: unit for unit in plan.units for operator in unit.operators}
    for decision in plan.decisions:
        unit = by_operator[decision.operator]
        if unit.mode is Mode.SHARD_OPTIMIZER:
            yield from (
                f"parameter {name!r} has no dimension to shard, but its unit is {unit.mode}"
                for name in decision.parameters
                if not owned[name].parameter.shape
            )
        if not unit.mode.sharded or decision.slices > 1 or not decision.nbytes:
            continue
        for name in decision.parameters:
            entry = owned[name]
            if not entry.parameter.shape:
                yield f"parameter {name!r} has no dimension to shard, but its unit is {unit.mode}"
            for alias in entry.aliases:
                holder = next((other for other in order if _covers(other, alias)), None)
                if holder is not (None if unit.root else unit):
                    where = "the root" if holder is None else f"the unit of {holder.operators[0]!r}"
                    yield f"parameter {alias!r} of operator {decision.operator!r} would be wrapped by {where}"
    yield from _dtype_differences(plan, owned)


def _covers(unit: Unit, fqn: str) -> bool:
    return any(is_inside(fqn, module) for module in unit.modules)


def _dtype_differences(plan: ShardingPlan, owned: dict[str, ParameterSites]) -> Iterator[str]:
    for unit in plan.units:
        found = [owned[name].parameter for name in plan.parameters_of(unit)]
        dtypes = {str(parameter.dtype) for parameter in found if parameter.requires_grad}
        if unit.mode.sharded and len(dtypes) > 1:
            yield f"the sharded unit of {unit.operators[0]!r} mixes trainable dtypes {sorted(dtypes)}"
