"""Decoders that sleep instead of computing, for the claim about token slices.

A sleeping decoder is a narrow GPT-2 of stock blocks. Each takes, in forward and in backward, as long as a
stage was measured to take for a slice of that length after that much context, and sleeps for what its own
compute leaves of that; masks, caches, messages and gradients are real. A core can hold many sleeping ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.support.models import Case
from osdp.cost.token_slices.latency_fit import pass_seconds
from osdp.hardware.token_latency import BatchLatency


class _Clock:
    """How long a pass of a block takes, and when it began."""

    def __init__(self, forward: float, backward: float) -> None:
        self.seconds = {"forward": forward, "backward": backward}
        self.began = 0.0

    def begin(self) -> None:
        self.began = time.perf_counter()

    def end(self, which: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            time.sleep(max(0.0, self.began + self.seconds[which] - time.perf_counter()))


class _Enter(torch.autograd.Function):
    """Where a block's forward begins and its backward ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.begin()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.end("backward", grads[0])
        return grads[0], None


class _Leave(torch.autograd.Function):
    """Where its forward ends and its backward begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.end("forward", x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.begin()
        return grads[0], None


class NappingBlock(nn.Module):
    """A block of GPT-2 that takes as long as a stage that computes: it sleeps for what is left."""

    def __init__(self, block: nn.Module, layer: int, latency: BatchLatency | None) -> None:
        super().__init__()
        self.block, self.layer, self.latency = block, layer, latency

    def forward(self, hidden: torch.Tensor, cache: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        if self.latency is None:
            return self.block(hidden, cache, *args, **kwargs)
        context = cache.get_seq_length(self.layer) if cache is not None else 0
        passes = (self.latency.forward, self.latency.backward)
        clock = _Clock(*(float(pass_seconds(p, hidden.shape[1], context)) for p in passes))
        output = self.block(_Enter.apply(hidden, clock), cache, *args, **kwargs)
        if isinstance(output, tuple):
            return (_Leave.apply(output[0], clock), *output[1:])
        return _Leave.apply(output, clock)


def napping(case: Case, name: str, latency: BatchLatency | None) -> Case:
    """``case``, a GPT-2, whose blocks sleep; ``None``: they do not."""

    def build() -> nn.Module:
        model: Any = case.build()
        blocks = model.transformer.h
        for layer, block in enumerate(blocks):
            blocks[layer] = NappingBlock(block, layer, latency)
        return model

    return replace(case, name=name, build=build)


def without_labels(case: Case) -> Case:
    """``case`` with inputs alone: labels are targets of the step."""

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        found = case.batch(size, generator)
        return {name: tensor for name, tensor in found.items() if name != "labels"}

    return replace(case, batch=batch)


def norm_error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference of two gradients by the norm of the wanted one."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
