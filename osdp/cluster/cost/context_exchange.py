"""Exchanges of keys and values over the context-parallel ranks of an attention: exposed seconds, and bytes.

Two ways are in use. Around a ring, each step passes keys and values on while attention computes with those
that are there (Liu et al., "Ring Attention", arXiv:2310.01889); Transformer Engine, and so Megatron-LM, does
this by default. Or all keys and values are gathered first (Llama Team, arXiv:2407.21783, section 3.3.2), and
their gradients reduce-scattered; torchtitan does this by default.
"""

from osdp.cluster.cost.links import Ring

#: Products of FlashAttention's backward for each of its forward: five and two (Dao, arXiv:2307.08691).
_BACKWARD_PRODUCTS = 5 / 2


def exchange_seconds(ring: Ring, nbytes: int, attention: float, *, forwards: int, around: bool) -> float:
    """Exposed seconds of the exchanges of one item for a microbatch, forward and backward.

    Args:
        ring: The context-parallel group.
        nbytes: Bytes of the keys and values of one rank's part of the sequence.
        attention: Seconds of the attention products of a forward, for all keys.
        forwards: Number of forwards: 2 where one is recomputed.
        around: Whether parts go around a ring beside attention, or all are gathered before.
    """
    if ring.size == 1 or not nbytes:
        return 0.0
    if not around:
        # A backward gathers keys and values once more and reduce-scatters their gradients.
        return (forwards + 2) * ring.scatter_seconds(nbytes * ring.size)

    def exposed(passed: int, compute: float) -> float:
        # Each part but the last is computed with while the next one arrives.
        return (ring.size - 1) * max(0.0, ring.link.seconds(passed) - compute / ring.size)

    # In backward the gradients of keys and values travel with them.
    return forwards * exposed(nbytes, attention) + exposed(2 * nbytes, _BACKWARD_PRODUCTS * attention)


def exchanged_bytes(cp: int, nbytes: int, *, around: bool) -> int:
    """Transient bytes of keys, values and their gradients that come from other context-parallel ranks.

    Args:
        cp: Number of ranks.
        nbytes: Bytes of the keys and values of one rank's part of the sequence.
        around: Whether parts go around a ring, which needs one to compute with and one that arrives.
    """
    return 2 * nbytes * (min(2, cp - 1) if around else cp - 1)
