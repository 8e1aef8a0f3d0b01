"""What the steps of a training take, beside what the plan predicts."""

import logging
import resource
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from osdp.plan.measured import MemoryReport
from osdp.plan.plan import Plan

logger = logging.getLogger(__name__)

#: Steps that may make what is made once, and those after them whose times are told.
_FIRST, _TOLD = 2, 5
#: From how many times the planned seconds on a step leaves the plan's ground.
_FAR = 1.5
#: Steps whose times are kept.
_KEPT = 50


class MeasuredSteps:
    """Times the steps of a model, and reads its memory.

    Args:
        plan: Its plan.
        device: This rank's device.
    """

    def __init__(
        self, plan: Plan, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._plan, self._device, self._clock = plan, device, clock
        if device.type == "cuda":
            # What measuring took, and the whole model before it was sharded, is no part of a step.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None
        self._count = 0
        self._optimizer: weakref.ref[Optimizer] | None = None

    def note(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped; of several the first one marks the steps."""
        if self._optimizer is None or self._optimizer() is None:  # another may have been made since
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        now = self._clock()
        self._count += 1
        if self._last is not None and self._count > _FIRST:
            self._seconds.append(now - self._last)
        self._last = now
        if self._count == _FIRST + _TOLD and (not dist.is_initialized() or dist.get_rank() == 0):
            found = self.report()
            # The mean over several shapes says nothing of a few steps.
            tells = self._plan.measured_profile and len(self._plan.batch_shapes) < 2
            far = tells and median(self._seconds) > _FAR * found.predicted_step_seconds
            logger.log(
                logging.WARNING if far else logging.INFO,
                "%s%s",
                found,
                ". Steps take far longer than the plan says, so that another may be faster: something else "
                "uses the machine, the loop does more than the model, or the batch is another"
                if far
                else "",
            )

    def report(self) -> MemoryReport:
        """What was measured so far."""
        counts = self._device.type == "cuda"
        # In KiB on Linux, in bytes on macOS.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        return MemoryReport(
            step_seconds=median(self._seconds) if self._seconds else None,
            predicted_step_seconds=self._plan.predicted.step_seconds,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if counts else None,
            reserved_bytes=torch.cuda.max_memory_reserved(self._device) if counts else None,
            resident_bytes=resident,
            predicted_peak_bytes=self._plan.predicted.peak_bytes,
            memory_limit=self._plan.memory_limit,
        )
