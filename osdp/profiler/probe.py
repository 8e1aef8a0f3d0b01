"""A toy model that makes FSDP2 do everything it does to a unit, and next to no compute.

What a collective costs a step is not what the collective alone takes: FSDP2 allocates the gathered
parameters, copies the shard in and the parameters out, views them, runs hooks. Timing ``fully_shard`` itself on
a model whose forward does nothing measures all of that, through torch's public interface, on any backend.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

#: Units timed together, so that the clock and the root's hooks weigh little.
_UNITS = 4


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given; CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of one unit in one step.

    Attributes:
        unshard: Its forward, without the hooks: the whole all-gather.
        hooks: Its forward when it is unsharded already.
        reduce: Its backward, without the hooks and without computing gradients: the whole reduce-scatter.
        all_reduce: One all-reduce of as many bytes.
    """

    unshard: float
    hooks: float
    reduce: float
    all_reduce: float


class _GradientClock:
    """Time spent on making gradients, which is the model's time and not the communication's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """A point in time: an event in the stream, or the clock where there are no streams."""
        if self._device.type == "cpu":
            return time.perf_counter()
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


class _MakeGradients(torch.autograd.Function):
    """Hands its first input through; its backward writes a fresh gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: _GradientClock, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        start = ctx.clock.mark()
        made = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.clock.add(start, ctx.clock.mark())
        return (grads[0], None, *made)


class _Unit(nn.Module):
    """Parameters with the shapes of a transformer block's twelve tensors."""

    def __init__(self, nbytes: int, device: torch.device, clock: _GradientClock) -> None:
        super().__init__()
        # 12 h^2 elements in four matrices, of four bytes each; the vectors hardly count.
        h = max(1, round((nbytes / 48) ** 0.5))
        matrices = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
        vectors = ((3 * h,), (4 * h,), *[(h,)] * 6)
        make = (torch.zeros(shape, device=device) for shape in (*matrices, *vectors))
        self.tensors = nn.ParameterList([nn.Parameter(tensor) for tensor in make])
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself."""
        result = _MakeGradients.apply(x, self._clock, *self.tensors)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, result)


class Probe:
    """Units of one size, sharded over one group.

    Attributes:
        nbytes: Whole parameter bytes of a unit.
    """

    def __init__(self, nbytes: int, mesh: DeviceMesh, device: torch.device) -> None:
        self._device = device
        self._group = mesh.get_group()
        self._clock = _GradientClock(device)
        units = [_Unit(nbytes, device, self._clock) for _ in range(_UNITS)]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in units[0].parameters())
        self._model = nn.Sequential(*units)
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        fully_shard(self._model, mesh=mesh)
        self._input = torch.zeros(1, device=device, requires_grad=True)
        self._bucket = torch.zeros(self.nbytes // 4, device=device)

    def step(self) -> UnitTimes:
        """Time one step of all units on this rank; every rank of the group must call it."""
        dist.barrier(self._group)
        forward = self._timed(lambda: self._model(self._input)) / _UNITS
        outputs: list[torch.Tensor] = []
        hooks = self._timed(lambda: outputs.append(self._model(self._input))) / _UNITS
        loss = outputs.pop().sum()
        whole = self._timed(loss.backward)
        backward = (whole - self._clock.take()) / _UNITS
        for parameter in self._model.parameters():
            parameter.grad = None
        dist.barrier(self._group)
        all_reduce = self._timed(self._all_reduce) / _UNITS
        return UnitTimes(max(forward - hooks, 0.0), hooks, max(backward - hooks, 0.0), all_reduce)

    def _all_reduce(self) -> None:
        for _ in range(_UNITS):
            work = dist.all_reduce(self._bucket, group=self._group, async_op=True)
            if work is not None:
                work.wait()

    def _timed(self, run: Callable[[], object]) -> float:
        synchronize(self._device)
        start = time.perf_counter()
        run()
        synchronize(self._device)
        return time.perf_counter() - start
