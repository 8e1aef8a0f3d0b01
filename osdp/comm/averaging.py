"""Means over the ranks of a group, as its backend has them: of whole tensors, or of each rank's part."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from osdp.comm.messages import Pending
from osdp.comm.part_exchange import PartExchange
from osdp.torch_private.distributed import backend_of


class Reduction:
    """Averaging of gradients over a process group.

    Args:
        group: The ranks.
        device: This rank's, on which the gradients are.
        wait: Waits for a collective that was started.

    Attributes:
        group: The ranks.
        scale: Factor that each rank applies to its gradient before the collective.
        wait: Waits for a collective that was started.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, wait: Callable[[Pending], object]
    ) -> None:
        self.group = group
        self.wait = wait
        size = group.size()
        # NCCL averages within the collective, which saves a pass over the gradients; gloo can only sum.
        averages = backend_of(group, device) == "nccl"
        self.scale = 1.0 if averages else 1.0 / size
        #: Whether flags may travel with gradients: to read them from a GPU would wait for all its work.
        self.carries_flags = not averages and size > 1
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._alone = size == 1

    def start(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start averaging ``tensor`` in place; ``None`` if this is the only rank."""
        if self._alone:
            return None
        work: dist.Work = dist.all_reduce(tensor, op=self._op, group=self.group, async_op=True)
        return work

    def start_exchange(self, parts: Sequence[torch.Tensor]) -> PartExchange | None:
        """Start to add up the part of this rank alone, given that of each; ``None`` for the only rank."""
        if self._alone:
            return None
        # Where the backend averages gradients are not scaled before.
        return PartExchange(parts, self.group, mean=self._op == dist.ReduceOp.AVG)

    def finish(self, work: dist.Work | PartExchange) -> None:
        """Wait until what was started has ended."""
        if isinstance(work, PartExchange):
            work.finish(self.wait)
        else:
            self.wait(work)
