"""Description of the part of a model on one tensor-parallel rank, and of its collectives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from osdp.model.description import ModelDesc
from osdp.nn.fake_tensors import FakeTensors
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.tensor_parallel_rank import Exchange, RankDesc, rank_desc
from osdp.torch_private.compiling import run_eagerly
from osdp.tracing.failures import forward_failure
from osdp.tracing.fake_copy import copy_without_weights, on_fake_cpu
from osdp.tracing.loss import LossFn
from osdp.tracing.module_walk import Interval, Key, walk_modules
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.single_draws import SingleDraws, largest_run
from osdp.tracing.trace import describe


def describe_rank(
    part: nn.Module,
    log: list[Exchange],
    sample_inputs: Any,
    whole: ModelDesc,
    plan: TensorParallelPlan,
    *,
    loss_fn: LossFn | None = None,
    atoms: Sequence[str] = (),
) -> RankDesc:
    """Describe the part of a model on the first tensor-parallel rank, and its collectives.

    Args:
        part: The rank's part of the model, with collectives that only pretend that there are other ranks; on
            any device, ``meta`` included.
        log: The list to which forwards of ``part`` and of its copies append the collectives they would run.
        sample_inputs: The batch that the whole model was described with.
        whole: The description of the whole model.
        plan: Sharding of the model over the tensor-parallel ranks.
        loss_fn: As for :func:`osdp.tracing.trace.describe`, like the argument below.
        atoms: FQNs of modules each of which is to be exactly one operator.
    """
    batch = SampleBatch.of(sample_inputs)
    desc = describe(part, batch, loss_fn=loss_fn, atoms=atoms)
    with FakeTensors(), torch.enable_grad():
        twin = copy_without_weights(part, on_fake_cpu)
        fake = batch.without_values()

        def run(draws: SingleDraws) -> tuple[list[Interval], _Watcher]:
            log.clear()
            watcher = _Watcher(log)
            try:
                with run_eagerly(), draws:
                    return walk_modules(twin, fake, watcher, loss_fn=loss_fn), watcher
            except Exception as error:
                raise forward_failure(error, batch.specs) from error

        intervals, watcher = largest_run(twin, run, lambda found: len(found[0]))
    log.clear()
    return rank_desc(whole, desc, plan, watcher.by_segment(intervals, {s.key for s in desc.segments}))


class _Watcher:
    """Assigns the entries of a log of collectives to the intervals in which they were appended."""

    def __init__(self, log: list[Exchange]) -> None:
        self._log = log
        self._begins: list[int] = []
        self._all: list[Exchange] = []

    def enter_forward(self, index: int, interval: Interval, outputs: Any) -> None:
        """An interval begins; see :class:`osdp.tracing.module_walk.Observer`."""
        self._begins.append(len(self._log))

    def leave_forward(self, loss: torch.Tensor) -> None:
        """Forward is over."""
        # Forwards log the collectives of their backward, too: later entries are not needed.
        self._all = list(self._log)

    def start_backward(self) -> None:
        """Nothing is recorded in backward."""

    def enter_backward(self, index: int) -> None:
        """Nothing is recorded in backward."""

    def by_segment(
        self, intervals: Sequence[Interval], segments: set[Key]
    ) -> dict[Key, tuple[Exchange, ...]]:
        """Collectives of each segment; intervals that are no segment belong to the segment before them."""
        found: dict[Key, tuple[Exchange, ...]] = {}
        now = next(interval.key for interval in intervals if interval.key in segments)
        for index, interval in enumerate(intervals):
            now = interval.key if interval.key in segments else now
            stop = self._begins[index + 1] if index + 1 < len(intervals) else len(self._all)
            entries = tuple(self._all[self._begins[index] : stop])
            if entries:
                found[now] = found.get(now, ()) + entries
        return found
