"""Every plan trains as a single process does: losses, gradients and weights over several steps.

The reference runs all ranks' batches in one process, in the order of the definition: parameters cast to
``param_dtype``, gradients of each microbatch cast to ``reduce_dtype``, the mean over ranks.
"""

import contextlib
import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.plan import Mode, Plan, Route
from osdp.runtime import apply
from tests.distributed import run
from tests.nets import Net, loss_of, tokens
from tests.plans import ROOT, in_groups, offload, plan_by_hand, split

STEPS = 3
TOLERANCE = 1e-5

#: How a plan's units are made, by name: (mode of each operator, groups).
LAYOUTS: dict[str, tuple[Any, dict[str, str]]] = {
    "replicate all": (Mode.NO_SHARD, {"blocks.0": "a", "blocks.1": "b", "embed": "ends"}),
    "replicate each": (Mode.NO_SHARD, {}),
    "shard all": (Mode.FULL_SHARD, {"blocks.0": "blocks.0", "blocks.1": "blocks.1", "": ROOT}),
    "shard each": (Mode.FULL_SHARD, {"embed": "ends", "head": "ends"}),
    "shard apart": (Mode.FULL_SHARD, {}),
    "keep all": (Mode.SHARD_GRAD_OP, {"blocks.0": "blocks.0", "blocks.1": "b", "": ROOT}),
    "mixed blocks": (
        {"": Mode.NO_SHARD, "blocks.0": Mode.FULL_SHARD, "blocks.1": Mode.SHARD_GRAD_OP},
        {"blocks.0": "blocks.0", "blocks.1": "blocks.1", "": "rest"},
    ),
    "mixed leaves": (
        {
            "": Mode.FULL_SHARD,
            "blocks.0.up": Mode.NO_SHARD,
            "blocks.1.norm": Mode.NO_SHARD,
            "blocks.1.down": Mode.SHARD_GRAD_OP,
        },
        {"blocks.0": "blocks.0", "embed": ROOT, "head": ROOT, "blocks.1.up": "blocks.1"},
    ),
}


@dataclass(frozen=True)
class Case:
    layout: str
    tied: bool = True
    recompute: bool = False
    accumulate: str = "none"  # "none", "keep" local gradients, "reduce" each microbatch
    dtypes: tuple[str | None, str | None] = (None, None)
    optimizer: str = "AdamW foreach"
    slices: int = 1  # of every linear operator and embedding that is a sharded unit by itself
    kept: int = 0  # of those of each that needs them in backward
    recomputed: bool = False  # every block, by the plan
    offloaded: bool = False  # every sharded unit but the root's; host and device are one here
    grouping: Callable[[Plan], Plan] | None = None  # what groups and routes the sharded units get


def cases() -> list[Case]:
    grid = [
        Case(layout, tied, accumulate=accumulate)
        for layout, tied, accumulate in itertools.product(LAYOUTS, (True, False), ("none", "keep", "reduce"))
    ]
    low: list[tuple[str | None, str | None]] = [
        ("bfloat16", "float32"),
        ("bfloat16", None),
        (None, "bfloat16"),
    ]
    grid += [
        Case(layout, accumulate=accumulate, dtypes=dtypes)
        for layout, accumulate, dtypes in itertools.product(LAYOUTS, ("none", "keep"), low)
    ]
    grid += [Case(layout, accumulate="reduce", dtypes=low[0]) for layout in LAYOUTS]
    # torch has no fused SGD for DTensors, only for the plain parameters of a plan that shards nothing.
    grid += [
        Case(layout, optimizer=name)
        for layout, name in itertools.product(LAYOUTS, OPTIMIZERS)
        if name != "SGD fused" or "replicate" in layout
    ]
    grid += [Case(layout, recompute=True) for layout in LAYOUTS]
    return grid


def split_cases() -> list[Case]:
    layouts = ("shard each", "mixed leaves", "shard apart")
    grid = [
        Case(layout, tied, accumulate=accumulate, slices=slices)
        for layout, tied, accumulate, slices in itertools.product(
            layouts, (True, False), ("none", "keep", "reduce"), (2, 3, 5)
        )
    ]
    grid += [
        Case(layout, accumulate=accumulate, dtypes=dtypes, slices=3)
        for layout, accumulate, dtypes in itertools.product(
            layouts, ("none", "keep"), [("bfloat16", "float32"), ("bfloat16", None)]
        )
    ]
    grid += [
        Case(layout, tied, accumulate=accumulate, slices=slices, kept=kept)
        for layout, tied, accumulate, (slices, kept) in itertools.product(
            layouts, (True, False), ("none", "keep", "reduce"), [(5, 2), (3, 3)]
        )
    ]
    grid += [Case("shard apart", dtypes=("bfloat16", "float32"), slices=4, kept=2)]
    grid += [Case("shard apart", optimizer=name, slices=2) for name in OPTIMIZERS if name != "SGD fused"]
    by_exchange = partial(in_groups, mode=Mode.FULL_SHARD, group_size=0, route=Route.EXCHANGE)
    grid += [
        Case(layout, accumulate=accumulate, slices=slices, grouping=by_exchange)
        for layout, accumulate, slices in itertools.product(layouts, ("none", "keep"), (2, 3))
    ]
    grid += [Case(layout, recomputed=True) for layout in LAYOUTS]
    grid += [Case(layout, recomputed=True, accumulate="keep") for layout in LAYOUTS]
    grid += [Case(layout, False, recomputed=True, slices=2) for layout in layouts]
    return grid


def offload_cases() -> list[Case]:
    layouts = ("shard all", "shard each", "keep all", "mixed blocks", "mixed leaves")
    grid = [
        Case(layout, accumulate=accumulate, offloaded=True)
        for layout, accumulate in itertools.product(layouts, ("none", "keep", "reduce"))
    ]
    grid += [Case(layout, dtypes=("bfloat16", "float32"), offloaded=True) for layout in layouts]
    grid += [
        Case("mixed blocks", optimizer=name, offloaded=True) for name in OPTIMIZERS if name != "SGD fused"
    ]
    return [
        *grid,
        Case("shard all", recomputed=True, offloaded=True),
        Case("shard each", slices=2, offloaded=True),
    ]


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, fused=True),
}


def build(case: Case) -> Net:
    torch.manual_seed(7)
    # Only a replicated parameter can be 0-dim.
    gated = "shard" not in case.layout and "keep" not in case.layout and "leaves" not in case.layout
    return Net(tied=case.tied, gated=gated, recompute=case.recompute)


def plan_of(case: Case, model: nn.Module, world_size: int) -> Plan:
    modes, groups = LAYOUTS[case.layout]
    param_dtype, reduce_dtype = case.dtypes
    plan = plan_by_hand(
        model, modes, world_size, groups=groups, param_dtype=param_dtype, reduce_dtype=reduce_dtype
    )
    plan = split(plan, model, case.slices, case.kept)
    if case.offloaded:
        plan = offload(plan)
    if case.grouping is not None:
        plan = case.grouping(plan)
    return replace(plan, recomputed=("blocks.0", "blocks.1")) if case.recomputed else plan


def batches(step: int, rank: int, microbatches: int) -> list[torch.Tensor]:
    return [tokens(1000 * step + 10 * rank + m, 2, 6) for m in range(microbatches)]


def reference(case: Case, world_size: int) -> tuple[list[list[float]], dict[str, Any], dict[str, Any]]:
    """Losses by rank and step, gradients of the last step, weights after it."""
    model = build(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    param_dtype = getattr(torch, case.dtypes[0] or "float32")
    reduce_dtype = getattr(torch, case.dtypes[1] or case.dtypes[0] or "float32")
    micro = 1 if case.accumulate == "none" else 3
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        sums = [
            _reference_rank(model, case, step, r, micro, param_dtype, reduce_dtype) for r in range(world_size)
        ]
        for rank, (values, _) in enumerate(sums):
            losses[rank] += values
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.stack([grads[name] for _, grads in sums]).mean(0)
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}


def _reference_rank(
    model: nn.Module, case: Case, step: int, rank: int, micro: int, compute: torch.dtype, reduce: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, sums = [], {}
    for batch in batches(step, rank, micro):
        low = deepcopy(model).to(compute)
        low.zero_grad()
        loss = loss_of(low(batch), batch)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in low.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to(reduce).float()
                sums[name] = sums[name] + grad if name in sums else grad
    return losses, sums


def train(case: Case) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The same under the plan, on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(rank))  # rank 0's values count
    applied = apply(model, plan_of(case, model, world_size))
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    micro = 1 if case.accumulate == "none" else 3
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, batch in enumerate(batches(step, rank, micro)):
            keeps = case.accumulate == "keep" and index < micro - 1
            with applied.no_sync() if keeps else contextlib.nullcontext():
                loss = loss_of(model(batch), batch)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    grads = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
    return losses, grads, {n: whole(p.detach()) for n, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of what is wanted."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return ((got - want).norm() / want.norm().clamp_min(1e-6)).item()


def faults(case: Case) -> list[str]:
    """What of a case is not as in a single process."""
    want_losses, want_grads, want_weights = reference(case, dist.get_world_size())
    try:
        losses, grads, weights = train(case)
    except Exception as error:
        raise RuntimeError(f"{case}") from error
    # Reducing in bfloat16 rounds the sum over ranks to 8 bits at each addition.
    low = "bfloat16" in ((case.dtypes[1] or case.dtypes[0]) or "")
    # The gradient of an input is a sum over slices, each rounded to bfloat16 before it is added.
    low = low or (case.slices > 1 and case.dtypes[0] == "bfloat16")
    tolerance = 4 * dist.get_world_size() * 2**-8 if low else TOLERANCE
    found = []
    for step, (got, want) in enumerate(zip(losses, want_losses[dist.get_rank()], strict=True)):
        if abs(got - want) > tolerance * abs(want):
            found.append(f"{case}: loss {step} is {got}, not {want}")
    for kind, ours, theirs in (("gradient", grads, want_grads), ("weight", weights, want_weights)):
        if ours.keys() != theirs.keys():
            found.append(f"{case}: {kind}s of {sorted(ours)}, not {sorted(theirs)}")
        for name in theirs:
            off = difference(ours.get(name), theirs[name])
            if not off <= tolerance:
                found.append(f"{case}: {kind} {name} is off by {off}")
    return found


def all_faults(part: list[Case]) -> list[str]:
    return [fault for case in part for fault in faults(case)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_and_recomputation_train_as_a_single_process(world_size: int) -> None:
    results = run(world_size, all_faults, split_cases()[:: 1 if world_size == 2 else 4], timeout=170)
    assert [fault for rank in results for fault in rank] == []


def test_states_in_host_memory_train_as_a_single_process() -> None:
    results = run(2, all_faults, offload_cases(), timeout=170)
    assert [fault for rank in results for fault in rank] == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_plan_trains_as_a_single_process(world_size: int) -> None:
    grid = cases()
    if world_size == 4:  # the same code runs: every layout once, every option once
        grid = grid[::5]
    results = run(world_size, all_faults, grid, timeout=170)
    assert [fault for rank in results for fault in rank] == []
