"""The units of a plan that FSDP2 shards, and the order in which they are wrapped."""

from graphlib import CycleError, TopologicalSorter

from osdp.errors import PlanMismatchError
from osdp.model.fqn import is_inside
from osdp.plan.plan import Plan, Unit


def wrap_order(units: tuple[Unit, ...]) -> list[Unit]:
    """The sharded units except the root's in the order of wrapping: inner units before outer ones.

    Args:
        units: Units that FSDP2 shards, and others.

    Raises:
        PlanMismatchError: Two units contain each other.
    """
    sharded = [unit for unit in units if unit.mode.sharded and not unit.root]
    graph = {
        outer: [inner for inner, other in enumerate(sharded) if inner != outer and _holds(unit, other)]
        for outer, unit in enumerate(sharded)
    }
    try:
        return [sharded[index] for index in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        names = ", ".join(str(sharded[index].operators) for index in error.args[1])
        raise PlanMismatchError([f"units contain each other: {names}"]) from error


def fsdp_units(plan: Plan) -> tuple[Unit, ...]:
    """The units of ``plan`` that FSDP2 shards.

    Left out are operators in slices, which shard themselves, and units without parameter elements.
    """
    in_slices = {decision.operator for decision in plan.decisions if decision.slices > 1}
    nbytes = {decision.operator: decision.nbytes for decision in plan.decisions}
    return tuple(
        unit
        for unit in plan.units
        if unit.mode.sharded
        and not in_slices.intersection(unit.operators)
        and any(nbytes[operator] for operator in unit.operators)
    )


def _holds(outer: Unit, inner: Unit) -> bool:
    return any(
        is_inside(module, ancestor) and module != ancestor
        for module in inner.modules
        for ancestor in outer.modules
    )
