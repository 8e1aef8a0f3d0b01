"""Muon trains as in a single process, whatever parts of its matrices the ranks hold."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from osdp import OSDP
from osdp.errors import PlanMismatchError
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.runtime import checkpoint
from osdp.runtime.optimizer import whole_matrices
from osdp.runtime.optimizer.local_steps import LocalSteps
from osdp.runtime.optimizer.whole_matrices import WholeMatrices
from tests.helpers.distributed import run
from tests.helpers.nets import loss_of, tokens
from tests.helpers.plans import plan_by_hand
from tests.runtime.tensor_parallel.test_apply import LAYOUTS, Case, both, plan_of
from tests.runtime.test_switch import assert_equal, held, made, plans
from tests.test_parity import difference, whole

pytest.importorskip("transformers")

from tests.helpers.transformer_models import batch_of, build

STEPS = 3
TOLERANCE = 1e-9

#: Options of Muon, each with what it is alone in.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum": {"nesterov": False, "momentum": 0.5},
    "as long as AdamW's": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "ns_steps": 3},
    "rate as a tensor": {"lr": torch.tensor(0.05)},
}


def is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2


def optimizers_of(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon with two groups for matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if is_matrix(p)]
    others = [p for p in model.parameters() if not is_matrix(p)]
    groups = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 0.01}]
    return [torch.optim.Muon(groups, **{"lr": 0.05, **options}), torch.optim.AdamW(others, lr=0.01)]


def train(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], first: int = 0) -> None:
    """Some steps on this rank's batches."""
    for step in range(first, first + STEPS):
        batch = tokens(10 * step + dist.get_rank(), 3, 6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model(batch), batch).backward()
        for optimizer in optimizers:
            optimizer.step()


def single_process(steps: int = STEPS, **options: Any) -> dict[str, torch.Tensor]:
    """Weights and momenta after the batches of all ranks."""
    model = made()
    optimizers = optimizers_of(model, **options)
    train_alone(model, optimizers, steps)
    return state_of(model, optimizers[0])


def train_alone(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: int = STEPS) -> None:
    """Some steps of a plain model on the batches of all ranks."""
    for step in range(steps):
        batches = [tokens(10 * step + rank, 3, 6) for rank in range(dist.get_world_size())]
        model.zero_grad()
        (sum(loss_of(model(batch), batch) for batch in batches) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()


def state_of(model: nn.Module, muon: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter in muon.state:
            found[f"{name}: momentum"] = whole(muon.state[parameter]["momentum_buffer"]).clone()
    return found


def assert_trained(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *where: Any) -> None:
    assert got.keys() == want.keys() and any("momentum" in name for name in got), where
    start = dict(made().named_parameters())
    assert not torch.equal(want["embed.weight"], start["embed.weight"]), where
    for name, value in want.items():
        assert difference(got[name], value) < TOLERANCE, (*where, name, difference(got[name], value))


def trains_under_every_plan(names: Sequence[str]) -> None:
    for options in names:
        want = single_process(**OPTIONS[options])
        for name, plan in plans(made()).items():
            model = OSDP(made(), plan=plan)
            optimizers = optimizers_of(model, **OPTIONS[options])
            train(model, optimizers)
            assert_trained(state_of(model, optimizers[0]), want, name, options)
            assert [len(group["params"]) for group in optimizers[0].param_groups] == [3, 3]


@pytest.mark.parametrize("options", OPTIONS)
def test_trains_as_a_single_process_under_every_plan(options: str) -> None:
    run(2, trains_under_every_plan, [options], timeout=120)


def test_trains_as_a_single_process_on_four_ranks() -> None:
    run(4, trains_under_every_plan, ["default"], timeout=200)


class Products(TorchDispatchMode):
    """Counts matrix products in bfloat16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += "mm" in func.__name__ and found.dtype == torch.bfloat16
        return found


def ids_of(model: nn.Module) -> list[int]:
    return [id(parameter) for parameter in model.parameters()]


def owners_of(model: nn.Module) -> WholeMatrices:
    return WholeMatrices(dist.group.WORLD, ids_of(model))


def steps_by(matrices: Callable[[OSDP], WholeMatrices]) -> dict[str, int]:
    """Products of a step under each plan, made by ``matrices``; all with the result of the owners' steps."""
    products = {}
    for name, plan in plans(made()).items():
        results = []
        for make in (owners_of, matrices):
            model = OSDP(made(), plan=plan)
            batch = tokens(dist.get_rank(), 3, 6)
            loss_of(model(batch), batch).backward()
            muon, _ = optimizers_of(model)
            with Products() as counted:
                assert make(model).step(muon)
            products[name] = counted.count
            results.append(state_of(model, muon))
        assert_equal(results[1], results[0], name)
    return products


def all_gathered() -> tuple[dict[str, int], dict[str, int]]:
    return (
        steps_by(lambda model: WholeMatrices(dist.group.WORLD, ids := ids_of(model), ids)),
        steps_by(owners_of),
    )


def test_matrices_that_are_gathered_are_orthogonalized_by_all() -> None:
    # Three products in each of five iterations.
    everyone, owners = zip(*run(2, all_gathered, timeout=100), strict=True)
    for name in everyone[0]:
        assert [each[name] for each in everyone] == [5 * 15] * 2, name
        shares = [each[name] for each in owners]
        assert sum(shares) == 5 * 15 and min(shares) >= 2 * 15, (name, shares)


class Shampoo(torch.optim.Optimizer):
    """As its users write it: it knows nothing of ranks, and takes roots of products of whole gradients."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["left"] = torch.zeros(p.shape[0], p.shape[0], dtype=p.dtype)
                    state["right"] = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype)
                state["left"] += p.grad @ p.grad.T
                state["right"] += p.grad.T @ p.grad
                update = inverse_root(state["left"]) @ p.grad @ inverse_root(state["right"])
                p.add_(update, alpha=-group["lr"])


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse fourth root of a positive matrix."""
    values, vectors = torch.linalg.eigh(matrix + 1e-4 * torch.eye(len(matrix), dtype=matrix.dtype))
    return vectors @ torch.diag(values**-0.25) @ vectors.T


def shampoo_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for parameter in model.parameters():
        (matrices if is_matrix(parameter) else others).append(parameter)
    return [Shampoo(matrices), torch.optim.AdamW(others, lr=0.01)]


def trains_with_shampoo() -> None:
    reference = made()
    train_alone(reference, shampoo_and_adam(reference))
    want = dict(reference.named_parameters())
    for name, plan in plans(made()).items():
        model = OSDP(made(), plan=plan)
        train(model, shampoo_and_adam(model))
        for parameter, value in model.named_parameters():
            assert difference(whole(value.detach()), want[parameter]) < 1e-7, (name, parameter)


def test_others_that_need_whole_matrices_train_as_a_single_process_under_every_plan() -> None:
    run(2, trains_with_shampoo, timeout=120)


def in_another_order_on_each_rank() -> None:
    """As ``set(model.parameters())`` gives them, which hashes addresses."""
    want = single_process()
    for name, plan in plans(made()).items():
        model = OSDP(made(), plan=plan)
        optimizers = optimizers_of(model)
        for group in optimizers[0].param_groups:
            group["params"] = group["params"][dist.get_rank() :] + group["params"][: dist.get_rank()]
        train(model, optimizers)
        assert_trained(state_of(model, optimizers[0]), want, name)


def test_ranks_may_list_matrices_in_other_orders() -> None:
    run(2, in_another_order_on_each_rank, timeout=100)


def steps_other_matrices() -> None:
    """Two optimizers in another order on each rank, or one that a rank alone leaves out."""
    for name in ("replicate all", "shard all", "step sharded each"):
        model = OSDP(made(), plan=plans(made())[name])
        matrices = [p for p in model.parameters() if is_matrix(p) and p.requires_grad]
        batch = tokens(dist.get_rank(), 3, 6)
        loss_of(model(batch), batch).backward()
        before = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
        # Of the same shapes: nothing else would tell.
        made_of = [torch.optim.Muon([matrices[1]]), torch.optim.Muon([matrices[3]])]
        assert matrices[1].shape == matrices[3].shape
        with pytest.raises(RuntimeError, match="ranks are about to step other matrices"):
            made_of[dist.get_rank()].step()
        for n, p in model.named_parameters():
            assert torch.equal(whole(p.detach()), before[n]), (name, n)


def test_ranks_that_step_other_matrices_are_told() -> None:
    run(2, steps_other_matrices)


def beside_another_model() -> None:
    """A matrix of another model, which differs from rank to rank, is stepped by each rank alone."""
    for name in ("replicate all", "shard all"):
        model = OSDP(made(), plan=plans(made())[name])
        other = nn.Parameter(torch.full((2 + dist.get_rank(), 3), 1.0))
        alone = nn.Parameter(other.detach().clone())
        matrices = [p for p in model.parameters() if is_matrix(p)]
        muon, single = torch.optim.Muon([*matrices, other], lr=0.1), torch.optim.Muon([alone], lr=0.1)
        batch = tokens(dist.get_rank(), 3, 6)
        loss_of(model(batch), batch).backward()
        other.grad, alone.grad = torch.ones_like(other), torch.ones_like(alone)
        muon.step()
        single.step()
        assert torch.equal(other, alone), name


def test_matrices_of_other_models_are_this_ranks_own() -> None:
    run(2, beside_another_model)


def checkpoints(folder: str) -> None:
    """Both optimizers in one checkpoint, from one plan to another."""
    named = plans(made())
    for index, (before, after) in enumerate(
        pairwise(("shard all", "replicate all", "in slices", "shard all"))
    ):
        model = OSDP(made(), plan=named[before])
        optimizers = optimizers_of(model)
        train(model, optimizers)
        saving = checkpoint.save_async if index else checkpoint.save
        done = saving(f"{folder}/{index}", model, optimizers)
        if done is not None:
            done.wait()
        other = OSDP(made(), plan=named[after])
        into = optimizers_of(other)
        checkpoint.load(f"{folder}/{index}", other, into)
        for one, two in zip(optimizers, into, strict=True):
            assert_equal(held(other, two), held(model, one), f"{before} to {after}")
        train(other, into, first=STEPS)
        assert_trained(state_of(other, into[0]), single_process(2 * STEPS), before, after)


def test_checkpoints_have_the_states_of_both_optimizers(tmp_path: Path) -> None:
    run(2, checkpoints, str(tmp_path), timeout=100)


def wrapped_around() -> None:
    """What was put around its step, a tracing library's, would see parts of matrices."""
    torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))])  # torch puts its hooks around the first one's step
    own = torch.optim.Muon.step

    @functools.wraps(own)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    for name in ("replicate all", "shard all"):
        model = OSDP(made(), plan=plans(made())[name])
        batch = tokens(dist.get_rank(), 3, 6)
        loss_of(model(batch), batch).backward()
        muon, _ = optimizers_of(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Muon, "step", traced)
            with pytest.raises(RuntimeError, match="Muon: something was put around its step"):
                muon.step()


def test_a_step_that_something_was_put_around_is_refused() -> None:
    run(2, wrapped_around)


def in_small_portions() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_matrices, "MATRIX_PORTION", 300)
        trains_under_every_plan(["default"])


def test_portions_change_nothing() -> None:
    run(2, in_small_portions, timeout=100)


def switches() -> None:
    """From plan to plan, with momenta."""
    named = plans(made())
    order = ["replicate all", "shard all", "in slices", "by exchange", "mixed leaves", "replicate all"]
    model = OSDP(made(), plan=named[order[0]])
    optimizers = optimizers_of(model)
    for index, name in enumerate(order):
        if index:
            before = held(model, optimizers[0])
            model.switch(named[name], optimizers)
            assert_equal(held(model, optimizers[0]), before, name)
        train(model, optimizers, first=index * STEPS)
    assert_trained(state_of(model, optimizers[0]), single_process(len(order) * STEPS), "switched")


def test_momenta_go_along_to_other_plans() -> None:
    run(2, switches, timeout=100)


def saves_states() -> None:
    """The optimizer's own state dict, into one of the same plan and into the steps after it."""
    named = plans(made())
    for name in ("shard all", "replicate all", "step sharded each"):
        model = OSDP(made(), plan=named[name])
        optimizers = optimizers_of(model)
        train(model, optimizers)
        saved = copy.deepcopy([each.state_dict() for each in optimizers])
        optimizers = optimizers_of(model)
        for optimizer, state in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(state)
        train(model, optimizers, first=STEPS)
        assert_trained(state_of(model, optimizers[0]), single_process(2 * STEPS), name)


def test_state_dicts_are_loaded_again() -> None:
    run(2, saves_states, timeout=100)


class Frozen(nn.Module):
    """A matrix that is trained, one that is frozen, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = (nn.Linear(5, 3, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.used(x) + self.frozen(x)).square().mean()


def half_trained() -> None:
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD, Mode.SHARD_OPTIMIZER):
        torch.manual_seed(0)
        plain = Frozen()
        model = OSDP(copy.deepcopy(plain), plan=plan_by_hand(plain, mode, 2))
        muon = torch.optim.Muon(model.parameters(), lr=0.1)
        model(torch.ones(2, 5)).backward()
        called: list[str] = []
        muon.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        muon.register_step_post_hook(lambda *_, called=called: called.append("after"))
        muon.step()
        assert called == ["before", "after"]
        changed = {
            name
            for (name, got), old in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not torch.equal(whole(got.detach()), old)
        }
        assert changed == {"used.weight"}, mode
        with pytest.raises(RuntimeError, match=r"leave optimizer.step\(\) uncompiled"):
            model._optimizer_check.before_step(muon, compiled=True)


def test_matrices_without_gradients_stay_as_they_are() -> None:
    run(2, half_trained)


def test_complex_gradients_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    muon = torch.optim.Muon([parameter])
    with pytest.raises(RuntimeError, match="neither complex"):
        WholeMatrices(_Alone(), ()).step(muon)  # type: ignore[arg-type]
    assert not muon.state[parameter]


class _Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def of_one_rank(dtype: torch.dtype, nesterov: bool) -> Iterator[torch.Tensor]:
    for by_us in (True, False):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(4, 6, dtype=dtype))
        muon = torch.optim.Muon([parameter], lr=0.1, nesterov=nesterov)
        if by_us:
            steps = LocalSteps(muon, WholeMatrices(_Alone(), ()).step)  # type: ignore[arg-type]
        for _ in range(3):
            parameter.grad = torch.randn(4, 6, dtype=dtype)
            if by_us:
                steps.make_next(muon)
            muon.step()
        yield parameter.detach()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_torchs_own_on_one_rank(dtype: torch.dtype, nesterov: bool) -> None:
    ours, torchs = of_one_rank(dtype, nesterov)
    assert torch.equal(ours, torchs)


def test_orthogonalizing_leaves_the_momentum_alone() -> None:
    # torch's own overwrites it where it is bfloat16 and not Nesterov's.
    parameter = nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))
    parameter.grad = torch.randn(4, 6, dtype=torch.bfloat16)
    muon = torch.optim.Muon([parameter], momentum=0.0, nesterov=False)
    WholeMatrices(_Alone(), ()).step(muon)  # type: ignore[arg-type]
    assert torch.equal(muon.state[parameter]["momentum_buffer"], parameter.grad)


def beside_tensor_parallelism(plans: dict[str, TensorParallelPlan], shape: tuple[int, int]) -> None:
    """From the same gradients, steps are those of whole matrices: in blocks, in parts of parts, or whole."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for layout in LAYOUTS:
        case = Case(layout)
        applied = both(case, mesh, build(case.name), plans[case.name])
        reference = build(case.name)
        reference.load_state_dict({k: whole(v).clone() for k, v in applied.model.state_dict().items()})
        model, names = applied.model, [n for n, p in reference.named_parameters() if is_matrix(p)]
        theirs, ours = (
            torch.optim.Muon([net.get_parameter(name) for name in names], lr=0.1)
            for net in (reference, model)
        )
        for step in range(2):
            theirs.zero_grad()
            ours.zero_grad()
            model(**batch_of(case.name, seed=step)).loss.backward()
            for name in names:
                reference.get_parameter(name).grad = whole(model.get_parameter(name).grad).clone()
            theirs.step()
            WholeMatrices(mesh["dp"].get_group(), ids_of(model)).step(ours)
        for name in names:
            got, want = model.get_parameter(name), reference.get_parameter(name)
            torch.testing.assert_close(whole(got.detach()), want.detach(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_steps_beside_tensor_parallelism(shape: tuple[int, int]) -> None:
    run(shape[0] * shape[1], beside_tensor_parallelism, {"gpt2": plan_of("gpt2", 2)}, shape, timeout=100)


def plan_for(training: Training) -> Plan:
    model = made()
    return replace(plan_by_hand(model, Mode.FULL_SHARD, dist.get_world_size()), training=training)


def keeps_more_than_planned() -> None:
    model = OSDP(made(), plan=plan_for(Training(optimizer="SGD", local_batch=1)))
    muon, _ = optimizers_of(model)
    batch = tokens(dist.get_rank(), 3, 6)
    loss_of(model(batch), batch).backward()
    with pytest.raises(PlanMismatchError, match=r"Muon, which keeps 1 bytes.*made for SGD, which keeps 0"):
        muon.step()


def test_a_plan_for_an_optimizer_without_states_is_refused() -> None:
    run(2, keeps_more_than_planned)
