"""ItemPrices: what one item of a chain costs on one kind of slot."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ItemPrices:
    """Costs of one item of the chain on one kind of slot; seconds per microbatch, and bytes.

    Attributes:
        compute: Forward and backward.
        recompute: Forwards recomputed in the backward.
        backward: Backward part of ``compute``.
        tensor: All-reduces over tensor-parallel ranks, including recomputed ones.
        context: Exposed exchanges of keys, values and their gradients over context-parallel ranks.
        experts: All-to-alls of tokens over expert-parallel ranks, including recomputed ones.
        shards: Exposed all-gathers and reduce-scatters of each microbatch.
        parameters: Parameter count on a rank before data-parallel sharding.
        undivided: The same with all experts, of which a rank may have a part.
        kept: Bytes saved from its forward to its backward.
        working: Transient bytes during its own backward.
    """

    compute: float
    recompute: float
    backward: float
    tensor: float
    context: float
    experts: float
    shards: float
    parameters: int
    undivided: int
    kept: int
    working: int

    @property
    def seconds(self) -> float:
        """Seconds per microbatch."""
        communication = self.tensor + self.context + self.experts + self.shards
        return self.compute + self.recompute + communication
