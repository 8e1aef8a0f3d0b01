"""What a search may use."""

from dataclasses import dataclass

from osdp.plan import Mode

#: Numbers of slices an operator may run in.
SLICES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Rules:
    """What the search may use.

    Attributes:
        allowed: Modes.
        whole_blocks: Whether units must be whole items.
        slices: Numbers of slices an operator may run in.
        recompute: Whether blocks may be recomputed.
        offload: Whether sharded units may live in host memory.
        two_step: Whether collectives over all ranks must go in two steps, or must not; ``None``: they may.
    """

    allowed: tuple[Mode, ...] = tuple(Mode)
    whole_blocks: bool = False
    slices: tuple[int, ...] = ()
    recompute: bool = False
    offload: bool = False
    two_step: bool | None = None


#: Sharding alone, in any mode.
SHARDING = Rules()
