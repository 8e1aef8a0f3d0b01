"""One training run of a wrapped model: losses, step times, held-out loss and peak memory."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from benchmarks.support.memory_oracle import Step, fake_group, measure_peak
from examples.text_data import Corpus, batch, masked
from examples.text_model import Size, Wrap, build
from osdp.integrations.huggingface import causal_lm_loss, masked_lm_loss
from osdp.plan.dims import ParallelDims
from osdp.runtime.pipeline.messenger import MessageSpecs
from osdp.runtime.steps import StepRunner

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

    @property
    def worst(self) -> "tuple[Part, ...]":
        """The processes of which one has the highest peak: the first of each stage."""
        if self.layout is None:
            return (replace(self, rank=0),)
        ranks = range(0, self.world_size, self.layout.dp * self.layout.tp)
        return tuple(replace(self, rank=rank) for rank in ranks)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run came to.

    Attributes:
        losses: Mean training loss of each step over the global batch, nats per byte.
        held_out_loss: The same after training on text that was never trained on.
        step_seconds: Median time of a step after warm-up.
        peak_bytes: Peak of this process's device allocator over the run; 0 where that is not counted (CPU).
        message_specs: Shapes of what stages sent each other, over all processes.
    """

    losses: tuple[float, ...]
    held_out_loss: float
    step_seconds: float
    peak_bytes: int
    message_specs: MessageSpecs = field(default_factory=dict)


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
        losses.append(_step(model, optimizer, inputs, part))
        _synchronise(part.device)
        seconds.append(time.perf_counter() - start)
    timed = seconds[WARMUP_STEPS:] or seconds
    peak = torch.cuda.max_memory_allocated() if part.device.type == "cuda" else 0
    held_out = _evaluate(model, settings, corpus, part)
    mean = _mean(held_out, part, whole=True)[0]
    return Run(_mean(losses, part), mean, median(timed), peak, _message_specs(model, part))


def peak_on_cpu(
    make_wrap: Callable[[], Wrap], settings: Settings, corpus: Corpus, part: Part, message_specs: MessageSpecs
) -> int:
    """Peak of live tensor bytes on one rank, in a step under a group that moves no data.

    The events of a real gloo group do not add up, so this needs a pass of its own, after all process groups
    are gone. Stages are told the shapes of their ``message_specs``, which do not arrive either.
    """
    wrap: Wrap

    def build_step() -> Step:
        model = wrap(build(settings.size, settings.seed))
        if part.layout is not None:
            _steps(model).message_specs.update(message_specs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        inputs = _share(corpus.train, settings, part, settings.seed, 0)
        return lambda: _step(model, optimizer, inputs, part)

    with fake_group(part.world_size, part.rank):
        # A mesh stays in torch's own cache, so it is made before anything is counted.
        wrap = make_wrap()
        return measure_peak(build_step).peak


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


def _steps(model: nn.Module) -> StepRunner:
    found: StepRunner = cast(Any, model)._steps
    return found


def _message_specs(model: nn.Module, part: Part) -> MessageSpecs:
    if part.layout is None:
        return {}
    gathered: list[MessageSpecs] = [{} for _ in range(part.world_size)]
    dist.all_gather_object(gathered, _steps(model).message_specs)
    return {kind: shape for specs in gathered for kind, shape in specs.items()}


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


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # the model of the run before
        torch.cuda.reset_peak_memory_stats()
