"""The order in which the units that FSDP2 shards are wrapped."""

from graphlib import CycleError, TopologicalSorter

from osdp.errors import PlanMismatchError
from osdp.model.fqn import is_inside
from osdp.plan.sharding import Unit


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


def _holds(outer: Unit, inner: Unit) -> bool:
    return any(
        is_inside(module, ancestor) and module != ancestor
        for module in inner.modules
        for ancestor in outer.modules
    )
