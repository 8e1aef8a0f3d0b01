"""Seconds of every token slice of a sequence on a stage, and of pipelined steps that work on slices.

A slice begins at one point of a grid and ends at a later one; tables are indexed ``[end, begin]``.

For *K* equal stages and any schedule in which slices go forward in order and backward in reverse order, a
step takes at least ::

    sum of (f + b) of all slices of all microbatches + (K - 1) max (f + b + 2 c)

with *f*, *b* and *c* the seconds of forward, backward and sending. Let *q* be the longest slice. Before *q*
of the first microbatch the first stage works on the slices before it; *q* goes through all stages; the last
stage works on everything except what precedes the forward of that *q* and what follows the backward of the
last microbatch's *q*; *q* goes back through all stages; the first stage works on the gradients of the slices
before it. With free sends, and forwards longest where backwards are, GPipe's order takes exactly that.

Where a sender waits, the stages in the middle have both sends of each slice in their work: the second stage
and the last but one take the roles of the first and the last, in addition to the way of the first slice to
the second stage and back from it. In GPipe's order, where backwards begin when all forwards have ended, the
step is two waves, one after the other, each with *K - 1* stages that send and one that does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats, Ints
from osdp.cost.pipeline.simulate import PipelineOutcome, StageCost, simulate
from osdp.cost.token_slices.latency_fit import pass_seconds
from osdp.hardware.device_info import PointToPointLink
from osdp.hardware.token_latency import TokenLatency
from osdp.plan.schedule import Schedule
from osdp.plan.schedules import SCHEDULE_KINDS
from osdp.plan.token_slices import TokenSlices


@dataclass(frozen=True)
class SliceTables:
    """Costs of the slices of one microbatch on one stage.

    Attributes:
        points: Tokens before each point of the grid, from 0 to the sequence's length, shape ``(n + 1,)``.
        forward: Seconds of forward ``[end, begin]``, shape ``(n + 1, n + 1)``; infinite where a slice is not
            allowed.
        backward: Seconds of backward, same shape.
        send: Seconds until a slice is at the next stage, or its gradient at the previous one, same shape.
        blocking: Whether the sender waits for that.
        kept_bytes: Activation bytes that a stage keeps until its backward, for one token of all sequences.
    """

    points: Ints
    forward: Floats
    backward: Floats
    send: Floats
    blocking: bool = False
    kept_bytes: int = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return int(self.points[-1])

    def slices(self, bounds: Sequence[int]) -> TokenSlices:
        """The slices between given points of the grid."""
        return TokenSlices(tuple(np.diff(self.points[list(bounds)]).tolist()))

    def costs(self, slices: TokenSlices) -> tuple[StageCost, ...]:
        """Stage cost of each slice.

        Raises:
            ValueError: The slices do not add up to the sequence, or do not end on the grid.
        """
        slices.check(self.length)
        ends = np.cumsum(slices.lengths)
        at = np.searchsorted(self.points, ends)
        if (self.points[at] != ends).any():
            raise ValueError(
                f"the slices {list(slices.lengths)} do not end on the grid of {list(self.points[:3])} and so "
                "on; make the tables with granularity=1"
            )
        # Each slice begins where the one before it ends.
        begins = [0, *at[:-1].tolist()]
        return tuple(
            StageCost(
                float(self.forward[end, begin]),
                float(self.backward[end, begin]),
                send_seconds=float(self.send[end, begin]),
                send_gradient_seconds=float(self.send[end, begin]),
                activation_bytes=self.kept_bytes * length,
            )
            for end, begin, length in zip(at.tolist(), begins, slices.lengths, strict=True)
        )


def slice_grid_points(length: int, granularity: int = 8) -> Ints:
    """Points at which slices may begin and end: every ``granularity`` tokens, and at the end.

    >>> slice_grid_points(20, 8).tolist()
    [0, 8, 16, 20]

    Raises:
        ValueError: ``length`` or ``granularity`` is not positive.
    """
    if min(length, granularity) < 1:
        raise ValueError(f"{length} tokens on a grid of {granularity}; at least 1 of each is needed")
    return np.append(np.arange(0, length, granularity), length)


def slice_tables(
    latency: TokenLatency,
    batch: int,
    length: int,
    *,
    granularity: int = 8,
    num_layers: int | None = None,
    link: PointToPointLink | None = None,
    blocking: bool = False,
    kept_bytes: int = 0,
) -> SliceTables:
    """Costs of all slices of a sequence by a latency model.

    Args:
        latency: The latency model.
        batch: Sequences of a microbatch.
        length: Tokens of a sequence.
        granularity: Tokens between the points at which slices may begin and end.
        num_layers: Number of layers of a stage, if it differs from that of the latency model.
        link: Link to the next stage; ``None`` if sends are free.
        blocking: Whether the sender waits for a send.
        kept_bytes: Activation bytes that a stage keeps until its backward, for one token of one sequence.

    Raises:
        ValueError: The model has no latencies of ``batch`` sequences, or a number is not positive.
    """
    entry = latency.of(batch)
    points = slice_grid_points(length, granularity)
    # Above the diagonal there are no slices; those entries are never read.
    lengths = np.maximum(points[:, None] - points[None, :], 1)
    contexts = np.broadcast_to(points[None, :], lengths.shape)
    scale = (num_layers or latency.num_layers) / latency.num_layers
    send = np.zeros(lengths.shape)
    if link is not None:
        send = link.latency + batch * lengths * latency.token_bytes / link.bandwidth
    return SliceTables(
        points,
        scale * pass_seconds(entry.forward, lengths, contexts),
        scale * pass_seconds(entry.backward, lengths, contexts),
        send,
        blocking,
        batch * kept_bytes,
    )


def simulate_slices(tables: SliceTables, slices: TokenSlices, schedule: Schedule) -> PipelineOutcome:
    """Simulate a step of equal stages that work on slices.

    Raises:
        ValueError: The slices do not fit the sequence, the grid or the schedule.
    """
    return simulate(schedule, [tables.costs(slices)] * schedule.num_stages, blocking_send=tables.blocking)


@dataclass(frozen=True, slots=True)
class StepBound:
    """Lower bound of a step: the sum of its slices' weights plus a multiple of the largest of their times.

    Attributes:
        weights: Seconds, shape ``(n + 1, n + 1)``.
        times: Seconds, same shape; infinite where a slice is not allowed.
        bottleneck: Factor of the largest time.
    """

    weights: Floats
    times: Floats
    bottleneck: int


def step_bound(tables: SliceTables, *, num_stages: int, num_microbatches: int, schedule: str) -> StepBound:
    """Lower bound of a step up to its last slice; see the module's docstring.

    Args:
        tables: Costs of slices of one microbatch.
        num_stages: Number of equal stages.
        num_microbatches: Microbatches.
        schedule: A schedule in which slices go forward in order and backward in reverse order.
    """
    # The cases of the module's docstring: free sends, then blocking ones (GPipe; three stages or more; two).
    forward, backward, send = tables.forward, tables.backward, tables.send
    work, whole = forward + backward, forward + backward + 2 * send
    if not tables.blocking or num_stages == 1:
        return StepBound(num_microbatches * work, whole, num_stages - 1)
    if SCHEDULE_KINDS[schedule].forwards_first:
        weights = num_microbatches * whole
        weights[-1] += forward[-1]
        weights[:, 0] += backward[:, 0]
        return StepBound(weights, whole, num_stages - 2)
    if num_stages > 2:
        weights = num_microbatches * whole
        weights[:, 0] += work[:, 0] + send[:, 0]
        return StepBound(weights, whole, num_stages - 3)
    return StepBound(num_microbatches * (work + send), work + send, 1)
