"""Activation memory and compute time of a step, before any decision about parameters.

The chain is the operators that can be resharded between uses, in trace order. Parameter memory changes only
where an operator starts or ends, so the trace is cut into *regions*: region ``2k + 1`` is operator ``k``'s
window, region ``2k`` the gap before it, and within a region only the highest activation matters.

::

    gap 0 | op 0 | gap 1 | op 1 | ... | op K-1 | gap K          regions 0 .. 2K
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from osdp.arrays import Bools, Floats, Ints
from osdp.cost.sharding.operator_costs import gradients_at_once, gradients_by_parameter
from osdp.hardware.profile import Profile
from osdp.model.description import DTYPE_BYTES, ModelDesc, Operator, TensorSpec
from osdp.model.training import Training

#: Bytes of scalars and index tensors that belong to no segment or parameter. The most that was measured on
#: top of a prediction was 260 bytes on an MLP (``benchmarks.memory_accuracy``, torch 2.13, CPU), rounded up
#: generously.
LOOSE_BYTES = 16384

#: Bytes of the random state that a recomputed block keeps on a CPU: those of a Mersenne Twister, as
#: ``torch.get_rng_state`` returns it (torch 2.13). The state of a GPU's generator is in host memory.
RANDOM_STATE = 5056

#: Granularity of torch's CUDA allocator (``kMinBlockSize``), and the maximum number of blocks per parameter
#: or segment.
GPU_BLOCK = 512
_BLOCKS_EACH = 4

#: Below any real memory: an empty region is never the peak.
EMPTY = -1e30


@dataclass(frozen=True, slots=True)
class Backward:
    """Memory in backward: activations, and gradients of the operators outside the chain; bytes.

    Attributes:
        peak: Highest of each region, shape ``(2K + 1,)``.
        start: When operator ``k`` starts its backward, shape ``(K,)``.
        end: When operator ``k`` ends its backward, shape ``(K,)``.
    """

    peak: Floats
    start: Floats
    end: Floats


@dataclass(frozen=True, slots=True)
class RecomputeSpan:
    """Effect of recomputing a block, by operator of the chain; zero except at a block's first operator.

    The activations of a recomputed block are alive only during its own forward and backward. In between there
    are its outputs, and what its forward is rerun from: its input and a random state. Shapes ``(K,)``.

    Attributes:
        saving: Activation bytes that are not kept in between.
        not_rerun: The part of them that is counted when the backward of the block's last operator begins, but
            is not there yet when the block is gathered for it; what comes behind that operator is freed.
        until: Region after the block's last operator; in later ones, forward has freed them, and backward has
            not made them again.
        excess: Bytes that rerunning its forward needs at the beginning of its backward, beyond what the
            backward of its last operator and ``rerun_input`` need.
        rerun_input: Bytes that are kept for the rerun until the block's backward has ended, and of which the
            profile knows nothing by then: what forward would have freed of its input, and the random state.
        rerun_input_early: The same in the block's own forward: what that frees before its last segment.
        seconds: Time of its forward compute.
        host_seconds: Time the host takes to issue it to an accelerator.
        possible: Whether the operator is the first of a block that can be recomputed.
    """

    saving: Floats
    not_rerun: Floats
    until: Ints
    excess: Floats
    rerun_input: Floats
    rerun_input_early: Floats
    seconds: Floats
    host_seconds: Floats
    possible: Bools

    def is_block(self, start: int, stop: int) -> bool:
        """Whether operators ``start`` up to ``stop`` are a whole block that can be recomputed."""
        return bool(self.possible[start]) and bool(self.until[start] == 2 * stop)


@dataclass(frozen=True)
class Timeline:
    """Activation bytes and compute seconds by region; ``K`` chain operators, ``2K + 1`` regions.

    Attributes:
        chain: The operators that can be resharded between uses, in trace order.
        root: All other operators (spanning or not executed): they can only join the root unit or be
            replicated.
        forward_peak: Highest activation bytes of each region in forward, shape ``(2K + 1,)``.
        backward_live: Activation bytes after the backward of each segment and, last, after forward, shape
            ``(S + 1,)``.
        backward_high: Highest activation bytes of each segment's backward, shape ``(S,)``.
        backward_late: The same from its first gradient of a parameter on, shape ``(S,)``.
        backward_given: The same from the moment on at which a parameter has got it, shape ``(S,)``.
        backward_gradients: Bytes of the parameters' gradients that each segment's backward makes, as far as
            they are known, shape ``(S,)``.
        bounds: First segment of each region, and the number of segments; length ``2K + 2``.
        forward_start: Activation bytes when operator ``k`` starts its forward, shape ``(K,)``.
        final: Activation bytes left after backward.
        forward_seconds: Compute of each region in forward.
        backward_seconds: Compute of each region in backward.
        resident: Bytes of buffers and the sample batch.
        recompute: Effect of recomputing blocks.
        kept: Activation bytes that a microbatch keeps from its forward to its backward.
        others: Number of other microbatches whose activations are kept at the same time: those in flight in a
            pipeline.
        exchange_seconds: The part of the seconds spent in collectives of the tensor-parallel group.
        host_forward: Time the host takes to issue a forward to an accelerator; 0 where it computes itself.
        host_backward: The same of a backward.
    """

    chain: tuple[Operator, ...]
    root: tuple[Operator, ...]
    forward_peak: Floats
    backward_live: Floats
    backward_high: Floats
    backward_late: Floats
    backward_given: Floats
    backward_gradients: Floats
    bounds: tuple[int, ...]
    forward_start: Floats
    final: float
    forward_seconds: Floats
    backward_seconds: Floats
    resident: float
    recompute: RecomputeSpan
    kept: float = 0.0
    others: int = 0
    exchange_seconds: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of one microbatch, without tensor-parallel collectives."""
        return float(self.forward_seconds.sum() + self.backward_seconds.sum()) - self.exchange_seconds

    def backward_with(self, gradients: Iterable[tuple[int, float]]) -> Backward:
        """Backward memory of the activations together with given gradients.

        Args:
            gradients: Pairs of a segment and the bytes that are alive from its first gradient on.
        """
        arriving = np.zeros(len(self.backward_live))
        for segment, nbytes in gradients:
            arriving[segment] += nbytes
        # Backward goes from the last segment to the first: what arrives at a segment is alive for all earlier
        # ones.
        there = np.cumsum(arriving[::-1])[::-1]
        # Row i of `live` is what the backward of segment i has left: an operator begins with what the segment
        # behind its last has left, and ends with what its own first leaves.
        firsts, ends = np.array(self.bounds[1:-1:2], dtype=int), np.array(self.bounds[2:-1:2], dtype=int)
        live = self.backward_live + there
        # A segment's own gradients join those of later ones at its first gradient, when some of what its
        # backward began with may be freed already.
        high = np.maximum(self.backward_high + there[1:], self.backward_late + there[:-1])
        return Backward(_region_max(high, self.bounds), live[ends], live[firsts])


def split_operators(model_desc: ModelDesc) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The operators of the chain and those outside it.

    An operator belongs to the chain if it was executed, is not spanning, and its window does not overlap the
    previous operator's.
    """
    chain: list[Operator] = []
    root: list[Operator] = []
    for operator in sorted(model_desc.operators, key=lambda op: (not op.executed, op.first, op.last)):
        overlaps = bool(chain) and operator.first <= chain[-1].last
        owned_by_root = "" in operator.modules
        fits = operator.executed and not operator.spanning and not overlaps and not owned_by_root
        (chain if fits else root).append(operator)
    return tuple(chain), tuple(root)


def build_timeline(model_desc: ModelDesc, profile: Profile, ranks_per_core: int = 1) -> Timeline:
    """Lay the profile's segments out along the trace; ranks that share a core take turns.

    Raises:
        ValueError: The profile lacks a segment of the trace: it was made from another ModelDesc.
    """
    missing = {s.signature for s in model_desc.segments} - set(profile.by_signature)
    if missing:
        raise ValueError(
            f"the profile lacks {len(missing)} of {len(model_desc.distinct_segments)} distinct segments: it "
            "was made from another model or batch; profile again"
        )
    found = [profile.of(segment) for segment in model_desc.segments]
    forward, backward = [s.forward for s in found], [s.backward for s in found]
    # 1. Live activation bytes before each segment's forward (up) and after each segment's backward (down).
    ups = np.concatenate([[0.0], np.cumsum([p.live_bytes for p in forward])])
    downs = ups[-1] + np.concatenate([np.cumsum([p.live_bytes for p in backward][::-1])[::-1], [0.0]])
    up_peaks = [max(p.peak_bytes, p.live_bytes, 0) for p in forward]
    down_peaks = [max(p.peak_bytes, p.live_bytes, 0) for p in backward]
    # 2. Regions: the windows of the chain's operators and the gaps between them.
    chain, root = split_operators(model_desc)
    firsts = np.array([op.first for op in chain], dtype=int)
    # Edges in turn of a gap and of an operator, so that the operators have the odd regions.
    bounds = [0, *(edge for op in chain for edge in (op.first, op.last + 1)), len(found)]
    high = downs[1:] + np.array(down_peaks)
    late_peaks = _peaks_from(down_peaks, [p.gradient_peak_bytes for p in backward])
    given_peaks = _peaks_from(late_peaks, [p.bucket_peak_bytes for p in backward])
    # 3. Seconds of each segment, tensor-parallel collectives included.
    forward_seconds = np.array([ranks_per_core * p.seconds + p.exchange_seconds for p in forward])
    host_forward = np.array([p.host_seconds for p in forward])
    backward_seconds = np.array([ranks_per_core * p.seconds + p.exchange_seconds for p in backward])
    return Timeline(
        chain=chain,
        root=root,
        forward_peak=_region_max(ups[:-1] + np.array(up_peaks), bounds),
        backward_live=downs,
        backward_high=high,
        backward_late=downs[1:] + np.array(late_peaks),
        backward_given=downs[1:] + np.array(given_peaks),
        backward_gradients=np.array([float(p.gradient_bytes) for p in backward]),
        bounds=tuple(bounds),
        forward_start=ups[firsts],
        final=float(max(downs[0], 0.0)),
        forward_seconds=_region_sum(forward_seconds, bounds),
        backward_seconds=_region_sum(backward_seconds, bounds),
        resident=float(profile.resident_bytes) + _loose_bytes(model_desc, profile),
        recompute=_recompute(
            model_desc,
            chain,
            _Walk(ups, ups[:-1] + np.array(up_peaks), downs, high, forward_seconds, host_forward),
            local_batch=profile.local_batch,
            random_state=RANDOM_STATE if profile.device == "cpu" else 0,
        ),
        kept=float(max(ups[-1], 0.0)),
        exchange_seconds=sum(p.exchange_seconds for p in (*forward, *backward)),
        host_forward=float(host_forward.sum()),
        host_backward=sum(p.host_seconds for p in backward),
    )


@dataclass(frozen=True, slots=True)
class GradientArrivals:
    """When gradients of operators appear in their backward, shapes ``(2K + 1,)``; bytes, 0 in gaps.

    A gradient comes when some of what the backward began with may be freed, and opens a bucket once it is
    whole, when even more may be.

    Attributes:
        delay: By how much the highest moment of a region is above the highest with a gradient of its
            operator.
        sum_delay: By how much it is above the highest with all gradients of its operator, less those that
            have not come by then.
        in_flight: What gradients that are made at once, on their way into a buffer, add to the latter.
        bucket_delay: By how much it is above the highest with a bucket that the operator has opened.
        into_bucket: What gradients on their way into that bucket add to the latter.
    """

    delay: Floats
    sum_delay: Floats
    in_flight: Floats
    bucket_delay: Floats
    into_bucket: Floats


def gradient_arrivals(timeline: Timeline, model_desc: ModelDesc, training: Training) -> GradientArrivals:
    """When the gradients of the chain's operators appear.

    Those on their way into a buffer are alive in the backward of the segments that use their parameters, and
    the highest activation of a region may be elsewhere.
    """
    arriving = np.zeros(len(model_desc.segments))
    # Bytes of gradients that are not there yet when a segment's backward begins, and when it ends.
    missing_at_start, missing_at_end = arriving.copy(), arriving.copy()
    late, given = timeline.backward_high.copy(), timeline.backward_high.copy()
    for operator in timeline.chain:
        window = range(operator.first, operator.last + 1)
        using = [i for i in window if operator.name in model_desc.segments[i].operators]
        # Backward goes from the last segment to the first.
        first = max(using, default=operator.last)
        # Backward comes through later segments of the window before: there is no gradient of it yet.
        late[first], given[first] = timeline.backward_late[first], timeline.backward_given[first]
        late[first + 1 : operator.last + 1] = given[first + 1 : operator.last + 1] = EMPTY
        whole = sum(gradients_by_parameter(operator, training))
        made = np.cumsum(timeline.backward_gradients[operator.first : operator.last + 1])
        # If there are more, some are of operators outside the chain, such as a tied one's.
        if made[-1] <= whole:
            missing_at_start[operator.first : first] = made[: first - operator.first]
            missing_at_end[operator.first + 1 : first + 1] = made[: first - operator.first]
        missing_at_start[first : operator.last + 1] = whole
        for module, nbytes in gradients_at_once(operator, training).items():
            users = [i for i in using if model_desc.segments[i].module == module] or using or list(window)
            if len({model_desc.segments[i].call for i in users}) > 1:
                # Autograd keeps what the later call adds until the earlier one has added to it.
                users = list(range(users[0], users[-1] + 1))
            arriving[users] = np.maximum(arriving[users], nbytes)
    bounds = timeline.bounds
    so_far = np.maximum(timeline.backward_high - missing_at_start, late - missing_at_end)
    highest, with_gradient, with_sum, with_bucket = (
        _region_max(values, bounds) for values in (timeline.backward_high, late, so_far, given)
    )
    return GradientArrivals(
        delay=highest - with_gradient,
        sum_delay=highest - with_sum,
        in_flight=_region_max(late + arriving, bounds) - with_gradient,
        bucket_delay=highest - with_bucket,
        into_bucket=_region_max(given + arriving, bounds) - with_bucket,
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """Live activation bytes along ``S`` segments.

    Attributes:
        up: Before each segment's forward and after the last, ``(S + 1,)``.
        up_high: Highest in each forward, ``(S,)``.
        down: After each segment's backward and after forward, ``(S + 1,)``.
        down_high: Highest in each backward, ``(S,)``.
        seconds: Of each forward, ``(S,)``.
        host_seconds: Of the host that issues each forward, ``(S,)``.
    """

    up: Floats
    up_high: Floats
    down: Floats
    down_high: Floats
    seconds: Floats
    host_seconds: Floats


def _recompute(
    model_desc: ModelDesc, chain: Sequence[Operator], walk: _Walk, *, local_batch: int, random_state: int
) -> RecomputeSpan:
    """Effect of recomputing each block that is contiguous in the trace and called once.

    ::

        segments      a .............. b ......
                given   block's segments  handed_on
        walk.up[b] - walk.up[a]   what its forward leaves, less what it frees of the given input
        if it is recomputed       handed_on, the given input and a random state: no more, and no less
    """
    count = len(chain)
    names = ("saving", "not_rerun", "excess", "rerun_input", "rerun_input_early", "seconds", "host_seconds")
    floats = {name: np.zeros(count) for name in names}
    # Behind all regions where there is no block.
    until, possible = np.full(count, 2 * count + 1, dtype=np.int64), np.zeros(count, dtype=bool)
    # The profile may be of another batch than the description, whose shapes grow with it.
    scale = local_batch / model_desc.local_batch
    for block, start, stop in _whole_blocks(chain):
        inside = model_desc.block_segments[block]
        a, b = inside[0], inside[-1] + 1
        if b - a != len(inside) or any(segment.call for segment in model_desc.segments[a:b]):
            continue  # called more than once, or with something else in between
        handed_on = scale * _nbytes(model_desc.segments[b - 1].outputs)
        # What the block was given is kept for the rerun, even where forward frees it; all of it where that is
        # not known.
        given = scale * _nbytes(model_desc.segments[a - 1].outputs) if a else 0.0
        dropped = [
            given if segment.dropped_bytes is None else segment.dropped_bytes(local_batch)
            for segment in model_desc.segments[a:b]
        ]
        released = model_desc.segments[b - 1].released_bytes
        held_on = given if released is None else released(local_batch)
        saving = walk.up[b] - walk.up[a] - handed_on - held_on - random_state
        if saving <= 0:
            continue  # what is kept for the rerun is as much as the activations
        # Rerunning the forward, after the block's activations were dropped, peaks as its first run did.
        again = walk.down[b] - saving + float(np.max(walk.up_high[a:b] - walk.up[a]))
        last = chain[stop - 1]
        floats["saving"][start] = saving
        behind = walk.down[b] - walk.down[last.last + 1]
        floats["not_rerun"][start] = max(0.0, saving - behind)
        held = given if released is None else sum(dropped) + held_on
        floats["rerun_input"][start] = held + random_state
        highest = float(walk.down_high[last.first : last.last + 1].max())
        floats["excess"][start] = max(0.0, again - highest - held)
        early = sum(dropped[:-1])
        floats["rerun_input_early"][start] = (min(early, given) if released is None else early) + random_state
        floats["seconds"][start] = float(walk.seconds[a:b].sum())
        floats["host_seconds"][start] = float(walk.host_seconds[a:b].sum())
        until[start], possible[start] = 2 * stop, True
    return RecomputeSpan(until=until, possible=possible, **floats)


def _whole_blocks(chain: Sequence[Operator]) -> list[tuple[str, int, int]]:
    """Blocks of contiguous operators: FQN, first operator and one past the last."""
    runs: list[tuple[str, int, int]] = []
    for index, operator in enumerate(chain):
        if operator.block is None:
            continue
        if runs and runs[-1][0] == operator.block and runs[-1][2] == index:
            runs[-1] = (operator.block, runs[-1][1], index + 1)
        else:
            runs.append((operator.block, index, index + 1))
    names = [block for block, _, _ in runs]
    return [run for run in runs if names.count(run[0]) == 1]


def _nbytes(outputs: Sequence[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in outputs)


def _loose_bytes(model_desc: ModelDesc, profile: Profile) -> int:
    """Bytes that belong to no segment or parameter."""
    if profile.device == "cpu":
        return LOOSE_BYTES
    # Each GPU allocation is rounded up to such a block: at most one for each parameter, its gradient and its
    # optimizer states, and for a few activations of each segment.
    parameters = sum(len(operator.parameters) for operator in model_desc.operators)
    return LOOSE_BYTES + GPU_BLOCK * _BLOCKS_EACH * (parameters + len(model_desc.segments))


def _peaks_from(peaks: Sequence[int], later: Sequence[int | None]) -> list[int]:
    """``later`` peaks, which are none of ``peaks`` exceeded; those where they are not known."""
    return [peak if late is None else min(late, peak) for peak, late in zip(peaks, later, strict=True)]


def _region_max(values: Floats, bounds: Sequence[int]) -> Floats:
    return np.array([values[a:b].max() if b > a else EMPTY for a, b in pairwise(bounds)])


def _region_sum(values: Floats, bounds: list[int]) -> Floats:
    return np.array([float(values[a:b].sum()) for a, b in pairwise(bounds)])
