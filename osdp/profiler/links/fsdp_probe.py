"""Probe: a toy model that measures the time FSDP2 takes to unshard, reshard and reduce a unit.

A collective costs a step more than the collective alone takes: FSDP2 allocates the gathered parameters,
copies the shard in and the parameters out, views them and runs hooks. Timing ``fully_shard`` itself on such a
model measures all of that, through torch's public interface, on any backend.

On CPU the units also sweep through memory, timed on each rank and subtracted: real compute leaves cold caches
to hooks and copies, which would look cheaper with warm ones than they are in a real step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from osdp.comm.collectives import set_route
from osdp.comm.groups import Grid
from osdp.plan.sharding import Route

#: Number of units timed together, so that the clock and the root's hooks weigh little.
UNITS = 4

#: Elements that a unit sweeps through in each pass: several times the size of a core's own caches; takes a
#: few milliseconds.
_SWEPT = 2**21


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work; on CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_run(
    run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Seconds of ``run`` on ``device``, which is idle before and after; ranks of ``group`` start together."""
    synchronize(device)
    if group is not None:
        dist.barrier(group)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of one unit in one step.

    Attributes:
        unshard: The all-gather with all its overhead: the mean of the one in forward and the one in backward,
            where caches and allocator are in another state.
        hooks: Its forward if it is unsharded already.
        reduce: The reduce-scatter with all its overhead: its backward if it is unsharded already, without the
            hooks and without computing gradients.
        all_reduce: One all-reduce of the same number of bytes.
    """

    unshard: float
    hooks: float
    reduce: float
    all_reduce: float

    @classmethod
    def of(cls, steps: Sequence["StepTimes"], typical: Callable[[Sequence[float]], float]) -> "UnitTimes":
        """The times that follow from several steps, for each of whose parts the ``typical`` seconds stand.

        They are taken of what was measured, not of differences: foreign work only adds to the former.
        """
        step = StepTimes(**{name: typical([getattr(s, name) for s in steps]) for name in StepTimes.__slots__})
        # Forward: with the gather, less without it. Backward: after resharding, less without.
        gathers = (step.resharded_forward - step.again, step.resharded_backward - step.kept_backward)
        return cls(
            unshard=max(sum(gathers) / 2, 0.0),
            hooks=step.again,
            reduce=max(step.kept_backward - step.again, 0.0),
            all_reduce=step.all_reduce,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step for each of its units, without compute.

    Attributes:
        resharded_forward: Forward, with resharding after it.
        resharded_backward: Backward after that.
        again: A forward while all units are unsharded.
        kept_backward: Backward after that.
        all_reduce: One all-reduce.
    """

    resharded_forward: float
    resharded_backward: float
    again: float
    kept_backward: float
    all_reduce: float


def trimmed_mean(samples: Sequence[float]) -> float:
    """The mean without a tenth of the samples at either end.

    The many collectives of a step take the sum of their times. These are far from symmetric: a thread that
    waits is woken at once or a millisecond later, so that a median is one of the two.
    """
    ordered = sorted(samples)
    cut = len(ordered) // 10
    return fmean(ordered[cut : len(ordered) - cut])


def fast_quartile(samples: Sequence[float]) -> float:
    """The first quartile, interpolated linearly: what counts beside other programs."""
    place = (len(samples) - 1) / 4
    ordered = sorted(samples)
    low = ordered[int(place)]
    return low + (place - int(place)) * (ordered[min(int(place) + 1, len(samples) - 1)] - low)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of all units: forward, a second forward while they are unsharded, backward."""

    forward: float
    again: float
    backward: float


class _ComputeClock:
    """Time spent on compute and on making gradients, which is not part of the communication."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        # On accelerators collectives overlap with compute, so its time could not be subtracted: no sweep.
        self._swept = torch.ones(_SWEPT) if device.type == "cpu" else None

    def sweep(self) -> None:
        """Evict the caches, as a unit's compute would."""
        if self._swept is not None:
            self._swept.mul_(1.0)

    def mark(self) -> Any:
        """Mark the current point in time: an event in the stream, or the clock on CPU."""
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


class _Compute(torch.autograd.Function):
    """Returns a copy of its first input; its backward makes a new gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: _ComputeClock, *parameters: torch.Tensor) -> torch.Tensor:
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


class _Unit(nn.Module):
    """Parameters with the shapes of a transformer block's twelve tensors."""

    def __init__(self, nbytes: int, device: torch.device, clock: _ComputeClock) -> None:
        super().__init__()
        # 12 h^2 elements in four matrices, of four bytes each; the vectors hardly count.
        h = max(1, round((nbytes / 48) ** 0.5))
        matrices = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
        vectors = ((3 * h,), (4 * h,), *[(h,)] * 6)
        make = (torch.zeros(shape, device=device) for shape in (*matrices, *vectors))
        self.tensors = nn.ParameterList([nn.Parameter(tensor) for tensor in make])
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``x``."""
        result = _Compute.apply(x, self._clock, *self.tensors)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, result)


class Probe:
    """Units of one size, sharded over one group.

    Attributes:
        nbytes: Bytes of a unit's unsharded parameters.
    """

    def __init__(
        self,
        nbytes: int,
        mesh: DeviceMesh,
        device: torch.device,
        route: Route = Route.FLAT,
        grid: Grid | None = None,
        count: int = UNITS,
    ) -> None:
        self._device = device
        self._group = mesh.get_group()
        self._clock = _ComputeClock(device)
        units = [_Unit(nbytes, device, self._clock) for _ in range(count)]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in units[0].parameters())
        self._model = nn.Sequential(*units)
        for module in (*units, self._model):
            fully_shard(module, mesh=mesh)
            set_route(module, route, grid)
        self._input = torch.zeros(1, device=device, requires_grad=True)
        self._buckets = [torch.zeros(self.nbytes // 4, device=device) for _ in range(count)]

    def step(self) -> StepTimes:
        """Time one step of all units on this rank; every rank of the group must call it."""
        kept = self._pass(reshard=False)
        resharded = self._pass(reshard=True)
        dist.barrier(self._group)
        all_reduce = self._time_communication(self._all_reduce)
        return StepTimes(resharded.forward, resharded.backward, kept.again, kept.backward, all_reduce)

    def _pass(self, *, reshard: bool) -> _Pass:
        """Time a step of all units with or without resharding after forward."""
        cast(FSDPModule, self._model).set_reshard_after_forward(reshard)
        outputs: list[torch.Tensor] = []
        dist.barrier(self._group)
        forward = self._time_communication(lambda: outputs.append(self._model(self._input)))
        again = 0.0
        if not reshard:
            outputs.clear()
            again = self._time_communication(lambda: outputs.append(self._model(self._input)))
        loss = outputs.pop().sum()
        dist.barrier(self._group)
        backward = self._time_communication(loss.backward)
        for parameter in self._model.parameters():
            parameter.grad = None
        return _Pass(forward, again, backward)

    def _all_reduce(self) -> None:
        for bucket in self._buckets:
            start = self._clock.mark()
            self._clock.sweep()
            self._clock.add(start, self._clock.mark())
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
            if work is not None:
                work.wait()

    def _time_communication(self, run: Callable[[], object]) -> float:
        return (time_run(run, self._device) - self._clock.take()) / len(self._buckets)
