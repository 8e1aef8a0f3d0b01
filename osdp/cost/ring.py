"""Collectives over links of a cluster: a ring takes one step for each other rank.

Of ``n`` ranks each sends ``(n - 1) / n`` of the tensor in an all-gather or a reduce-scatter, and twice that
in an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009). Backends change to trees where steps would cost more than bytes: latency then grows with the logarithm
of the ranks (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009).
"""

import math
from dataclasses import dataclass

from osdp.cluster import Wire


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that communicate.

    Attributes:
        size: How many.
        wire: The slowest link between two neighbours, as one of these rings has it while all others of the
            same stage run.
    """

    size: int
    wire: Wire

    def scatter_seconds(self, nbytes: float) -> float:
        """An all-gather, or a reduce-scatter, of a whole tensor of ``nbytes``."""
        if self.size == 1:
            return 0.0
        part = (self.size - 1) / self.size
        return self._latency + part * nbytes / self.wire.bandwidth

    def reduce_seconds(self, nbytes: float) -> float:
        """An all-reduce of a tensor of ``nbytes``."""
        return 2 * self.scatter_seconds(nbytes)

    @property
    def _latency(self) -> float:
        steps = min(self.size - 1, 2 * math.ceil(math.log2(self.size)))
        return steps * self.wire.latency
