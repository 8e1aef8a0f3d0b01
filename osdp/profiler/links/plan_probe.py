"""Probe: a toy model under a plan, for what the runtime's hooks take.

:mod:`osdp.profiler.links.fsdp_probe` times FSDP2, which shards; replicated parameters are osdp's own.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.model.training import Training
from osdp.plan.plan import Plan, StagePlan
from osdp.plan.sharding import Decision, Mode, Prediction, ShardingPlan, Unit
from osdp.profiler.links.timing import Timing, relative_spread, time_run
from osdp.profiler.links.toy_model import ComputeClock, ToyUnit

#: Bytes of a unit's parameters: latency alone.
_NBYTES = 2**10
#: Units of the two models whose difference tells what one gradient takes.
_FEW, _MANY = 1, 7
_ROUNDS = 12


def measure_hooks(mesh: DeviceMesh, device: torch.device, timing: Timing) -> tuple[float, float, float]:
    """Seconds that hooks take per gradient of a replicated parameter, and per pass; how far they may be off.

    A pass is a forward and its backward. Times a small and a larger toy model, plain and replicated; all of
    their gradients share a bucket, whose all-reduce is subtracted. Every rank of ``mesh`` must call this; the
    result is the same on all of them.

    Args:
        mesh: The ranks that reduce, on one axis.
        device: This rank's device.
        timing: How they are timed.
    """
    # What is timed is the runtime as it is, like ``fully_shard`` in the probe of units.
    from osdp.runtime.running import apply

    compute, group = ComputeClock(device, timing.clock), mesh.get_group()
    x = torch.zeros(1, device=device, requires_grad=True)

    def toy(count: int) -> nn.Sequential:
        return nn.Sequential(*(ToyUnit(_NBYTES, device, compute) for _ in range(count)))

    plain, toys = [toy(_FEW), toy(_MANY)], [toy(_FEW), toy(_MANY)]
    planned = [apply(model, _replicated(model, mesh.size()), mesh) for model in toys]
    bucket = torch.zeros(_NBYTES // 4, dtype=torch.float32, device=device)
    gradients = [sum(1 for _ in model.parameters()) for model in plain]

    def seconds(run: Callable[[], object]) -> float:
        return time_run(run, device, group, timing.clock) - compute.take()

    def step(forward: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> float:
        found = seconds(lambda: forward(x).sum().backward())
        for parameter in model.parameters():
            parameter.grad = None
        return found

    def sample() -> list[float]:
        alone = seconds(lambda: dist.all_reduce(bucket, group=group))
        return [
            alone,
            *(step(model, model) for model in plain),
            *(step(running.forward, model) for running, model in zip(planned, toys, strict=True)),
        ]

    samples = [sample() for _ in range(_ROUNDS + 1)][1:]
    slowest = torch.tensor(samples, dtype=torch.float64, device=device)  # (rounds, 5)
    dist.all_reduce(slowest, group=group, op=dist.ReduceOp.MAX)
    alone, few, many, few_planned, many_planned = (timing.typical(column) for column in slowest.T.tolist())
    more = (many_planned - many) - (few_planned - few)
    per_gradient = max(0.0, more / (gradients[1] - gradients[0]))
    per_pass = max(0.0, few_planned - few - alone - gradients[0] * per_gradient)
    hooks = slowest[:, 4] - slowest[:, 2] - slowest[:, 0]
    spread = max(0.0, relative_spread(hooks.tolist())) / math.sqrt(len(hooks))
    return per_gradient, per_pass, spread


def _replicated(model: nn.Module, num_ranks: int) -> Plan:
    """A plan that replicates ``model``, with one bucket for all gradients."""
    decisions = tuple(
        Decision(
            operator=name,
            modules=(name,),
            parameters=tuple(
                f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)
            ),
            nbytes=sum(parameter.nbytes for parameter in module.parameters(recurse=False)),
            mode=Mode.NO_SHARD,
        )
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    )
    names = tuple(decision.operator for decision in decisions)
    unknown = Prediction(0.0, 0.0, 0.0, 0.0, 0, "", 0)
    sharding = ShardingPlan(decisions, (Unit(Mode.NO_SHARD, names, names),), unknown, optimal=False)
    return Plan(
        model="toy model",
        device="unknown",
        training=Training(local_batch=1),
        stages=(StagePlan(("",), sharding),),
        memory_limit=1,
        predicted=unknown,
        optimal=False,
        measured_profile=False,
        dp=num_ranks,
    )
