"""Toy model of units that communicate, or run hooks, and compute next to nothing.

On CPU the units also sweep through memory, timed on each rank and subtracted: real compute leaves cold caches
to hooks and copies, which would look cheaper with warm ones than they are in a real step.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

#: Elements that a unit sweeps through in each pass: several times the size of a core's own caches; takes a
#: few milliseconds.
_SWEPT = 2**21

#: Parameters of a unit that stands for one block.
NUM_TENSORS = 12


class ComputeClock:
    """Time spent on compute and on making gradients, which is not part of the communication."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._marks: list[tuple[Any, Any]] = []
        # On accelerators collectives overlap with compute, so its time could not be subtracted: no sweep.
        on_cpu = device.type == "cpu"
        self._swept = torch.ones(_SWEPT, dtype=torch.float32, device="cpu") if on_cpu else None

    def sweep(self) -> None:
        """Evict the caches, as a unit's compute would."""
        if self._swept is not None:
            self._swept.mul_(1.0)

    def mark(self) -> Any:
        """Mark the current point in time: an event in the stream, or the clock on CPU."""
        if self._device.type == "cpu":
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def add(self, start: Any, end: Any) -> None:
        """Count the time from ``start`` to ``end``."""
        self._marks.append((start, end))

    def take(self) -> float:
        """Seconds counted since the last call; the device must be synchronised."""
        on_cpu = self._device.type == "cpu"
        seconds = sum(float(b - a if on_cpu else a.elapsed_time(b) / 1e3) for a, b in self._marks)
        self._marks.clear()
        return seconds


class _Compute(torch.autograd.Function):
    """Returns a copy of its first input; its backward makes a new gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: ComputeClock, *parameters: torch.Tensor) -> torch.Tensor:
        start = clock.mark()
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        ctx.clock = clock
        clock.sweep()
        clock.add(start, clock.mark())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        start = ctx.clock.mark()
        ctx.clock.sweep()
        made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.clock.add(start, ctx.clock.mark())
        return (grads[0], None, *made)


class ToyUnit(nn.Module):
    """Parameters with the shapes of the twelve tensors of a transformer block, or of several in its place.

    Args:
        nbytes: About their bytes.
        device: Where they are.
        clock: Counts the time of what a unit computes.
        blocks: Number of blocks that make up ``nbytes`` together.
    """

    def __init__(self, nbytes: int, device: torch.device, clock: ComputeClock, blocks: int = 1) -> None:
        super().__init__()
        # 12 h^2 elements in four matrices, of four bytes each; the vectors hardly count.
        h = max(1, round((nbytes / blocks / 48) ** 0.5))
        matrices = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
        vectors = ((3 * h,), (4 * h,), *[(h,)] * 6)
        # Whatever the default dtype is, which Lightning's "bf16-true" sets around configure_model.
        shapes = (*matrices, *vectors) * blocks
        make = (torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes)
        self.tensors = nn.ParameterList([nn.Parameter(tensor) for tensor in make])
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``x``."""
        result = _Compute.apply(x, self._clock, *self.tensors)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, result)
