"""Probe: a toy model that measures the time FSDP2 takes to unshard, reshard and reduce a unit.

A collective costs a step more than the collective alone takes: FSDP2 allocates the gathered parameters,
copies the shard in and the parameters out, views them and runs hooks. Timing ``fully_shard`` itself on such a
model measures all of that, through torch's public interface, on any backend.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from osdp.comm.collectives import set_route
from osdp.comm.groups import Grid
from osdp.plan.sharding import Route
from osdp.profiler.links.timing import Timing, barrier, time_run
from osdp.profiler.links.toy_model import ComputeClock, ToyUnit

#: Number of units timed together, so that the clock and the root's hooks weigh little.
UNITS = 4

#: Bytes of units that are timed for their number of parameters, the larger number in blocks, and how often.
_FEW_BYTES, _BLOCKS, _ROUNDS = 2**16, 6, 10

#: Bytes that are sent right before what is timed. Token buckets (virtual machines' networks, ``tc tbf``) let
#: the first bytes after a pause pass at once: 1 MiB exchanged at 200 Mbit/s behind a bucket of 128 KiB seemed
#: to have 1.2 times the rate of the 16 MiB that follow in a step.
_BURST = 2**18

#: The same between all-reduces, for what such a bucket refills while ranks compute for a few milliseconds.
#: Units that are gathered and reduced by themselves make such pauses in a step, too; the buckets of gradients
#: follow one another, and seemed to have 1.03 times the rate of one of 12 MiB.
_REFILL = 2**17


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


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of all units: forward, a second forward while they are unsharded, backward."""

    forward: float
    again: float
    backward: float


class Probe:
    """Units of one size, sharded over one group.

    Args:
        nbytes: About the bytes of a unit's unsharded parameters.
        mesh: The ranks that shard, on one axis.
        device: This rank's device.
        route: Of the units' collectives.
        grid: Groups among the ranks, for a route in two steps.
        count: Number of units.
        clock: What they are timed with.
        blocks: Transformer blocks whose parameters make up a unit.
        drains: Whether all-reduces cross a network that may let some bytes pass at once after a pause.

    Attributes:
        nbytes: Bytes of a unit's unsharded parameters.
        num_parameters: Parameters of a unit.
    """

    def __init__(
        self,
        nbytes: int,
        mesh: DeviceMesh,
        device: torch.device,
        route: Route = Route.FLAT,
        grid: Grid | None = None,
        count: int = UNITS,
        clock: Callable[[], float] = time.perf_counter,
        blocks: int = 1,
        *,
        drains: bool = False,
    ) -> None:
        self._device = device
        self._group = mesh.get_group()
        # What is smaller always passes at once.
        self._drains = drains and nbytes > _REFILL
        self._clock, self._compute = clock, ComputeClock(device, clock)
        units = [ToyUnit(nbytes, device, self._compute, blocks) for _ in range(count)]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in units[0].parameters())
        self.num_parameters = sum(1 for _ in units[0].parameters())
        self._model = nn.Sequential(*units)
        for module in (*units, self._model):
            fully_shard(module, mesh=mesh)
            set_route(module, route, grid)
        self._input = torch.zeros(1, device=device, requires_grad=True)
        sizes = [self.nbytes // 4] * count
        self._buckets = [torch.zeros(size, dtype=torch.float32, device=device) for size in sizes]
        self._burst = torch.zeros(_BURST // 4, dtype=torch.float32, device=device)
        self._refill = self._burst[: _REFILL // 4]

    def step(self) -> StepTimes:
        """Time one step of all units on this rank; every rank of the group must call it."""
        kept = self._pass(reshard=False)
        resharded = self._pass(reshard=True)
        self._align()
        all_reduce = self._time_communication(self._all_reduce)
        return StepTimes(resharded.forward, resharded.backward, kept.again, kept.backward, all_reduce)

    def _pass(self, *, reshard: bool) -> _Pass:
        """Time a step of all units with or without resharding after forward."""
        cast(FSDPModule, self._model).set_reshard_after_forward(reshard)
        outputs: list[torch.Tensor] = []
        self._align()
        forward = self._time_communication(lambda: outputs.append(self._model(self._input)))
        again = 0.0
        if not reshard:
            outputs.clear()
            again = self._time_communication(lambda: outputs.append(self._model(self._input)))
        loss = outputs.pop().sum()
        self._align()
        backward = self._time_communication(loss.backward)
        for parameter in self._model.parameters():
            parameter.grad = None
        return _Pass(forward, again, backward)

    def _align(self) -> None:
        """Let all ranks start together, over links that run at the rate they can keep up."""
        dist.all_reduce(self._burst, group=self._group)
        barrier(self._device, self._group)

    def _all_reduce(self) -> None:
        for bucket in self._buckets:
            start = self._compute.mark()
            self._compute.sweep()
            if self._drains:
                dist.all_reduce(self._refill, group=self._group)
            self._compute.add(start, self._compute.mark())
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
            if work is not None:
                work.wait()

    def _time_communication(self, run: Callable[[], object]) -> float:
        return (time_run(run, self._device, clock=self._clock) - self._compute.take()) / len(self._buckets)


def measure_parameters(mesh: DeviceMesh, device: torch.device, timing: Timing) -> float:
    """Seconds that an unshard or a reduction takes for each parameter of a unit, beyond those for its bytes.

    FSDP2 views, copies and hands over each by itself: 18 to 25 us (one core of a 2-core x86-64 machine, torch
    2.13, 2026-11), which units of a ResNet's many small tensors take more of than of the network. Times units
    of the same bytes in few and in many parameters; every rank of ``mesh`` must call this, and gets the same.

    Args:
        mesh: The ranks that shard, on one axis.
        device: This rank's device.
        timing: How they are timed.
    """
    probes = [
        Probe(_FEW_BYTES, mesh, device, count=2, clock=timing.clock, blocks=blocks) for blocks in (1, _BLOCKS)
    ]
    steps = [[probe.step() for probe in probes] for _ in range(_ROUNDS + 1)][1:]
    few, many = (UnitTimes.of(column, timing.typical) for column in zip(*steps, strict=True))
    more = (many.unshard + many.reduce - few.unshard - few.reduce) / 2
    each = more / (probes[1].num_parameters - probes[0].num_parameters)
    slowest = torch.tensor(each, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return max(0.0, float(slowest))
