"""How a unit may live, as one integer: mode and slices, recomputed or not, and where its states are.

The search treats ways as names; only here they are taken apart.
"""

from osdp.plan import Mode

#: How a unit may live; ``ROOT`` is a SHARD_GRAD_OP operator that joins the root's unit.
NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, ROOT = range(4)
#: A FULL_SHARD operator in ``2 ** (way - SLICED)`` slices has a way beyond this.
SLICED = 4
#: Added to the way of a unit whose block is recomputed in backward.
RECOMPUTED = 16
#: Added to the way of a sharded unit whose shards, gradients and optimizer states live in host memory.
OFFLOADED = 32
#: The number of slices that stay gathered from forward to backward is a multiple of this in a way.
KEPT = 64
#: The number of the wire of a sharded unit (:mod:`osdp.cost.wires`) is a multiple of this in its way.
WIRE = 4096 * KEPT

_MODES = (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD, Mode.SHARD_GRAD_OP)

#: The plain ways that a mode has.
WAY_OF = {Mode.NO_SHARD: NO_SHARD, Mode.SHARD_GRAD_OP: SHARD_GRAD_OP, Mode.FULL_SHARD: FULL_SHARD}


def sliced_way(slices: int, kept: int = 0) -> int:
    """The way of an operator in ``slices`` slices, a power of two, ``kept`` of which stay gathered.

    Raises:
        ValueError: It is none, or too large; or more are kept than there are.
    """
    exponent = slices.bit_length() - 1
    if slices != 2**exponent or not 1 <= exponent < RECOMPUTED - SLICED:
        raise ValueError(f"slices are counted in powers of two from 2 to 2048, not {slices}")
    if not 0 <= kept <= slices:
        raise ValueError(f"of {slices} slices {kept} cannot be kept")
    return SLICED + exponent + KEPT * kept


def plain(way: int) -> int:
    """The way without recomputation, offload, kept slices and wire: a mode, and slices."""
    return way % RECOMPUTED


def mode_of(way: int) -> Mode:
    """The mode of a unit."""
    return Mode.FULL_SHARD if plain(way) > SLICED else _MODES[plain(way)]


def slices_of(way: int) -> int:
    """In how many slices its operator runs."""
    return 1 << max(plain(way) - SLICED, 0)


def kept_of(way: int) -> int:
    """How many of its slices stay gathered from forward to backward."""
    return way % WIRE // KEPT


def wire_of(way: int) -> int:
    """Number of its wire."""
    return way // WIRE


def is_recomputed(way: int) -> bool:
    """Whether its block is recomputed in backward."""
    return bool(way & RECOMPUTED)


def is_offloaded(way: int) -> bool:
    """Whether its states live in host memory."""
    return bool(way & OFFLOADED)
