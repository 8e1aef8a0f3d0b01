"""One training run of a wrapped model: losses, step times, held-out loss and peak memory."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from benchmarks.memory_oracle import Step, fake_group, measure_peak
from scripts.text_data import Corpus, batch, masked
from scripts.text_model import Size, Wrap, build

#: Token ids and labels, each of shape ``(samples, length)``.
Inputs = dict[str, torch.Tensor]

WARMUP_STEPS = 3
EVALUATION_BATCHES = 4
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What every run of a comparison shares.

    Attributes:
        size: Shape of the model.
        samples: Samples of one step over all processes.
        steps: Optimizer steps.
        learning_rate: Highest one; it rises over the first tenth of the steps.
        seed: Of the weights and of the order of the data.
    """

    size: Size
    samples: int
    steps: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Part:
    """Which slice of each global batch this process takes, and where it computes."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Run:
    """What one run came to.

    Attributes:
        losses: Mean training loss of each step over the global batch, nats per byte.
        held_out_loss: The same after training on text that was never trained on.
        step_seconds: Median time of a step after warm-up.
        peak_bytes: Peak of this process's device allocator over the run; 0 where that is not counted (CPU).
    """

    losses: tuple[float, ...]
    held_out_loss: float
    step_seconds: float
    peak_bytes: int


def train(name: str, wrap: Wrap, settings: Settings, corpus: Corpus, part: Part) -> Run:
    """Build the model from the seed, wrap it, train it and evaluate it."""
    _reset_peak(part.device)
    model = wrap(build(settings.size, settings.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses, seconds = [], []
    for step in tqdm(range(settings.steps), desc=name, disable=part.rank > 0 or None, leave=False):
        inputs = _share(corpus.train, settings, part, settings.seed, step)
        _warm_up(optimizer, settings, step)
        start = time.perf_counter()
        losses.append(_step(model, optimizer, inputs))
        _synchronise(part.device)
        seconds.append(time.perf_counter() - start)
    timed = seconds[WARMUP_STEPS:] or seconds
    peak = torch.cuda.max_memory_allocated() if part.device.type == "cuda" else 0
    held_out = _evaluate(model, settings, corpus, part)
    return Run(_mean(losses, part), _mean(held_out, part, whole=True)[0], median(timed), peak)


def peak_on_cpu(make_wrap: Callable[[], Wrap], settings: Settings, corpus: Corpus, world_size: int) -> int:
    """Peak of live tensor bytes on rank 0, the worst one, in a step under a group that moves no data.

    The events of a real gloo group do not add up, so this needs a pass of its own, after all process groups
    are gone.
    """
    part = Part(0, world_size, torch.device("cpu"))
    wrap: Wrap

    def build_step() -> Step:
        model = wrap(build(settings.size, settings.seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        inputs = _share(corpus.train, settings, part, settings.seed, 0)
        return lambda: _step(model, optimizer, inputs)

    with fake_group(world_size):
        # A mesh stays in torch's own cache, so it is made before anything is counted.
        wrap = make_wrap()
        return measure_peak(build_step).peak


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(**inputs).loss
    loss.backward()
    _clip(model)
    optimizer.step()
    return loss.detach()


def _clip(model: nn.Module) -> None:
    # OSDP's own is right for every plan; torch's only where all parameters are on one mesh.
    own: Callable[[float], object] | None = getattr(model, "clip_grad_norm_", None)
    if own is not None:
        own(MAX_GRADIENT_NORM)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)


def _warm_up(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    share = min(1.0, (step + 1) / max(1, settings.steps // 10))
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * share


def _share(text: NDArray[np.uint8], settings: Settings, part: Part, seed: int, step: int) -> Inputs:
    """This process's rows of the global batch."""
    tokens = batch(text, settings.samples, settings.size.seq, seed=seed, step=step)
    is_masked = settings.size.family == "bert"
    inputs, labels = masked(tokens, seed=seed, step=step) if is_masked else (tokens, tokens)
    whole = {"input_ids": inputs, "labels": labels}
    return {name: rows.chunk(part.world_size)[part.rank].to(part.device) for name, rows in whole.items()}


def _evaluate(model: nn.Module, settings: Settings, corpus: Corpus, part: Part) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        return [model(**inputs).loss for inputs in _held_out_batches(settings, corpus, part)]


def _held_out_batches(settings: Settings, corpus: Corpus, part: Part) -> Iterator[Inputs]:
    for index in range(EVALUATION_BATCHES):
        yield _share(corpus.held_out, settings, part, settings.seed + 1, index)


def _mean(values: list[torch.Tensor], part: Part, whole: bool = False) -> tuple[float, ...]:
    """Means over the processes, of each value or (``whole``) of all of them."""
    stacked = torch.stack(values)
    stacked = stacked.mean().reshape(1) if whole else stacked
    if part.world_size > 1:
        dist.all_reduce(stacked)
    return tuple((stacked / part.world_size).tolist())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # the model of the run before
        torch.cuda.reset_peak_memory_stats()
