"""Strategy of a unit: mode, slices, recomputation, offload and shard group."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from osdp.arrays import Ints
from osdp.plan.sharding import Mode

#: Largest number of slices of an operator.
MOST_SLICES = 2048


class UnitMode:
    """How the parameters of a unit are stored; plain integers, since an ``IntEnum`` is slow in arrays.

    ``ROOT`` is a SHARD_GRAD_OP operator that joins the root unit, ``SLICED`` a FULL_SHARD operator that is
    gathered slice by slice. Parameters of ``NO_SHARD`` and ``SHARD_OPTIMIZER`` are whole on every rank.
    """

    NO_SHARD: Final = 0
    SHARD_GRAD_OP: Final = 1
    FULL_SHARD: Final = 2
    ROOT: Final = 3
    SLICED: Final = 4
    SHARD_OPTIMIZER: Final = 5


class UnitStrategy(NamedTuple):
    """Strategy of a unit.

    Attributes:
        mode: How its parameters are stored, one of :class:`UnitMode`.
        slices: Number of slices its operator runs in; 1 if it is not sliced.
        kept: Number of slices that stay gathered from forward to backward.
        recomputed: Whether its block is recomputed in backward.
        offloaded: Whether its shards, gradients and optimizer states are offloaded to host memory.
        group: Index of its shard group (:mod:`osdp.cost.sharding.shard_groups`).
    """

    mode: int
    slices: int = 1
    kept: int = 0
    recomputed: bool = False
    offloaded: bool = False
    group: int = 0

    @property
    def plan_mode(self) -> Mode:
        """Sharding mode in a plan, except that FULL_SHARD in a hybrid group is HYBRID_SHARD there."""
        return _PLAN_MODES[self.mode]

    @property
    def gathers(self) -> bool:
        """Whether the unit has collectives of its own, for all of its parameters at once."""
        return self.mode in (UnitMode.SHARD_GRAD_OP, UnitMode.FULL_SHARD)


#: Mode in a plan, indexed by the constants of :class:`UnitMode`.
_PLAN_MODES = (
    Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD,
    Mode.SHARD_OPTIMIZER,
)  # fmt: skip

#: A unit of a chain: first operator, one past the last, strategy.
UnitSpan = tuple[int, int, UnitStrategy]

NO_SHARD = UnitStrategy(UnitMode.NO_SHARD)
SHARD_OPTIMIZER = UnitStrategy(UnitMode.SHARD_OPTIMIZER)
SHARD_GRAD_OP = UnitStrategy(UnitMode.SHARD_GRAD_OP)
FULL_SHARD = UnitStrategy(UnitMode.FULL_SHARD)
ROOT = UnitStrategy(UnitMode.ROOT)

#: Strategy of a unit in each mode of a plan, without slices, recomputation, offload and groups.
STRATEGY_OF = {
    Mode.NO_SHARD: NO_SHARD,
    Mode.SHARD_OPTIMIZER: SHARD_OPTIMIZER,
    Mode.SHARD_GRAD_OP: SHARD_GRAD_OP,
    Mode.FULL_SHARD: FULL_SHARD,
    Mode.HYBRID_SHARD: FULL_SHARD,
}


def sliced(slices: int, kept: int = 0) -> UnitStrategy:
    """Strategy of an operator in ``slices`` slices, a power of two, ``kept`` of which stay gathered.

    Raises:
        ValueError: ``slices`` is no power of two from 2 to 2048, or ``kept`` exceeds it.
    """
    if slices.bit_count() != 1 or not 2 <= slices <= MOST_SLICES:
        raise ValueError(f"slices must be a power of two from 2 to {MOST_SLICES}, got {slices}")
    if not 0 <= kept <= slices:
        raise ValueError(f"{kept} of {slices} slices cannot stay gathered; give a number from 0 to {slices}")
    return UnitStrategy(UnitMode.SLICED, slices, kept)


def strategy_table(strategies: Iterable[UnitStrategy]) -> Ints:
    """The strategies as numbers: one row each, with a column for each field."""
    return np.array(list(strategies), dtype=np.int64).reshape(-1, len(UnitStrategy._fields))
