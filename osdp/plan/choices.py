"""What was decided for a unit, in words: the same in tables, messages and pictures."""

from osdp.model.fqn import is_inside
from osdp.plan.sharding import Mode, ShardingPlan, Unit

#: The choice not to recompute a block.
KEPT = "keeping the block's activations"

#: What is added to ``SHARD_OPTIMIZER`` where gradients are reduced by an exchange of shards and local sums.
BY_EXCHANGE = " by exchange"

#: End of the name of a choice that is made for all units of a block together.
OF_BLOCK = " of the whole block"


def choice_of(plan: ShardingPlan, unit: Unit) -> str:
    """A unit's mode, how its gradients are reduced, slices, recomputation, offloading and shard group."""
    decision = plan.by_operator[unit.operators[0]]
    slices, kept = decision.slices, decision.slices_kept
    again = any(is_inside(name, block) for name in unit.operators for block in plan.recomputed)
    words = [
        BY_EXCHANGE * (unit.mode is Mode.SHARD_OPTIMIZER and unit.route.by_exchange),
        f" in groups of {unit.group_size}" * (unit.mode is Mode.HYBRID_SHARD),
        f" in two steps, groups of {unit.group_size}" * unit.route.in_two_steps,
        f" in {slices} slices{f' ({kept} kept)' if kept else ''}" * (slices > 1),
        ", recomputed" * again,
        ", in host memory" * unit.offloaded,
    ]
    return "".join([unit.mode.value, *words])


def choice_of_operators(plan: ShardingPlan) -> dict[str, str]:
    """The same for each operator, by name."""
    return {name: choice_of(plan, unit) for unit in plan.units for name in unit.operators}
