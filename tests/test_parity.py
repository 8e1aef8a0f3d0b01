"""Every plan trains as a single process does: losses, gradients and weights over several steps.

The reference runs all ranks' batches in one process, in the order of the definition: parameters cast to
``param_dtype``, gradients of each microbatch cast to ``reduce_dtype``, the mean over ranks. Every pair of
settings occurs in some case; ``-m slow`` runs all combinations.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allpairspy import AllPairs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, Route
from osdp.runtime import apply
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import ROOT, in_groups, offload, plan_by_hand, split, step_by_exchange
from tests.helpers.training import ALL_USED

STEPS = 2
TOLERANCE = 1e-5

#: How a plan's units are made, by name: (mode of each operator, groups).
LAYOUTS: dict[str, tuple[Any, dict[str, str]]] = {
    "replicate all": (Mode.NO_SHARD, {"blocks.0": "a", "blocks.1": "b", "embed": "ends"}),
    "replicate each": (Mode.NO_SHARD, {}),
    "step sharded all": (Mode.SHARD_OPTIMIZER, {"blocks.0": "a", "blocks.1": "b", "embed": "ends"}),
    "step sharded each": (Mode.SHARD_OPTIMIZER, {}),
    "step sharded beside others": (
        {"": Mode.SHARD_OPTIMIZER, "blocks.0": Mode.FULL_SHARD, "head": Mode.NO_SHARD},
        {"blocks.0": "blocks.0"},
    ),
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


#: Parameters, reductions.
DTYPES: tuple[tuple[str | None, str | None], ...] = (
    (None, None),
    ("bfloat16", "float32"),
    ("bfloat16", None),
    (None, "bfloat16"),
)
ACCUMULATE = ("none", "keep", "reduce")

#: How cases are chosen from the values of each setting.
Chosen = Callable[..., list[tuple[Any, ...]]]
#: Losses, gradients, weights.
Trained = tuple[list[Any], dict[str, Any], dict[str, Any]]


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The combinations, few of them, in which every pair of values of two axes occurs."""
    return [tuple(values) for values in AllPairs([list(axis) for axis in axes])]


def combinations(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All of them."""
    return list(itertools.product(*axes))


def cases(chosen: Chosen) -> list[Case]:
    grid = [
        Case(layout, tied, recompute, accumulate, dtypes)
        for layout, dtypes, accumulate, tied, recompute in chosen(
            LAYOUTS, DTYPES, ACCUMULATE, (True, False), (False, True)
        )
    ]
    grid += [
        Case(layout, tied, recompute, accumulate, dtypes, grouping=step_by_exchange)
        for layout, dtypes, accumulate, tied, recompute in chosen(
            [layout for layout in LAYOUTS if "step sharded" in layout],
            DTYPES,
            ACCUMULATE,
            (True, False),
            (False, True),
        )
    ]
    grid += [
        Case(layout, optimizer=name)
        for layout, name in itertools.product(("replicate each", "shard all", "mixed leaves"), OPTIMIZERS)
    ]
    return grid


def split_cases(chosen: Chosen) -> list[Case]:
    layouts = ("shard each", "mixed leaves", "shard apart")
    counts = ((2, 0), (3, 0), (5, 0), (5, 2), (3, 3), (4, 2))
    by_exchange, all_by_exchange = (
        partial(in_groups, mode=Mode.FULL_SHARD, group_size=0, route=route)
        for route in (Route.EXCHANGE, Route.EXCHANGE_ALL)
    )
    # AdamW would turn the rounding of gradients near zero into whole updates, which later steps amplify.
    optimizers = {None: "AdamW foreach", "bfloat16": "SGD foreach"}
    grid = [
        Case(layout, tied, False, accumulate, dtypes, optimizers[dtypes[0]], slices, kept, grouping=grouping)
        for (slices, kept), layout, accumulate, dtypes, tied, grouping in chosen(
            counts, layouts, ACCUMULATE, DTYPES[:3], (True, False), (None, by_exchange, all_by_exchange)
        )
    ]
    grid += [Case("shard apart", optimizer=name, slices=2) for name in OPTIMIZERS]
    grid += [
        Case(layout, recomputed=True, accumulate=accumulate)
        for layout, accumulate in chosen(LAYOUTS, ACCUMULATE[:2])
    ]
    grid += [Case(layout, False, recomputed=True, slices=2) for layout in layouts]
    return grid


def offload_cases(chosen: Chosen) -> list[Case]:
    layouts = ("shard all", "shard each", "keep all", "mixed blocks", "mixed leaves")
    grid = [
        Case(layout, accumulate=accumulate, optimizer=name, dtypes=dtypes, offloaded=True)
        for layout, name, accumulate, dtypes in chosen(layouts, OPTIMIZERS, ACCUMULATE, DTYPES[:2])
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
}


def build(case: Case) -> Net:
    torch.manual_seed(7)
    return Net(tied=case.tied, gated=is_gated(case), recompute=case.recompute)


def is_gated(case: Case) -> bool:
    """Whether a parameter is 0-dim, which only a replicated one can be."""
    return "shard" not in case.layout and "keep" not in case.layout and "leaves" not in case.layout


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
    return plan.with_sharding(recomputed=("blocks.0", "blocks.1")) if case.recomputed else plan


def batches(step: int, rank: int, microbatches: int) -> list[torch.Tensor]:
    return [tokens(1000 * step + 10 * rank + m, 2, 6) for m in range(microbatches)]


def reference(case: Case, world_size: int) -> Trained:
    """Losses by rank, then those of each step; gradients of the last step, weights after it."""
    model = build(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    micro = 1 if case.accumulate == "none" else 3
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        sums = [_reference_rank(model, case, batches(step, rank, micro)) for rank in range(world_size)]
        for rank, (values, _) in enumerate(sums):
            losses[rank] += values
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.stack([grads[name] for _, grads in sums]).mean(0)
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return losses, grads, {n: p.detach() for n, p in model.named_parameters()}


def _reference_rank(
    model: nn.Module, case: Case, microbatches: list[torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, sums = [], {}
    compute = getattr(torch, case.dtypes[0] or "float32")
    reduce = getattr(torch, case.dtypes[1] or case.dtypes[0] or "float32")
    low = deepcopy(model).to(compute)
    for batch in microbatches:
        low.zero_grad()
        loss = loss_of(low(batch), batch)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in low.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to(reduce).float()
                sums[name] = sums[name] + grad if name in sums else grad
    return losses, sums


def unplanned(case: Case) -> Case:
    """What decides the reference of a case: how a plan spreads the model makes no difference to it."""
    layout = "replicate each" if is_gated(case) else "shard each"
    return Case(layout, case.tied, False, case.accumulate, case.dtypes, case.optimizer)


def references(part: list[Case]) -> list[Trained]:
    """What a single process gets for each; the ranks share out what is different."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    different = list(dict.fromkeys(map(unplanned, part)))
    mine = {case: reference(case, world_size) for case in different[rank::world_size]}
    shares: list[dict[Case, Trained]] = [{} for _ in range(world_size)]
    dist.all_gather_object(shares, mine)
    wanted = {case: trained for share in shares for case, trained in share.items()}
    return [wanted[unplanned(case)] for case in part]


def train(case: Case) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The same under the plan, on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(rank))  # rank 0's values count
    applied = apply(model, plan_of(case, model, world_size), **ALL_USED)
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
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.device_type == "cpu":
        return tensor.full_tensor()
    # Gloo crashes in the functional all-gather of a CUDA tensor (torch 2.11).
    host, local = init_device_mesh("cpu", tuple(mesh.shape)), tensor.to_local().cpu()
    shape, stride = tensor.shape, tensor.stride()
    on_host = DTensor.from_local(local, host, tensor.placements, run_check=False, shape=shape, stride=stride)
    return on_host.full_tensor().to(mesh.device_type)


def difference(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of what is wanted."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return ((got - want).norm() / want.norm().clamp_min(1e-6)).item()


def faults(case: Case, wanted: Trained) -> list[str]:
    """What of a case is not as in a single process."""
    want_losses, want_grads, want_weights = wanted
    try:
        losses, grads, weights = train(case)
    except Exception as error:
        raise RuntimeError(f"{case}") from error
    # Reducing in bfloat16 rounds the sum over ranks to 8 bits at each addition.
    low = "bfloat16" in ((case.dtypes[1] or case.dtypes[0]) or "")
    # The gradient of an input is a sum over slices, each rounded to bfloat16 before it is added.
    low = low or (case.slices > 1 and case.dtypes[0] == "bfloat16")
    tolerance = 4 * dist.get_world_size() * case.slices * 2**-8 if low else TOLERANCE
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
    return [fault for case, one in zip(part, references(part), strict=True) for fault in faults(case, one)]


#: Ranks, how cases are chosen, every which of them, limit in seconds. On four ranks the same code runs; only
#: the shapes of the shards differ.
GRIDS = [
    (2, pairs, 1, 170),
    (4, pairs, 3, 170),
    pytest.param(2, combinations, 1, 1700, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize(("world_size", "chosen", "every", "limit"), GRIDS)
def test_slices_and_recomputation_train_as_a_single_process(
    world_size: int, chosen: Chosen, every: int, limit: float
) -> None:
    results = run(world_size, all_faults, split_cases(chosen)[::every], timeout=limit)
    assert [fault for rank in results for fault in rank] == []


def test_states_in_host_memory_train_as_a_single_process() -> None:
    results = run(2, all_faults, offload_cases(pairs), timeout=170)
    assert [fault for rank in results for fault in rank] == []


@pytest.mark.parametrize(("world_size", "chosen", "every", "limit"), GRIDS)
def test_every_plan_trains_as_a_single_process(
    world_size: int, chosen: Chosen, every: int, limit: float
) -> None:
    results = run(world_size, all_faults, cases(chosen)[::every], timeout=limit)
    assert [fault for rank in results for fault in rank] == []
