"""What the claims about pipelines share: planning and running a given cut, models whose compute is sleep.

An emulated layer sleeps in its forward, in the gradient of its input and in that of its weight, around
tensors of a few KiB that are computed, sent and trained as in any model. A core can hold many sleeping ranks.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.support.baselines import TrainStep, make_optimizer, rank_batches
from benchmarks.support.candidates import Setting
from benchmarks.support.models import Batch, Case, loss_of
from osdp import OSDP, DeviceInfo, Training
from osdp.model.dataflow import Dataflow
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.search_options import SearchOptions
from osdp.search.pipeline.planner import plan_at
from osdp.search.sharding.planner import Candidate
from osdp.tracing.dataflow import trace_flow

WIDTH = 32


@dataclass(frozen=True, slots=True)
class Naps:
    """Seconds that a layer sleeps: in forward, for the gradient of its input, for that of its weight."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.inputs + self.weights

    def times(self, factor: float) -> "Naps":
        """So many times as long."""
        return Naps(factor * self.forward, factor * self.inputs, factor * self.weights)


#: Microbatches of each layer between forward and gradient of its input, now and at most, by the layer's id.
_NOW: Counter[int] = Counter()
_MOST: Counter[int] = Counter()


def most_in_flight() -> int:
    """Most microbatches that any emulated layer of this process had at a time; counts anew from here."""
    most = max(_MOST.values(), default=0)
    _NOW.clear()
    _MOST.clear()
    return most


class _Layer(torch.autograd.Function):
    """Hands on its input after a nap, and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, naps: Naps, layer: int) -> torch.Tensor:
        ctx.nap, ctx.layer = naps.inputs, layer
        _sleep(x, naps.forward)
        if x.requires_grad:
            _NOW[layer] += 1
            _MOST[layer] = max(_MOST[layer], _NOW[layer])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _sleep(grads[0], ctx.nap)
        _NOW[ctx.layer] -= 1
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """The weight itself, whose gradient takes a nap."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, nap: float) -> torch.Tensor:
        ctx.nap = nap
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _sleep(grads[0], ctx.nap)
        return grads[0], None


def _sleep(tensor: torch.Tensor, seconds: float) -> None:
    if seconds and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        time.sleep(seconds)


class Sleeper(nn.Module):
    """An emulated layer; of another shape where it sleeps longer, since a profile takes equals for equals."""

    def __init__(self, naps: Naps, *, awake: bool = False) -> None:
        super().__init__()
        self.naps = naps.times(0.0) if awake else naps
        self.weight = nn.Parameter(torch.randn(1 + round(1000 * naps.total), WIDTH) / 8 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tanh of the weighted input."""
        x = _Layer.apply(x, self.naps, id(self))
        return torch.tanh(x * _Weight.apply(self.weight, self.naps.weights).mean(0))


class SharedSleeper(nn.Module):
    """An emulated layer that tensor-parallel ranks can share: each sleeps for its part of the features.

    Backward sleeps once, for inputs and weights together. All have one shape, however long they sleep, so
    that a profile cannot tell them apart.
    """

    def __init__(self, naps: Naps, *, awake: bool = False) -> None:
        super().__init__()
        self.naps = naps.times(0.0) if awake else naps
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the layer computes from it."""
        hidden: torch.Tensor = torch.tanh(self.up(x))
        mine = self.naps.times(hidden.shape[-1] / (2 * WIDTH))
        both = replace(mine, inputs=mine.inputs + mine.weights)
        out: torch.Tensor = x + self.down(_Layer.apply(hidden, both, id(self)))
        return out


#: Kinds of emulated layers.
LayerKind = type[Sleeper] | type[SharedSleeper]


class Sleepers(nn.Module):
    """A linear layer, emulated layers, and a linear layer with its loss."""

    def __init__(
        self,
        naps: Sequence[Naps],
        *,
        awake: bool = False,
        kind: LayerKind = Sleeper,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind(each, awake=awake) for each in naps)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean squared error of the output."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.last(x), target)


def sleepers(
    name: str,
    naps: Sequence[Naps],
    *,
    awake: bool = False,
    kind: LayerKind = Sleeper,
) -> Case:
    """A model of emulated layers; ``awake`` it computes the same without sleep."""

    def batch(size: int, generator: torch.Generator) -> Batch:
        return {key: torch.randn(size, 16, WIDTH, generator=generator) for key in ("x", "target")}

    return Case(name, lambda: Sleepers(naps, awake=awake, kind=kind), batch, ("layers",))


@dataclass(frozen=True)
class Line:
    """A model to cut: all that pricing a cut needs.

    Attributes:
        setting: The model and its profile; its training has the microbatches.
        flow: Its flow.
        device: The devices, with the way from stage to stage.
        pp: Ranks of the pipeline.
    """

    setting: Setting
    flow: Dataflow
    device: DeviceInfo
    pp: int

    @classmethod
    def of(cls, setting: Setting, device: DeviceInfo, pp: int) -> "Line":
        """Follow the flow of the setting's model."""
        case, training = setting.case, setting.training
        flow = trace_flow(case.model(device="meta"), case.sample(training.local_batch or 1))
        return cls(setting, flow, device, pp)

    def cut(self, bounds: Sequence[int], schedule: str, microbatches: int) -> Plan:
        """The plan with stages of these steps."""
        training = replace(self.setting.training, microbatches=microbatches)
        return plan_at(
            bounds,
            self.setting.model_desc,
            self.flow,
            Candidate(training, self.setting.profile),
            self.device,
            SearchOptions(recompute=False, slices=()),
            ParallelDims(self.pp, 1, 1),
            schedule,
        )

    def even(self, weights: Mapping[str, int], num_stages: int) -> tuple[int, ...]:
        """Bounds of stages as even as they can be by the weights of modules; of others the weight is 0."""
        until = [0, *accumulate(weights.get(step.module, 0) for step in self.flow.steps)]
        bounds = [0]
        for stage in range(1, num_stages):
            share = until[-1] * stage / num_stages
            free = [cut for cut in self.flow.cuts if cut > bounds[-1]]
            bounds.append(min(free, key=lambda cut: (abs(until[cut] - share), cut)))
        return (*bounds, len(self.flow.steps))

    def bounds_of(self, plan: Plan) -> tuple[int, ...]:
        """The bounds of a plan's stages."""
        place = {step.module: index for index, step in reversed(list(enumerate(self.flow.steps)))}
        firsts = [min(place[m] for m in stage.modules if m in place) for stage in plan.stages]
        return (*firsts, len(self.flow.steps))

    def by_layers(self, num_stages: int) -> tuple[int, ...]:
        """An even split by the number of layers."""
        case = self.setting.case
        model = case.model(device="meta")
        layers = {id(block) for block in case.find_blocks(model)}
        names = {name: 1 for name, module in model.named_modules() if id(module) in layers}
        return self.even(names, num_stages)

    def by_modules(self, num_stages: int) -> tuple[int, ...]:
        """An even split by the number of modules without children: of the calls in a traced graph."""
        model = self.setting.case.model(device="meta")
        leaves = {
            step.module: sum(not list(m.children()) for m in model.get_submodule(step.module).modules())
            for step in self.flow.steps
        }
        return self.even(leaves, num_stages)


def pipeline_step(case: Case, training: Training, plan: Plan, mesh: DeviceMesh) -> TrainStep:
    """A fresh model under ``plan`` and its optimizer, as a function of the step's number."""
    model = OSDP(case.model(), plan=plan, mesh=mesh)
    optimizer = make_optimizer(model.parameters(), training)
    samples = plan.local_batch * plan.training.microbatches
    batches = rank_batches(case, samples, 0, 1)

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model.train_step(batches(index), loss_fn=loss_of)
        optimizer.step()
        return float(loss)

    return step


def agreed(value: Any) -> Any:
    """What rank 0 has, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def stage_sizes(bounds: Sequence[int]) -> str:
    """Steps of each stage, for tables."""
    return " + ".join(str(stop - start) for start, stop in pairwise(bounds))
