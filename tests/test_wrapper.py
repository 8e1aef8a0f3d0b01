"""``OSDP`` as a module: names, attributes, state dicts, and what it refuses."""

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp import OSDP, OptimalShardedDataParallel, PlanMismatchError
from osdp.model.training import Training
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import ROOT, plan_by_hand
from tests.runtime.sharding.test_sharded_model import expected, fail_backward, failing, one_loss
from tests.test_parity import LAYOUTS, difference, whole


class Configured(Net):
    """A model with attributes and methods of its own."""

    config: ClassVar = {"width": 5}

    def most_likely(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).argmax(-1)


def wrapped(layout: str = "mixed leaves", **options: Any) -> OSDP:
    torch.manual_seed(7)
    net = Configured(gated=False)
    modes, groups = LAYOUTS[layout]
    return OSDP(net, plan=plan_by_hand(net, modes, dist.get_world_size(), groups=groups), **options)


def looks_like_the_model() -> None:
    torch.manual_seed(7)
    plain = Configured(gated=False)
    for layout in LAYOUTS:
        model = wrapped(layout)
        assert isinstance(model, OSDP) and isinstance(model, nn.Module)
        assert isinstance(model.module, Configured)
        assert model.plan.world_size == 2
        assert model.config == {"width": 5}
        assert model.blocks[0].up.out_features == 7
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert "module." not in repr([n for n, _ in model.named_buffers()])
        with pytest.raises(AttributeError, match="nothing_like_it"):
            model.nothing_like_it  # noqa: B018
        with torch.no_grad():
            assert torch.equal(model.most_likely(tokens(0, 2, 6)), plain.most_likely(tokens(0, 2, 6)))
        assert not model.eval().training and not model.module.blocks[1].training
        assert model.train().module.training
        assert "blocks.0.up" in repr(model)


def parameters_are_the_stored_ones_in_between() -> None:
    """An optimizer made, or a norm taken, between forward and backward sees what is trained."""
    for layout in LAYOUTS:
        model = wrapped(layout)
        before = dict(model.named_parameters())
        loss = one_loss(model, dist.get_rank())
        between = dict(model.named_parameters())
        assert all(between[name] is before[name] for name in before), layout
        state = model.state_dict()
        assert all(isinstance(v, DTensor) == isinstance(before.get(n, v), DTensor) for n, v in state.items())
        loss.backward()
        want = expected(one_loss)
        for name, parameter in model.named_parameters():
            got = None if parameter.grad is None else whole(parameter.grad)
            assert difference(got, want[name]) < 1e-5, (layout, name)


def recovers_clips_and_keeps() -> None:
    model = wrapped(find_unused_parameters=True)
    with failing(model.blocks[0], fail_backward), pytest.raises(KeyError):
        one_loss(model, dist.get_rank()).backward()
    with model.no_sync():
        one_loss(model, dist.get_rank()).backward()
    model.set_requires_gradient_sync(True)
    one_loss(model, dist.get_rank()).backward()
    want = expected(lambda net, rank: 2 * one_loss(net, rank))
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in want.values() if g is not None])
    )
    assert difference(model.clip_grad_norm_(1.0), norm) < 1e-5


def refuses() -> None:
    model = wrapped()
    with pytest.raises(RuntimeError, match=r"cannot be copied.*before wrapping"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"cpu.*meta.*before wrapping"):
        model.to("meta")
    with pytest.raises(RuntimeError, match=r"float32.*float64.*param_dtype"):
        model.double()
    assert model.to("cpu") is model
    assert model.float() is model
    with pytest.raises(ValueError, match="wrapped already"):
        OSDP(model, plan=model.plan)
    with pytest.raises(ValueError, match="wrapped already"):
        OSDP(model.module, plan=model.plan)
    net = Net(gated=False)
    plan = plan_by_hand(net, Mode.FULL_SHARD, 4, groups={"": ROOT})
    with pytest.raises(PlanMismatchError, match=r"4 ranks, there are 2"):
        OSDP(net, plan=plan)
    three_axes = dist.device_mesh.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="3 axes"):
        OSDP(net, plan=plan, mesh=three_axes)


def all_differences_at_once() -> None:
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    plan = plan_by_hand(Net(), Mode.NO_SHARD, 4)
    with pytest.raises(PlanMismatchError) as caught:
        OSDP(other, plan=plan)
    text = str(caught.value)
    for fault in ("4 ranks", "'blocks.0.up'", "'embed.weight'", "parameter '0.weight' of the model"):
        assert fault in text
    assert len(caught.value.differences) > 10
    resized = Net(gated=False)
    resized.frozen = nn.Linear(5, 6)
    with pytest.raises(PlanMismatchError, match="'frozen' has 144 bytes, the plan says 120"):
        OSDP(resized, plan=plan_by_hand(Net(gated=False), Mode.NO_SHARD, 2))
    with pytest.raises(PlanMismatchError, match=r"'gate\.scale' has no dimension to shard"):
        OSDP(Net(), plan=plan_by_hand(Net(), Mode.FULL_SHARD, 2, groups={"": ROOT}))
    tied = plan_by_hand(Net(gated=False), Mode.FULL_SHARD, 2, groups={"blocks.0": "blocks.0"})
    untied = plan_by_hand(Net(gated=False, tied=False), Mode.FULL_SHARD, 2)
    assert OSDP(Net(gated=False), plan=tied).plan is tied
    with pytest.raises(PlanMismatchError, match="head"):
        OSDP(Net(gated=False), plan=untied)


def compiles() -> None:
    # Dynamo looks at gradients of inputs that are no leaves, and lets that warning through.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    want = expected(one_loss)
    for layout in ("replicate all", "shard all", "mixed leaves"):
        for dtype in (None, "bfloat16"):
            torch._dynamo.reset()
            torch.manual_seed(7)
            net = Net(gated=False)
            modes, groups = LAYOUTS[layout]
            plan = plan_by_hand(net, modes, 2, groups=groups, param_dtype=dtype)
            model = OSDP(net, plan=plan)
            for block in model.blocks:
                block.compile(backend="aot_eager")
            for _ in range(4):
                model.zero_grad()
                one_loss(model, dist.get_rank()).backward()
            for name, parameter in model.named_parameters():
                got = None if parameter.grad is None else whole(parameter.grad)
                tolerance = 5e-2 if dtype else 1e-5
                assert difference(got, want[name]) < tolerance, (layout, dtype, name)


class Own(torch.optim.Optimizer):
    """An optimizer that torch does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        del closure


def checks_the_optimizer() -> None:
    batch = tokens(dist.get_rank(), 2, 6)
    model = wrapped()
    loss_of(model(batch), batch).backward()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # of something else
    for _ in range(2):  # an optimizer that does not fit is refused until it is exchanged
        with pytest.raises(PlanMismatchError, match=r"keeps 3 bytes of state .* made for AdamW"):
            torch.optim.AdamW(model.parameters(), amsgrad=True).step()
    first, *rest = model.parameters()
    torch.optim.AdamW([first]).step()
    torch.optim.AdamW(rest, weight_decay=0.1).step()
    model(batch)
    late = torch.optim.AdamW([first])
    late.step()
    late.add_param_group({"params": rest, "amsgrad": True})
    with pytest.raises(PlanMismatchError, match="keeps 3 bytes"):  # one that grows is looked at again
        late.step()
    for unknown in (Own, functools.partial(torch.optim.AdamW, maximize=True)):
        other = wrapped()
        unknown(other.parameters()).step()
        other(batch)


def what_checks_the_optimizer_ends_with_the_model() -> None:
    model = wrapped()
    check = weakref.ref(model._optimizer_check)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    del model
    gc.collect()
    assert check() is None
    optimizer.step()


def refuses_another_training() -> None:
    plan = wrapped().plan
    OSDP(Configured(gated=False), plan=plan, training=Training(optimizer="AdamW"))
    with pytest.raises(PlanMismatchError, match="optimizer='AdamW', asked for 'SGD'"):
        OSDP(Configured(gated=False), plan=plan, training=Training(optimizer="SGD"))


def mode_is_set_by_attribute() -> None:
    """As Lightning restores the modes after a validation."""
    model = wrapped()
    model.eval()
    assert not model.module.training
    for module in model.modules():
        module.training = True
    assert model.module.training and model.training and model.blocks[0].training


def refuses_layers_that_took_anothers_place() -> None:
    for layout in ("replicate all", "mixed leaves"):
        model = wrapped(layout)
        model.blocks[0].norm = Normed(model.blocks[0].norm)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.norm.*was exchanged for another"):
            model(tokens(0, 2, 6))
    # One that is left out, and one that is wrapped, are none.
    model = wrapped("replicate all")
    model.blocks[0].norm = nn.Sequential(model.blocks[0].norm)
    model(tokens(0, 2, 6))


class Normed(nn.Module):
    """With the parameters of another norm."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.shape = norm.weight, norm.bias, norm.normalized_shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.shape, self.weight, self.bias)


def takes_states_of_a_plain_optimizer() -> None:
    """Whole states, the same on all ranks, into an optimizer over shards, before its first step and later."""
    torch.manual_seed(7)
    plain = Configured(gated=False)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    layouts = {layout: wrapped(layout) for layout in LAYOUTS}
    optimizers = {layout: torch.optim.AdamW(model.parameters(), lr=0.05) for layout, model in layouts.items()}
    for step in range(4):
        if step in (1, 3):
            for layout, model in layouts.items():
                model.load_state_dict(plain.state_dict())
                optimizers[layout].load_state_dict(copy.deepcopy(reference.state_dict()))
        for model, optimizer in (
            (plain, reference),
            *((layouts[each], optimizers[each]) for each in LAYOUTS),
        ):
            optimizer.zero_grad()
            batch = tokens(step, 2, 6)  # the same on all ranks
            loss_of(model(batch), batch).backward()
            optimizer.step()
    for layout, model in layouts.items():
        for name, parameter in model.named_parameters():
            assert difference(whole(parameter), plain.get_parameter(name)) < 1e-5, (layout, name)


CHECKS = (
    looks_like_the_model,
    mode_is_set_by_attribute,
    takes_states_of_a_plain_optimizer,
    refuses_layers_that_took_anothers_place,
    parameters_are_the_stored_ones_in_between,
    recovers_clips_and_keeps,
    refuses,
    all_differences_at_once,
    checks_the_optimizer,
    what_checks_the_optimizer_ends_with_the_model,
    refuses_another_training,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_wrapper(check: Callable[[], None]) -> None:
    run(2, check)


def test_compiled_blocks() -> None:
    run(2, compiles, timeout=150, fresh=True)


def test_without_a_process_group_the_error_says_what_to_type() -> None:
    net = Net(gated=False)
    with pytest.raises(RuntimeError, match=r"torchrun --nproc-per-node=2 your_script\.py"):
        OSDP(net, plan=plan_by_hand(net, Mode.NO_SHARD, 2))


def test_the_long_name() -> None:
    assert OptimalShardedDataParallel is OSDP


def loss_goes_down() -> None:
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        batch = tokens(dist.get_rank(), 2, 6)
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_it_learns() -> None:
    run(2, loss_goes_down)


def share_of_each() -> tuple[int, int]:
    mesh = wrapped().mesh
    return mesh["dp"].get_local_rank(), mesh["dp"].size()


def test_the_mesh_says_which_batches_are_whose() -> None:
    assert run(2, share_of_each) == [(0, 2), (1, 2)]
