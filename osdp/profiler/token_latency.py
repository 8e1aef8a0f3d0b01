"""Seconds of slices of a sequence on one stage, forward and backward, through cached keys and values.

Keys and values of earlier slices are leaves: a slice's backward starts at its output and at all the keys and
values that it hands on, and ends at its input and at those that it got. So every slice has a small graph of
its own, and the gradients are those of the whole sequence.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from osdp.profiler.machine import device_kind
from osdp.profiler.progress import progress_bar
from osdp.profiler.stopwatch import Clock, timed
from osdp.token_latency import SliceSample, TokenSamples
from osdp.token_slices import TokenSlices

#: Parts of the sequence that are measured without context; and those after some, which are as short as slices
#: of a pipeline are, with the contexts'.
_ALONE = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
_AFTER, _CONTEXTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4), (1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16)


@dataclass(frozen=True)
class DecoderStage:
    """Layers of a causal model that one rank computes.

    Attributes:
        name: What is measured.
        module: Called with ``inputs_embeds=`` of shape ``(batch, length, hidden_size)``, ``past_key_values=``
            and ``use_cache=True``; the first of what it returns has that shape, too. On its device.
        new_cache: An empty cache; its ``layers`` have ``keys`` and ``values``, once there are some.
        num_layers: Layers of it.
        hidden_size: Channels.
    """

    name: str
    module: nn.Module
    new_cache: Callable[[], Any]
    num_layers: int
    hidden_size: int

    @property
    def like(self) -> torch.Tensor:
        """A parameter: its dtype and device are those of the stage."""
        return next(self.module.parameters())


def measure_token_latency(
    stage: DecoderStage,
    length: int,
    *,
    batches: Sequence[int] = (1,),
    granularity: int = 8,
    repeats: int = 5,
    progress: bool = True,
) -> TokenSamples:
    """Measure slices of some lengths after some contexts; medians of ``repeats``.

    Args:
        stage: What is measured.
        length: Tokens of the longest sequence.
        batches: Sequences at a time.
        granularity: Lengths are multiples of it, and it is the shortest.
        repeats: How often each slice is run, after once without a clock.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A number is not positive.
    """
    if min(length, granularity, repeats, *batches, len(batches)) < 1:
        raise ValueError(
            f"{length} tokens, a grid of {granularity}, {repeats} repeats and batches {list(batches)}: each "
            "must be at least 1"
        )
    places = [(batch, *place) for batch in batches for place in sample_places(length, granularity)]
    contexts = {(batch, context): _context(stage, batch, context) for batch, _, context in places}
    seconds: dict[tuple[int, int, int], list[tuple[float, float]]] = {place: [] for place in places}
    bar = progress_bar(len(places) * (repeats + 1), "slices", shown=progress)
    # In rounds over all slices: what disturbs the machine for a while disturbs no slice more than others.
    # Several forwards before their backwards: what was just used is at hand sooner than it is in a pipeline.
    for _ in range(repeats + 1):
        for together in in_flight(places, length):
            started = [_started(stage, batch, size, contexts[batch, at]) for batch, size, at in together]
            for place, (forward, finish) in reversed(list(zip(together, started, strict=True))):
                seconds[place].append((forward, finish()))
                bar.update()
    bar.close()
    samples = [
        SliceSample(*place, *(median(run[which] for run in runs[1:]) for which in (0, 1)))
        for place, runs in seconds.items()
    ]
    like = stage.like
    token_bytes = stage.hidden_size * like.element_size()
    return TokenSamples(stage.name, device_kind(like.device), stage.num_layers, token_bytes, tuple(samples))


def sample_places(length: int, granularity: int) -> tuple[tuple[int, int], ...]:
    """The (length, context) of the slices to measure, in the order in which that is done.

    >>> sample_places(16, 8)
    ((8, 0), (16, 0), (8, 8))
    """

    def near(part: float) -> int:
        return min(length, max(granularity, granularity * round(part * length / granularity)))

    alone = sorted({granularity, length, *map(near, _ALONE)} if length >= granularity else {length})
    after = {(near(i), near(j)) for i in _AFTER for j in _CONTEXTS if near(i) + near(j) <= length}
    return (*((size, 0) for size in alone), *sorted(after))


def in_flight(places: Sequence[tuple[int, int, int]], tokens: int) -> list[list[tuple[int, int, int]]]:
    """Groups of slices with about so many tokens: as many as wait for their backward in a pipeline.

    >>> in_flight([(1, 8, 0), (1, 8, 8), (1, 8, 16), (1, 16, 0)], 16)
    [[(1, 8, 0), (1, 8, 8)], [(1, 8, 16)], [(1, 16, 0)]]
    """
    groups: list[list[tuple[int, int, int]]] = []
    for place in places:
        if not groups or sum(size for _, size, _ in (*groups[-1], place)) > tokens:
            groups.append([])
        groups[-1].append(place)
    return groups


def measure_slices(
    stage: DecoderStage, slices: TokenSlices, *, batch: int = 1, repeats: int = 3
) -> tuple[SliceSample, ...]:
    """Run whole sequences slice by slice, forward and then backward; the median seconds of each slice."""
    clock = Clock(stage.like.device)
    runs = [_sequence(stage, slices, batch, clock) for _ in range(repeats + 1)][1:]
    return tuple(
        SliceSample(
            batch, end - begin, begin, median(run[i][0] for run in runs), median(run[i][1] for run in runs)
        )
        for i, (begin, end) in enumerate(slices.bounds)
    )


def _context(stage: DecoderStage, batch: int, length: int) -> Any:
    """A cache with so many tokens."""
    cache = stage.new_cache()
    if length:
        with torch.no_grad():
            stage.module(inputs_embeds=_hidden(stage, batch, length), past_key_values=cache, use_cache=True)
    return cache


def _started(stage: DecoderStage, batch: int, length: int, context: Any) -> tuple[float, Callable[[], float]]:
    """Seconds of the forward of one slice after what a cache holds; and its backward, which tells its own."""
    clock = Clock(stage.like.device)
    cache = copy.deepcopy(context)
    _detached(cache)
    x = _hidden(stage, batch, length).requires_grad_()
    forward, (output, handed_on) = timed(clock, partial(_forward, stage, x, cache))
    roots = [output, *handed_on]
    gradients = [torch.ones_like(root) for root in roots]
    return forward, lambda: timed(clock, partial(torch.autograd.backward, roots, gradients))[0]


def _sequence(
    stage: DecoderStage, slices: TokenSlices, batch: int, clock: Clock
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each slice of one sequence."""
    cache = stage.new_cache()
    done = []
    for length in slices.lengths:
        leaves = _detached(cache)
        x = _hidden(stage, batch, length).requires_grad_()
        seconds, (output, handed_on) = timed(clock, partial(_forward, stage, x, cache))
        done.append((seconds, output, leaves, handed_on))
    found = []
    gradients: list[torch.Tensor] | None = None
    for forward, output, leaves, handed_on in reversed(done):
        roots, grads = [output], [torch.ones_like(output)]
        if gradients is not None:
            roots += handed_on
            grads += gradients
        backward, _ = timed(clock, partial(torch.autograd.backward, roots, grads))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        found.append((forward, backward))
    return found[::-1]


def _forward(stage: DecoderStage, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output = stage.module(inputs_embeds=x, past_key_values=cache, use_cache=True)[0]
    return output, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _detached(cache: Any) -> list[torch.Tensor]:
    """Makes leaves of all keys and values of a cache."""
    leaves = []
    for layer in cache.layers:
        if layer.keys is not None and layer.keys.numel():
            layer.keys, layer.values = (
                tensor.detach().requires_grad_() for tensor in (layer.keys, layer.values)
            )
            leaves += [layer.keys, layer.values]
    return leaves


def _hidden(stage: DecoderStage, batch: int, length: int) -> torch.Tensor:
    like = stage.like
    return torch.randn(batch, length, stage.hidden_size, dtype=like.dtype, device=like.device)
