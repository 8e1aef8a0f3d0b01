"""Time of ring collectives over the links of a cluster.

A ring of ``n`` ranks takes ``n - 1`` steps. Each rank sends ``(n - 1) / n`` of the tensor in an all-gather or
a reduce-scatter, and twice that in an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). Backends change to trees where the latency of the steps would dominate;
it then grows with the logarithm of the number of ranks (Sanders, Speck and Traeff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", 2009).
"""

import math
from dataclasses import dataclass

from osdp.cluster.hardware import NetworkLink


@dataclass(frozen=True, slots=True)
class Ring:
    """A process group and the link its collectives run over.

    Attributes:
        size: Number of ranks.
        wire: Slowest link between two neighbours, with the bandwidth that remains for this ring while all
            other rings of the same stage run.
    """

    size: int
    wire: NetworkLink

    def scatter_seconds(self, nbytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of a tensor of ``nbytes`` in total."""
        if self.size == 1:
            return 0.0
        part = (self.size - 1) / self.size
        return self._latency + part * nbytes / self.wire.bandwidth

    def reduce_seconds(self, nbytes: float) -> float:
        """Seconds of an all-reduce of a tensor of ``nbytes``."""
        return 2 * self.scatter_seconds(nbytes)

    @property
    def _latency(self) -> float:
        # A ring, or a tree (up and down) where that takes fewer steps.
        steps = min(self.size - 1, 2 * math.ceil(math.log2(self.size)))
        return steps * self.wire.latency
