"""Elementwise optimizers step local tensors, and nothing but the time of a step shows it."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp import OSDP
from osdp.model.training import OPTIMIZERS, is_elementwise
from osdp.plan.sharding import Mode
from osdp.runtime.optimizer.local_steps import LocalSteps
from osdp.torch_private.autograd import version_of
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand
from tests.runtime.optimizer.test_check import (
    PLANS,
    STEPS,
    TOLERANCE,
    Lamb,
    assert_trained,
    batch_of,
    make,
    plan_of,
    single_process,
    wrapped,
)
from tests.test_parity import difference, whole


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    """Sharded, replicated, empty, of one element and plain ones."""
    torch.manual_seed(0)
    locals_and_placements: list[tuple[torch.Tensor, Any]] = [
        (torch.randn(3, 4, dtype=torch.float64), Shard(0)),
        (torch.randn(4, 3, dtype=torch.float64).t(), Shard(0)),
        (torch.randn(5, dtype=torch.float64), Replicate()),
        (torch.randn((), dtype=torch.float64), Replicate()),
        (torch.randn(0, 4, dtype=torch.float64), Shard(0)),
    ]
    sharded = [
        nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
        for local, placement in locals_and_placements
    ]
    return [*sharded, nn.Parameter(torch.randn(2, dtype=torch.float64))]


def give_gradients(members: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for parameter in members:
        parameter.grad = torch.ones_like(parameter)
        local(parameter.grad).normal_()


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


VARIANTS: list[dict[str, Any]] = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


#: States that are one number for each parameter.
NUMBERS = ("step", "eta", "mu", "mu_product")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_values_and_states_are_those_of_steps_on_plain_tensors(
    name: str, variant: Any, mesh: DeviceMesh
) -> None:
    cost = OPTIMIZERS[name]
    if variant.get("fused") and not cost.fused:
        with pytest.raises(TypeError, match="fused"):
            getattr(torch.optim, name)(parameters(mesh), **variant)
        return
    options: dict[str, Any] = {option: True for option in cost.options if option in ("amsgrad", "centered")}
    options |= {option: 0.1 for option in cost.options if option in ("momentum", "weight_decay")}
    if not variant.get("fused"):
        options["maximize"] = True
    ours, plain = parameters(mesh), [nn.Parameter(local(p.detach()).clone()) for p in parameters(mesh)]
    optimizer, reference = (
        getattr(torch.optim, name)(members, lr=0.1, **variant, **options) for members in (ours, plain)
    )
    assert is_elementwise(optimizer)
    steps = LocalSteps(optimizer)
    for step in range(7):  # RAdam has another formula from the sixth step on
        give_gradients(ours, step)
        for one, other in zip(plain, ours, strict=True):
            one.grad = local(other.grad).clone()
        steps.make_next(optimizer)
        optimizer.step()
        reference.step()
    # The loop and the fused kernel, which the two make by default, agree but for the last bits.
    tolerance = {"rtol": 0.0 if variant else 1e-13, "atol": 0.0}
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(local(got.detach()), want.detach(), **tolerance)
        mine, theirs = optimizer.state[got], reference.state[want]
        assert list(mine) == list(theirs)
        for key, state in theirs.items():
            if not isinstance(state, torch.Tensor):
                assert mine[key] == state
                continue
            torch.testing.assert_close(local(mine[key]), state, **tolerance)
            is_sharded = isinstance(got, DTensor) and key not in NUMBERS
            assert isinstance(mine[key], DTensor) == is_sharded, key
            if is_sharded:
                assert mine[key].placements == got.placements and mine[key].shape == got.shape, key
    assert optimizer.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


class FusedSteps(TorchDispatchMode):
    """Counts calls of fused kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_fused_" in func.__name__
        return func(*args, **(kwargs or {}))


def fused_steps(members: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Calls of fused kernels in a step of ``optimizer``, whose members have gradients."""
    steps = LocalSteps(optimizer)
    steps.make_next(optimizer)
    with FusedSteps() as counted:
        optimizer.step()
    steps.close()
    return counted.count


@pytest.mark.parametrize("name", [name for name, cost in OPTIMIZERS.items() if cost.fused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cpu_step_is_fused_if_nothing_was_asked_for(name: str, dtype: torch.dtype) -> None:
    members = [nn.Parameter(torch.randn(4, 3, 2, 2, dtype=dtype)) for _ in range(2)]
    members[1].data = members[1].to(memory_format=torch.channels_last)
    members[1].grad = torch.ones_like(members[1])
    members[0].grad = torch.ones_like(members[0])
    optimizer = getattr(torch.optim, name)(members, lr=0.1)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    versions = [version_of(parameter) for parameter in members]
    assert fused_steps(members, optimizer) == 1
    # A forward that saved them raises in backward, as after a step of torch's loop.
    assert all(version_of(p) > version for p, version in zip(members, versions, strict=True))
    found = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert found == options


#: What leaves a step to torch's loop, by what a fused kernel would do otherwise.
NOT_FUSED: dict[str, dict[str, Any]] = {
    "asked for the loop": {"foreach": False},
    "asked for no fused kernel": {"fused": False},
    "would compute in the dtype of the parameter": {"lr": torch.tensor(0.1)},
    "would compute with a number": {"betas": (torch.tensor(0.9), torch.tensor(0.999))},
    "would round another number": {"lr": np.float32(0.1)},
    "would take booleans only": {"amsgrad": 1, "maximize": np.False_},
}


@pytest.mark.parametrize("options", NOT_FUSED.values(), ids=NOT_FUSED)
def test_options_that_a_fused_kernel_would_not_follow(options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.randn(4))
    parameter.grad = torch.ones(4)
    assert fused_steps([parameter], torch.optim.AdamW([parameter], **options)) == 0


def test_memory_that_a_fused_kernel_would_not_follow() -> None:
    """It goes through memory element by element, whatever the strides."""
    transposed, rounded, counted = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    transposed.grad = torch.randn(4, 4).t()
    rounded.data = rounded.bfloat16()
    rounded.grad = torch.ones_like(rounded)
    counted.grad = torch.ones_like(counted)
    before = transposed.detach().clone()
    optimizer = torch.optim.SGD([transposed], lr=1.0)
    assert fused_steps([transposed], optimizer) == 0
    assert torch.equal(transposed, before - transposed.grad)
    # Its arithmetic is wider than that of the loop.
    assert fused_steps([rounded], torch.optim.AdamW([rounded])) == 0
    wide = torch.optim.AdamW([counted])
    wide.step()
    wide.state[counted]["step"] = wide.state[counted]["step"].double()
    assert fused_steps([counted], wide) == 0


class Scaled(torch.Tensor):
    """A tensor class that knows the operations of torch's loop, as those of quantized weights do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_" in getattr(func, "__name__", ""):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("name", [name for name, cost in OPTIMIZERS.items() if cost.fused])
def test_tensors_of_other_classes_are_left_to_the_loop(name: str) -> None:
    for give_class in (lambda p: nn.Parameter(p.detach().as_subclass(Scaled)), lambda p: p):
        parameter = give_class(nn.Parameter(torch.ones(4)))
        parameter.grad = torch.ones(4).as_subclass(Scaled)
        assert fused_steps([parameter], getattr(torch.optim, name)([parameter], lr=0.1)) == 0
        assert (parameter < 1).all()


def test_momentum_that_begins_later_is_left_to_the_loop() -> None:
    """The kernel makes a first step for all of its parameters, or for none."""
    early, late, twin = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = torch.optim.SGD([early, late], lr=1.0, momentum=0.5, dampening=0.5)
    early.grad = torch.ones(3)
    assert fused_steps([early], optimizer) == 1
    late.grad = torch.ones(3)
    assert fused_steps([early, late], optimizer) == 0
    assert fused_steps([early, late], optimizer) == 1
    alone = torch.optim.SGD([twin], lr=1.0, momentum=0.5, dampening=0.5, foreach=False)
    twin.grad = torch.ones(3)
    for _ in range(2):
        alone.step()
    assert torch.equal(late, twin)


def test_a_fused_step_that_fails_leaves_the_options_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.randn(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([parameter])
    LocalSteps(optimizer).make_next(optimizer)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step()
    group = optimizer.param_groups[0]
    assert group["fused"] is None and group["params"] == [parameter]


class DTensorOperations(TorchDispatchMode):
    """Counts operations on DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def test_no_operation_of_the_step_is_on_a_dtensor(mesh: DeviceMesh) -> None:
    counts = []
    for with_local_steps in (False, True):
        members = parameters(mesh)
        optimizer = torch.optim.AdamW(members)
        steps = LocalSteps(optimizer)
        for step in range(2):  # the first makes the states
            give_gradients(members, step)
            if with_local_steps:
                steps.make_next(optimizer)
            with DTensorOperations() as operations:
                optimizer.step()
        counts.append(operations.count)
    assert counts[0] > 20 and counts[1] == 0, counts


def test_hooks_of_others_see_dtensors_and_changed_versions(mesh: DeviceMesh) -> None:
    members = parameters(mesh)
    optimizer = torch.optim.AdamW(members)
    steps = LocalSteps(optimizer)
    seen = []

    def look(opt: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        found = opt.param_groups[0]["params"]
        assert all(one is other for one, other in zip(found, members, strict=True))
        seen.append([version_of(parameter) for parameter in found])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    steps.make_next(optimizer)
    give_gradients(members, 0)
    optimizer.step()
    before, after = seen
    # What was gathered from shards is out of date, and a forward that saved them raises in backward.
    assert all(late > early for early, late in zip(before, after, strict=True))


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(mesh: DeviceMesh) -> None:
    members = parameters(mesh)
    optimizer = torch.optim.AdamW(members, foreach=True)
    steps = LocalSteps(optimizer)
    for step in range(2):
        give_gradients(members, step)
        steps.make_next(optimizer)
        optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(0.1)
    steps.make_next(optimizer)
    with pytest.raises(RuntimeError, match="lr as a Tensor"):
        optimizer.step()
    assert all(one is other for one, other in zip(group["params"], members, strict=True))
    group["lr"] = kept["param_groups"][0]["lr"]
    assert optimizer.state.keys() == set(members)
    for index, parameter in enumerate(members):
        for key, value in kept["state"][index].items():
            assert torch.equal(local(optimizer.state[parameter][key]), local(value)), key
    steps.make_next(optimizer)
    optimizer.step()
    assert all(float(optimizer.state[parameter]["step"]) == 3 for parameter in members)


@pytest.mark.parametrize("foreach", [None, False])
def test_a_step_that_fails_halfway_counts_what_it_changed(foreach: bool | None, mesh: DeviceMesh) -> None:
    """Under SHARD_OPTIMIZER the next forward computed with whole parameters from before the step."""
    members = parameters(mesh)
    groups = [{"params": members[:3], "foreach": foreach}, {"params": members[3:], "foreach": True}]
    optimizer = torch.optim.AdamW(groups)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    give_gradients(members, 0)
    before = [(local(p.detach()).clone(), version_of(p)) for p in members[:3]]
    LocalSteps(optimizer).make_next(optimizer)
    with pytest.raises(RuntimeError, match="lr as a Tensor"):
        optimizer.step()
    for parameter, (values, version) in zip(members, before, strict=False):
        assert not torch.equal(local(parameter.detach()), values)
        assert version_of(parameter) > version


def test_hooks_may_remove_themselves_and_register_others(mesh: DeviceMesh) -> None:
    members = parameters(mesh)
    optimizer = torch.optim.AdamW(members)
    steps = LocalSteps(optimizer)
    called: list[str] = []

    def once(kind: str, register: Any) -> None:
        def hook(*_: Any) -> None:
            called.append(kind)
            assert handle.id in getattr(optimizer, f"_optimizer_step_{kind}_hooks")
            handle.remove()
            register(lambda *_: called.append(f"later {kind}"))

        handle = register(hook)

    once("pre", optimizer.register_step_pre_hook)
    once("post", optimizer.register_step_post_hook)
    for step in range(2):
        give_gradients(members, step)
        steps.make_next(optimizer)
        with DTensorOperations() as operations:
            optimizer.step()
        assert operations.count == 0
    assert called == ["pre", "post", "later pre", "later post"]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_hook_that_fails_keeps_its_place(mesh: DeviceMesh) -> None:
    members = parameters(mesh)
    optimizer = torch.optim.SGD(members, lr=0.5)
    ours = [LocalSteps(optimizer) for _ in range(2)]  # of two models
    fails, called = [True, False], []

    def hook(*_: Any) -> None:
        called.append(len(optimizer.param_groups[0]["params"]))
        if fails.pop():
            raise KeyError

    for _ in range(2):
        optimizer.register_step_pre_hook(hook)
    befores = dict(optimizer._optimizer_step_pre_hooks)
    give_gradients(members, 0)
    wanted = [local(p.detach()) - 0.5 * local(p.grad) for p in members]
    fails = [False, False, True]  # from the end
    for error in (pytest.raises(KeyError), contextlib.nullcontext()):
        for steps in ours:
            steps.make_next(optimizer)
        with error, DTensorOperations() as operations:
            optimizer.step()
    assert operations.count == 0 and called == [len(members)] * 3
    assert optimizer._optimizer_step_pre_hooks == befores
    for parameter, want in zip(members, wanted, strict=True):
        assert torch.equal(local(parameter.detach()), want)


@pytest.mark.parametrize("keyword", [False, True])
def test_hooks_find_closures_as_they_were_passed(keyword: bool, mesh: DeviceMesh) -> None:
    members = parameters(mesh)
    optimizer = torch.optim.SGD(members, lr=0.5)
    steps = LocalSteps(optimizer)
    found = []

    def hook(_optimizer: Any, args: Any, kwargs: Any) -> None:
        assert (len(args), list(kwargs)) == ((1, ["closure"]) if keyword else (2, []))
        found.append((kwargs["closure"] if keyword else args[1])())  # which makes no step

    def closure() -> int:
        give_gradients(members, 0)
        return 7

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    give_gradients(members, 0)
    wanted = [local(p.detach()) - 0.5 * local(p.grad) for p in members]
    steps.make_next(optimizer)
    step: Any = optimizer.step
    assert (step(closure=closure) if keyword else step(closure)) == 7
    assert found == [7, 7]
    for parameter, want in zip(members, wanted, strict=True):
        assert torch.equal(local(parameter.detach()), want)


def test_a_gradient_or_state_in_another_layout_is_left_to_the_optimizer(mesh: DeviceMesh) -> None:
    for what in ("gradient", "state"):
        member = parameters(mesh)[0]
        optimizer = torch.optim.SGD([member], lr=0.5, momentum=0.9)
        steps = LocalSteps(optimizer)
        steps.make_next(optimizer)
        start = member.full_tensor().detach().clone()
        other = DTensor.from_local(torch.ones(start.shape, dtype=start.dtype), mesh, [Replicate()])
        member.grad = other if what == "gradient" else torch.ones_like(member)
        if what == "state":
            optimizer.state[member]["momentum_buffer"] = other.clone()
        with DTensorOperations() as operations:
            optimizer.step()
        assert operations.count, what
        want = member.to_local().detach() + (0.5 if what == "gradient" else 0.5 * 1.9)
        assert torch.allclose(want, start[: len(want)]), what


def test_a_differentiable_step_is_left_to_the_optimizer(mesh: DeviceMesh) -> None:
    """The option may be set, or come with another group, after the first step."""
    members = parameters(mesh)[:1]
    optimizer = torch.optim.Adam(members)
    steps = LocalSteps(optimizer)
    optimizer.param_groups[0]["differentiable"] = True
    give_gradients(members, 0)
    steps.make_next(optimizer)
    with torch.no_grad(), DTensorOperations() as operations:
        optimizer.step()
    assert operations.count


def test_a_gradient_of_another_dtype_is_left_to_the_optimizer(mesh: DeviceMesh) -> None:
    (member, *_) = parameters(mesh)
    optimizer = torch.optim.SGD([member], lr=0.5)
    steps = LocalSteps(optimizer)
    want = local(member.detach()) - 0.5
    member.grad_dtype = None
    member.grad = torch.ones_like(member, dtype=torch.float32)
    steps.make_next(optimizer)
    optimizer.step()
    assert torch.equal(local(member.detach()), want)


def test_which_optimizers_are_elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [nn.Parameter(torch.ones(2))]

    class Renamed(torch.optim.AdamW):
        """Keeps torch's step."""

    class Halves(torch.optim.AdamW):
        """Keeps more than torch's."""

        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            return super()._init_group(*args, **kwargs)

    assert all(is_elementwise(getattr(torch.optim, name)(one)) for name in OPTIMIZERS)
    assert is_elementwise(Renamed(one))
    for other in (Lamb(one), Halves(one), torch.optim.LBFGS(one), torch.optim.Adafactor(one)):
        assert not is_elementwise(other), type(other)
    assert not is_elementwise(torch.optim.AdamW(one, differentiable=True))

    class Wraps(torch.optim.AdamW):
        """Has torch's step as the one it wraps, but more around it."""

        @functools.wraps(torch.optim.AdamW.step)
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert not is_elementwise(Wraps(one))

    def by_norm(self: Any, closure: Any = None) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(torch.optim.SGD.step)(by_norm))
    assert not is_elementwise(torch.optim.SGD(one))
    monkeypatch.setattr(torch.optim.SGD, "step", by_norm)
    assert not is_elementwise(torch.optim.SGD(one))


def step_by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch_of(step, dist.get_rank()))
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
    assert float(loss.detach()) > 0


def trains_by_closures() -> None:
    def optimizers(members: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(members, lr=0.02)]

    for name in PLANS:
        model = wrapped(name, make())
        (optimizer,) = optimizers(list(model.parameters()))
        for step in range(STEPS):
            step_by_closure(model, optimizer, step)
        assert_trained(model, single_process(optimizers), name)


def test_closures_compute_the_gradients_of_their_own_step() -> None:
    run(2, trains_by_closures, timeout=100)


def trains_over_switches() -> None:
    def optimizers(members: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(members, lr=0.02)]

    model = wrapped("NO_SHARD", make())
    (optimizer,) = optimizers(list(model.parameters()))
    counts = []
    for step, name in zip(range(STEPS), ("FULL_SHARD", "SHARD_GRAD_OP", "mixed"), strict=True):
        model.switch(plan_of(name, make()), optimizer)
        optimizer.zero_grad()
        model(batch_of(step, dist.get_rank())).backward()
        optimizer.step()
        counts.append(len(optimizer._optimizer_step_post_hooks))
        assert all(int(state["step"]) == step + 1 for state in optimizer.state.values())
    assert counts == [1, 1, 1]
    assert_trained(model, single_process(optimizers), "switched")


def test_a_switch_hooks_up_once_more() -> None:
    run(2, trains_over_switches, timeout=100)


def trains_beside_others() -> None:
    """Hooks of an optimizer find its parameters, also while other models are wrapped."""

    def train_each(models: list[nn.Module], single: bool) -> list[int]:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
        seen: list[int] = []

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            seen.append(len(optimizer.param_groups[0]["params"]))

        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        ranks = range(dist.get_world_size()) if single else [dist.get_rank()]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss: Any = sum(model(batch_of(step, rank)) for rank in ranks)
                (loss / len(ranks)).backward()
                optimizer.register_step_pre_hook(look)
                optimizer.step()
        return seen

    wanted: list[nn.Module] = [make() for _ in range(3)]
    looks = train_each(wanted, single=True)
    for name in ("FULL_SHARD", "mixed"):
        beside: Any = fully_shard(make())
        models: list[Any] = [wrapped(name, make()), wrapped(name, make()), beside]
        assert train_each(models, single=False) == looks
        for model, want in zip(models, wanted, strict=True):
            for got, parameter in zip(model.parameters(), want.parameters(), strict=True):
                assert difference(whole(got.detach()), parameter.detach()) < TOLERANCE, name


def test_each_model_steps_for_its_own_optimizers_only() -> None:
    run(2, trains_beside_others, timeout=100)


def deletes_gradients() -> None:
    for mode in Mode:
        if mode is Mode.HYBRID_SHARD:
            continue
        plain = make()
        model = OSDP(plain, plan=plan_by_hand(plain, mode, 2))
        model(batch_of(0, dist.get_rank())).backward()
        for parameter in model.parameters():
            del parameter.grad
            assert parameter.grad is None


def test_gradients_can_be_deleted() -> None:
    run(2, deletes_gradients)
