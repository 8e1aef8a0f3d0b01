"""Tensor-parallel models train as whole ones do: losses, gradients, weights, clipping and checkpoints.

Alone on 2 and 4 ranks, and beside data parallelism on a mesh of 2 x 2.
"""

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from osdp.errors import PlanMismatchError
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.runtime import ShardedModel, apply, checkpoint
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.tensor_parallel import parallelize
from osdp.tracing.tensor_parallel.derive import derive
from tests.helpers.distributed import run
from tests.helpers.plans import ROOT, plan_by_hand

pytest.importorskip("transformers")

from tests.helpers.transformer_models import ARCHITECTURES, batch_of, build, gpt2

TOLERANCE = 1e-5
#: The vocabulary of GPT-2, which neither 2 nor 4 ranks divide.
VOCABULARY = 50257


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(got: torch.Tensor, want: torch.Tensor, *where: Any, tolerance: float = TOLERANCE) -> None:
    got, want = whole(got.detach()).float(), want.detach().float()
    # Gradients that are zero but for rounding, such as those of key biases, have no direction to compare.
    assert (got - want).norm() <= tolerance * max(want.norm().item(), 1e-2), where


def plan_of(name: str, degree: int, vocab: int = 257) -> TensorParallelPlan:
    return derive(build(name, vocab), batch_of(name, vocab), degree)


def split_over(mesh: DeviceMesh, model: nn.Module, plan: TensorParallelPlan) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(mesh.get_local_rank()))  # the first rank's values count
    return parallelize(model, plan, mesh)


# Alone


def gradients_alone(plans: dict[str, TensorParallelPlan], vocab: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name, plan in plans.items():
        reference, batch = build(name, vocab), batch_of(name, vocab)
        model = split_over(mesh, deepcopy(reference), plan)
        losses = [net(**batch).loss for net in (reference, model)]
        for loss in losses:
            loss.backward()
        check(losses[1], losses[0], name)
        wanted = dict(reference.named_parameters())
        assert [n for n, _ in model.named_parameters()] == list(wanted)
        for n, parameter in model.named_parameters():
            assert torch.equal(whole(parameter.detach()), wanted[n]), (name, n)
            check(parameter.grad, wanted[n].grad, name, n)
        norm = clip_grad_norm_(model.parameters(), 0.1, group=mesh.get_group(), device=torch.device("cpu"))
        check(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), name)


def low_precision_alone(plans: dict[str, TensorParallelPlan]) -> None:
    """In bfloat16 a sharded model is as far from float32 as the whole one is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name, plan in plans.items():
        exact, batch = build(name), batch_of(name)
        low = deepcopy(exact).bfloat16()
        model = split_over(mesh, deepcopy(low), plan)
        for net in (exact, low, model):
            net(**batch).loss.backward()
        others = dict(low.named_parameters()), dict(model.named_parameters())
        errors = [
            sum((whole(other[n].grad).float() - p.grad).square().sum() for n, p in exact.named_parameters())
            for other in others
        ]
        assert errors[1] < 4 * errors[0], (name, errors)  # squares


@pytest.fixture(scope="module")
def plans() -> dict[str, TensorParallelPlan]:
    """For two ranks."""
    return {name: plan_of(name, 2) for name in ARCHITECTURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_on_two_ranks(name: str, plans: dict[str, TensorParallelPlan]) -> None:
    run(2, gradients_alone, {name: plans[name]}, 257)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradients_with_a_vocabulary_that_does_not_divide(name: str) -> None:
    run(2, gradients_alone, {name: plan_of(name, 2, VOCABULARY)}, VOCABULARY)


def test_low_precision_on_two_ranks(plans: dict[str, TensorParallelPlan]) -> None:
    run(2, low_precision_alone, {name: plans[name] for name in ("gpt2", "llama", "t5")})


def exchanges_alone(plan: TensorParallelPlan) -> None:
    """One sum where a region begins in backward, one where it ends in forward, whatever its width."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    batch = batch_of("llama")
    model = split_over(mesh, build("llama"), plan)
    calls: list[str] = []
    plain = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_reduce")
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        loss = model(**batch).loss
        assert len(calls) == 1 + 2 * 2  # the embedding; attention and MLP of two layers
        calls.clear()
        loss.backward()
        assert len(calls) == 1 + 2 * 2  # the head; attention and MLP


def dropout_alone(plan: TensorParallelPlan) -> None:
    """Ranks that were seeded differently draw the same masks for what each of them holds whole."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(dist.get_rank())
    batch = batch_of("gpt2")
    model = split_over(mesh, gpt2(257, resid_pdrop=0.5, embd_pdrop=0.5), plan)
    model.train()
    losses = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(losses, model(**batch).loss.detach())
    assert torch.equal(*losses)


def refusals_alone(plan: TensorParallelPlan) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build("gpt2")
    with pytest.raises(PlanMismatchError, match="for 4 tensor-parallel ranks, there are 2"):
        parallelize(model, replace(plan, degree=4), mesh)
    with pytest.raises(PlanMismatchError, match=r"has size 128 in dim 1, the plan says 256"):
        wider = [replace(e, size=256) if e.module.endswith("c_fc") else e for e in plan.modules]
        parallelize(model, replace(plan, modules=tuple(wider)), mesh)
    with pytest.raises(PlanMismatchError, match="which the model lacks"):
        parallelize(build("llama"), plan, mesh)
    patched = build("gpt2")
    patched.lm_head.forward = patched.lm_head.forward
    with pytest.raises(PlanMismatchError, match="'lm_head' has a forward of its own"):
        parallelize(patched, plan, mesh)
    parallelize(model, plan, mesh)
    with pytest.raises(PlanMismatchError, match="cannot be sharded as a column"):
        parallelize(model, plan, mesh)


def stage_alone(plan: TensorParallelPlan) -> None:
    """A block by itself, of a model whose other modules are gone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    reference = build("gpt2")
    stage = deepcopy(reference)
    stage.transformer.wte = stage.transformer.wpe = None
    stage.transformer.h[0] = nn.Identity()
    stage.lm_head.weight = None
    stage.lm_head.forward = lambda hidden: hidden
    parallelize(stage, plan.restricted([name for name, _ in stage.named_modules()]), mesh)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    check(stage.transformer.h[1](hidden), reference.transformer.h[1](hidden))


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (exchanges_alone, "llama"),
        (dropout_alone, "gpt2"),
        (refusals_alone, "gpt2"),
        (stage_alone, "gpt2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_two_ranks(
    check: Callable[[TensorParallelPlan], None], name: str, plans: dict[str, TensorParallelPlan]
) -> None:
    run(2, check, plans[name])


# Beside data parallelism


@dataclass(frozen=True)
class Case:
    layout: str
    name: str = "gpt2"
    param_dtype: str | None = None
    accumulate: bool = False
    recomputed: bool = False
    on_meta: bool = False


LAYOUTS = ("replicate", "shard", "keep", "mixed")
CASES = [
    *(Case(layout) for layout in LAYOUTS),
    *(Case("mixed", name) for name in ("bert", "gptj", "qwen3", "vit", "t5")),
    *(Case(layout, "gpt2", param_dtype="bfloat16") for layout in ("replicate", "mixed")),
    *(Case(layout, "gpt2", accumulate=True) for layout in ("replicate", "mixed")),
    Case("mixed", "llama", recomputed=True),
    *(Case(layout, "gpt2", on_meta=True) for layout in ("replicate", "mixed")),
]
#: Every layout, and models whose parts differ.
CHECKPOINTED = [case for case in CASES[: len(LAYOUTS) + 5] if case.name in ("gpt2", "qwen3", "t5")]


def blocks_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]


def data_plan(case: Case, model: nn.Module, ranks: int) -> Plan:
    blocks = blocks_of(model)
    if case.layout == "mixed":
        modes = {name: Mode.FULL_SHARD if i % 2 else Mode.SHARD_GRAD_OP for i, name in enumerate(blocks)}
        plan = plan_by_hand(
            model, {**modes, "": Mode.NO_SHARD}, ranks, groups={name: name for name in blocks},
            param_dtype=case.param_dtype,
        )  # fmt: skip
    else:
        mode = {"replicate": Mode.NO_SHARD, "shard": Mode.FULL_SHARD, "keep": Mode.SHARD_GRAD_OP}[case.layout]
        groups = {} if mode is Mode.NO_SHARD else {"": ROOT}
        plan = plan_by_hand(model, mode, ranks, groups=groups, param_dtype=case.param_dtype)
    return plan.with_sharding(recomputed=tuple(blocks)) if case.recomputed else plan


def both(case: Case, mesh: DeviceMesh, start: nn.Module, plan: TensorParallelPlan) -> ShardedModel:
    if case.on_meta:
        with torch.device("meta"):
            model = build(case.name)
        torch.manual_seed(11 + dist.get_rank())  # the first rank's seed counts
    else:
        model = deepcopy(start)
    split_over(mesh["tp"], model, plan)
    return apply(model, data_plan(case, model, mesh["dp"].size()), mesh["dp"])


def train_beside(case: Case, mesh: DeviceMesh, plan: TensorParallelPlan, folder: str) -> None:
    start = build(case.name)
    applied = both(case, mesh, start, plan)
    model = applied.model
    if case.on_meta:
        start.load_state_dict({k: whole(v).clone() for k, v in model.state_dict().items()})
        assert all(p.isfinite().all() for p in start.parameters())
    reference = deepcopy(start)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (reference, model)]
    rank, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    micro = 2 if case.accumulate else 1
    tolerance = TOLERANCE if case.param_dtype is None else 0.1
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [batch_of(case.name, seed=100 * step + i) for i in range(ranks * micro)]
        for batch in batches:
            (reference(**batch).loss / ranks).backward()
        for index, batch in enumerate(batches[rank * micro : (rank + 1) * micro]):
            with applied.no_sync() if index < micro - 1 else contextlib.nullcontext():
                model(**batch).loss.backward()
        wanted = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            check(parameter.grad, wanted[name].grad, case, step, name, tolerance=tolerance)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        check(applied.clip_grad_norm_(0.5), norm, case, step, tolerance=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    if case in CHECKPOINTED:
        another = both(replace(case, layout="shard", on_meta=False), mesh, build(case.name), plan).model
        check_checkpoints(case, folder, model, optimizers[1], start, another)


def check_checkpoints(
    case: Case,
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    other: nn.Module,
) -> None:
    """Into the plain model and into another layout; names and shapes are the plain model's."""
    checkpoint.save(folder, model, optimizer)
    into = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(folder, plain, into)
    wanted = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for (name, parameter), stored in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, wanted[name]), (case, name)
        momenta = into.state[parameter]["momentum_buffer"], optimizer.state[stored]["momentum_buffer"]
        assert torch.equal(momenta[0], whole(momenta[1])), (case, name)
    if case.name == "gpt2":
        # Each rank read half of the columns in one piece, as if queries, keys and values were one block.
        read = {"model": get_model_state_dict(other)}
        state_dict_loader.load(read, checkpoint_id=folder)
        with pytest.raises(RuntimeError, match=r"c_attn\.weight consists of 3 blocks, .* has cut it as one"):
            set_model_state_dict(other, read["model"])
    checkpoint.load(folder, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(parameter.detach()), wanted[name]), (case, name)
    check_plain_states(case, other, plain.state_dict())
    state = checkpoint.whole_state_dict(model)
    if dist.get_rank() == 0:
        assert list(state) == list(plain.state_dict())
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())


def check_plain_states(case: Case, model: nn.Module, start: dict[str, torch.Tensor]) -> None:
    """Whole tensors, on all ranks and on the first."""
    mine = dist.get_rank() == 0
    for shift in (1.0, 2.0):
        want = {name: value + shift for name, value in start.items()}
        if shift == 1.0:
            model.load_state_dict(want)
        else:
            checkpoint.load_whole_state_dict(model, want if mine else {})
        found = model.state_dict()
        assert all(torch.equal(whole(found[name]), value) for name, value in want.items()), case
    if case.name != "gpt2":
        return
    # Torch cuts the fused projection of queries, keys and values as if it were one: silently wrong.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(
        RuntimeError, match=r"c_attn\.weight consists of 3 blocks, .* Load whole tensors by model"
    ):
        set_model_state_dict(model, dict(start) if mine else {}, options=options)


def beside(cases: Sequence[Case], plans: dict[str, TensorParallelPlan], folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for index, case in enumerate(cases):
        train_beside(case, mesh, plans[case.name], f"{folder}/{index}")


def refusals_beside(tensor_plan: TensorParallelPlan) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = split_over(mesh["tp"], build("gpt2"), tensor_plan)
    with pytest.raises(ValueError, match="has 2 axes"):
        apply(model, data_plan(Case("shard"), model, 4), mesh)
    with pytest.raises(ValueError, match="axes of one mesh"):
        apply(model, data_plan(Case("shard"), model, 4), init_device_mesh("cpu", (4,)))


def test_gradients_on_four_ranks() -> None:
    # Two key-value heads are not for four ranks.
    names = [name for name in ARCHITECTURES if name not in ("qwen2", "mistral")]
    run(4, gradients_alone, {name: plan_of(name, 4) for name in names}, 257)


@pytest.mark.parametrize("name", sorted({case.name for case in CASES}))
def test_data_parallelism_beside(name: str, plans: dict[str, TensorParallelPlan], tmp_path: Path) -> None:
    run(4, beside, [case for case in CASES if case.name == name], plans, str(tmp_path), timeout=120)


def test_meshes_of_another_shape_are_refused(plans: dict[str, TensorParallelPlan]) -> None:
    run(4, refusals_beside, plans["gpt2"])
