"""Measured time of token slices on one pipeline stage, forward and backward, through cached keys and values.

Keys and values of earlier slices are autograd leaves: a slice's backward starts at its output and at all the
keys and values that it passes on, and ends at its input and at the keys and values that it was given. So
every slice has a small graph of its own, and the gradients are those of the whole sequence.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from osdp.hardware.token_latency import SliceSample, TokenSamples
from osdp.plan.token_slices import TokenSlices
from osdp.profiler.links.machine import device_kind
from osdp.profiler.progress import progress_bar
from osdp.profiler.stopwatch import Clock, time_call

#: Fractions of the sequence length: of slices measured without context; of slices measured after a context,
#: which are as short as those of a pipeline, and of these contexts.
_ALONE = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
_AFTER, _CONTEXTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4), (1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16)


@dataclass(frozen=True)
class DecoderStage:
    """Layers of a causal model that form one pipeline stage.

    Attributes:
        name: Description of what is measured.
        module: Called with ``inputs_embeds=`` of shape ``(batch, length, hidden_size)``, a cache and
            ``use_cache=True``; its first output has that shape, too. It is on its device already.
        cache_argument: Name by which it takes the cache.
        new_cache: Makes an empty cache; its ``layers`` have ``keys`` and ``values`` once there are any.
        num_layers: Number of its layers.
        hidden_size: Number of features of its hidden states.
    """

    name: str
    module: nn.Module
    cache_argument: str
    new_cache: Callable[[], Any]
    num_layers: int
    hidden_size: int

    @property
    def like(self) -> torch.Tensor:
        """A parameter of the stage, for its dtype and device."""
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
    """Measure slices of several lengths after several contexts; medians of ``repeats`` runs.

    Args:
        stage: The stage to measure.
        length: Tokens of the longest sequence.
        batches: Numbers of sequences at a time.
        granularity: The shortest length in tokens; all lengths are multiples of it.
        repeats: Number of timed runs of each slice, after one warm-up run.
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
    contexts = {(batch, context): _fill_cache(stage, batch, context) for batch, _, context in places}
    seconds: dict[tuple[int, int, int], list[tuple[float, float]]] = {place: [] for place in places}
    bar = progress_bar(len(places) * (repeats + 1), "slices", shown=progress)
    # In rounds over all slices, so that a temporary disturbance of the machine affects all slices alike.
    # Several forwards run before their backwards, as in a pipeline: a backward right after its forward would
    # find warmer caches than it does there.
    for _ in range(repeats + 1):
        for together in in_flight(places, length):
            started = [_run_slice(stage, batch, size, contexts[batch, at]) for batch, size, at in together]
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
    """The (length, context) of the slices to measure, in tokens, in the order of measurement.

    >>> sample_places(16, 8)
    ((8, 0), (16, 0), (8, 8))
    """

    def near(part: float) -> int:
        return min(length, max(granularity, granularity * round(part * length / granularity)))

    alone = sorted({granularity, length, *map(near, _ALONE)} if length >= granularity else {length})
    after = {(near(i), near(j)) for i in _AFTER for j in _CONTEXTS if near(i) + near(j) <= length}
    return (*((size, 0) for size in alone), *sorted(after))


def in_flight(places: Sequence[tuple[int, int, int]], tokens: int) -> list[list[tuple[int, int, int]]]:
    """Group slices into groups of at most ``tokens`` tokens, like those in flight in a pipeline.

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
    """Run whole sequences slice by slice, forward and then backward; returns each slice's median seconds."""
    clock = Clock(stage.like.device)
    runs = [_run_sequence(stage, slices, batch, clock) for _ in range(repeats + 1)][1:]
    return tuple(
        SliceSample(
            batch, end - begin, begin, median(run[i][0] for run in runs), median(run[i][1] for run in runs)
        )
        for i, (begin, end) in enumerate(slices.bounds)
    )


def _fill_cache(stage: DecoderStage, batch: int, length: int) -> Any:
    """A cache filled with ``length`` tokens."""
    cache = stage.new_cache()
    if length:
        with torch.no_grad():
            _call(stage, _random_hidden(stage, batch, length), cache)
    return cache


def _run_slice(
    stage: DecoderStage, batch: int, length: int, context: Any
) -> tuple[float, Callable[[], float]]:
    """Run the forward of one slice after a cached context.

    Returns:
        Its seconds, and a function that runs the backward and returns that one's seconds.
    """
    clock = Clock(stage.like.device)
    cache = copy.deepcopy(context)
    _detach_cache(cache)
    x = _random_hidden(stage, batch, length).requires_grad_()
    forward, (output, cached) = time_call(clock, partial(_forward, stage, x, cache))
    roots = [output, *cached]
    gradients = [torch.ones_like(root) for root in roots]
    return forward, lambda: time_call(clock, partial(torch.autograd.backward, roots, gradients))[0]


def _run_sequence(
    stage: DecoderStage, slices: TokenSlices, batch: int, clock: Clock
) -> list[tuple[float, float]]:
    """Run one sequence slice by slice; returns the (forward, backward) seconds of each slice."""
    cache = stage.new_cache()
    done = []
    for length in slices.lengths:
        leaves = _detach_cache(cache)
        x = _random_hidden(stage, batch, length).requires_grad_()
        seconds, (output, cached) = time_call(clock, partial(_forward, stage, x, cache))
        done.append((seconds, output, leaves, cached))
    found = []
    gradients: list[torch.Tensor] | None = None
    for forward, output, leaves, cached in reversed(done):
        roots, grads = [output], [torch.ones_like(output)]
        if gradients is not None:
            roots += cached
            grads += gradients
        backward, _ = time_call(clock, partial(torch.autograd.backward, roots, grads))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        found.append((forward, backward))
    return found[::-1]


def _forward(stage: DecoderStage, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output = _call(stage, x, cache)
    return output, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _call(stage: DecoderStage, x: torch.Tensor, cache: Any) -> torch.Tensor:
    output: torch.Tensor = stage.module(inputs_embeds=x, use_cache=True, **{stage.cache_argument: cache})[0]
    return output


def _detach_cache(cache: Any) -> list[torch.Tensor]:
    """Replace all keys and values of a cache by autograd leaves, and return these."""
    leaves = []
    for layer in cache.layers:
        if layer.keys is not None and layer.keys.numel():
            layer.keys, layer.values = (
                tensor.detach().requires_grad_() for tensor in (layer.keys, layer.values)
            )
            leaves += [layer.keys, layer.values]
    return leaves


def _random_hidden(stage: DecoderStage, batch: int, length: int) -> torch.Tensor:
    like = stage.like
    return torch.randn(batch, length, stage.hidden_size, dtype=like.dtype, device=like.device)
