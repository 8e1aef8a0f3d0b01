"""What a search may use."""

from dataclasses import dataclass, replace

from osdp.layout import Degrees
from osdp.plan import Mode
from osdp.schedule import Schedule

#: Numbers of slices an operator may run in.
SLICES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Rules:
    """What the search may use.

    Attributes:
        allowed: Modes.
        slices: Numbers of slices an operator may run in.
        keep: Whether half of them may stay gathered from forward to backward.
        recompute: Whether blocks may be recomputed.
        offload: Whether sharded units may live in host memory.
        two_step: Whether collectives over all ranks must go in two steps, or must not; ``None``: they may.
    """

    allowed: tuple[Mode, ...] = tuple(Mode)
    slices: tuple[int, ...] = ()
    keep: bool = True
    recompute: bool = False
    offload: bool = False
    two_step: bool | None = None


#: Sharding alone, in any mode.
SHARDING = Rules()


def stage_rules(rules: Rules, schedule: Schedule, layout: Degrees) -> Rules:
    """What may be used in a stage.

    On one rank nothing is sharded. Where several microbatches are in flight, SHARD_GRAD_OP would keep
    parameters from the first forward to the last backward, as NO_SHARD does; and so would kept slices.
    """
    if layout.dp == 1 and len(rules.allowed) > 1:
        return replace(rules, allowed=(Mode.NO_SHARD,))
    several = any(schedule.in_flight(stage) > 1 for stage in range(schedule.num_stages))
    if not several:
        return rules
    rules = replace(rules, keep=False)
    if len(rules.allowed) == 1:
        return rules
    return replace(rules, allowed=tuple(mode for mode in rules.allowed if mode is not Mode.SHARD_GRAD_OP))
