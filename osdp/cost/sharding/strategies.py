"""Strategy of a unit, encoded in one integer: mode, slices, recomputation, offload and shard group.

::

    strategy = mode or slice count   (0 .. 15)
             + RECOMPUTED            (bit 4)
             + OFFLOADED             (bit 5)
             + KEPT * kept slices    (bits 6 .. 17)
             + WIRE * shard group    (bits 18 and up)

The search mostly treats strategies as opaque labels; the functions below decode them.
"""

from osdp.plan.sharding import Mode

#: Plain modes; ``ROOT`` is a SHARD_GRAD_OP operator that joins the root unit.
NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, ROOT = range(4)
#: A FULL_SHARD operator in ``2 ** (strategy - SLICED)`` slices has a plain strategy above this.
SLICED = 4
#: Added for a unit whose block is recomputed in backward.
RECOMPUTED = 16
#: Added for a sharded unit whose shards, gradients and optimizer states are offloaded to host memory.
OFFLOADED = 32
#: Multiplied by the number of slices that stay gathered from forward to backward.
KEPT = 64
#: Multiplied by the index of the unit's shard group (:mod:`osdp.cost.sharding.shard_groups`).
WIRE = 4096 * KEPT

_MODES = (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD, Mode.SHARD_GRAD_OP)

#: Plain strategy of each mode.
WAY_OF = {Mode.NO_SHARD: NO_SHARD, Mode.SHARD_GRAD_OP: SHARD_GRAD_OP, Mode.FULL_SHARD: FULL_SHARD}


def sliced_way(slices: int, kept: int = 0) -> int:
    """Strategy of an operator in ``slices`` slices, a power of two, ``kept`` of which stay gathered.

    Raises:
        ValueError: ``slices`` is no power of two from 2 to 2048, or ``kept`` exceeds it.
    """
    exponent = slices.bit_length() - 1
    if slices != 2**exponent or not 1 <= exponent < RECOMPUTED - SLICED:
        raise ValueError(f"slices are counted in powers of two from 2 to 2048, not {slices}")
    if not 0 <= kept <= slices:
        raise ValueError(f"{kept} of {slices} slices cannot stay gathered; give a number from 0 to {slices}")
    return SLICED + exponent + KEPT * kept


def plain(way: int) -> int:
    """The strategy without recomputation, offload, kept slices and shard group: a mode or slice count."""
    return way % RECOMPUTED


def mode_of(way: int) -> Mode:
    """Sharding mode of a strategy."""
    return Mode.FULL_SHARD if plain(way) > SLICED else _MODES[plain(way)]


def slices_of(way: int) -> int:
    """Number of slices the unit's operator runs in; 1 if it is not sliced."""
    return 1 << max(plain(way) - SLICED, 0)


def kept_of(way: int) -> int:
    """Number of slices that stay gathered from forward to backward."""
    return way % WIRE // KEPT


def wire_of(way: int) -> int:
    """Index of the unit's shard group."""
    return way // WIRE


def is_recomputed(way: int) -> bool:
    """Whether the unit's block is recomputed in backward."""
    return bool(way & RECOMPUTED)


def is_offloaded(way: int) -> bool:
    """Whether its shards, gradients and optimizer states are offloaded to host memory."""
    return bool(way & OFFLOADED)
