"""One training run of a wrapped model: losses, step times, held-out loss and peak memory."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from benchmarks.support.live_bytes import LiveBytes
from examples.text_data import Corpus, batch, masked
from examples.text_model import Size, Wrap, build
from osdp.integrations.huggingface import causal_lm_loss, masked_lm_loss
from osdp.plan.dims import ParallelDims

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
    """Which slice of each global batch this process takes, and where it computes.

    Attributes:
        rank: Of this process.
        world_size: Number of processes.
        device: Where it computes.
        layout: Degrees of parallelism where the model is in stages or layers are in parts.
    """

    rank: int
    world_size: int
    device: torch.device
    layout: ParallelDims | None = None

    @property
    def share(self) -> tuple[int, int]:
        """Number of its slice, and of all slices; all processes of a pipeline take the same one."""
        if self.layout is None:
            return self.rank, self.world_size
        return self.rank // self.layout.tp % self.layout.dp, self.layout.dp


@dataclass(frozen=True, slots=True)
class Run:
    """What one run came to.

    Attributes:
        losses: Mean training loss of each step over the global batch, nats per byte.
        held_out_loss: The same after training on text that was never trained on.
        step_seconds: Median time of a step after warm-up.
        peak_bytes: Most bytes of a step beyond what was alive before the run, in the median, on the process
            that takes the most; ``None`` where nothing counts them.
    """

    losses: tuple[float, ...]
    held_out_loss: float
    step_seconds: float
    peak_bytes: int | None


def train(name: str, wrap: Wrap, settings: Settings, corpus: Corpus, part: Part) -> Run:
    """Build the model from the seed, wrap it, train it and evaluate it."""
    memory = _Memory(part.device)
    model = wrap(build(settings.size, settings.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses, seconds, peaks = [], [], []
    for step in tqdm(range(settings.steps), desc=name, disable=part.rank > 0 or None, leave=False):
        inputs = _share(corpus.train, settings, part, settings.seed, step)
        _warm_up(optimizer, settings, step)
        memory.start_step()
        start = time.perf_counter()
        losses.append(_step(model, optimizer, inputs, part))
        _synchronise(part.device)
        seconds.append(time.perf_counter() - start)
        peaks.append(memory.peak)
    timed = seconds[WARMUP_STEPS:] or seconds
    held_out = _evaluate(model, settings, corpus, part)
    mean = _mean(held_out, part, whole=True)[0]
    return Run(_mean(losses, part), mean, median(timed), _worst_peak(peaks[WARMUP_STEPS:] or peaks, part))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, part: Part) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: torch.Tensor
    if part.layout is None:
        loss = model(**inputs).loss
        loss.backward()
    else:
        loss = cast(Any, model).train_step(*_apart(model, inputs))
    _clip(model)
    optimizer.step()
    return loss.detach()


def _apart(model: nn.Module, inputs: Inputs) -> tuple[Inputs, torch.Tensor, Callable[..., Any]]:
    """What a model in stages is trained with: the inputs, the labels and their loss."""
    loss_fn = masked_lm_loss if cast(Any, model).config.model_type == "bert" else causal_lm_loss
    return {"input_ids": inputs["input_ids"]}, inputs["labels"], loss_fn


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
    number, shares = part.share
    return {name: rows.chunk(shares)[number].to(part.device) for name, rows in whole.items()}


def _evaluate(model: nn.Module, settings: Settings, corpus: Corpus, part: Part) -> list[torch.Tensor]:
    model.eval()
    batches = _held_out_batches(settings, corpus, part)
    if part.layout is not None:
        return [cast(Any, model).eval_step(*_apart(model, inputs)) for inputs in batches]
    with torch.no_grad():
        return [model(**inputs).loss for inputs in batches]


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


class _Memory:
    """Peaks of steps, beyond what is alive when this is made.

    On CPUs that is what the process itself counts, gloo's buffers included, if it was started as
    ``scripts/launch.sh`` does.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # the model of the run before
        self._on_cuda, self._live = device.type == "cuda", None
        if not self._on_cuda:
            with suppress(RuntimeError):
                self._live = LiveBytes()
        self._before = torch.cuda.memory_allocated() if self._on_cuda else self._live.now if self._live else 0

    def start_step(self) -> None:
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self._live is not None:
            self._live.start()

    @property
    def peak(self) -> int | None:
        """Bytes, since the last :meth:`start_step`; ``None`` if nobody counts them."""
        if self._on_cuda:
            return torch.cuda.max_memory_allocated() - self._before
        return None if self._live is None else self._live.peak - self._before


def _worst_peak(peaks: list[int | None], part: Part) -> int | None:
    # Of several machines one may have no compiler to build the counter with.
    counted = [-1 if peak is None else peak for peak in peaks]
    most = round(median(counted))
    worst = torch.tensor([most, -most], device=part.device)
    if part.world_size > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    highest, lowest = int(worst[0]), -int(worst[1])
    return None if lowest < 0 else highest
