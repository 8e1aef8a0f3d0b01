"""A running model goes on under any other plan as if nothing had happened."""

import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.optim.optimizer import _global_optimizer_pre_hooks

from osdp import OSDP
from osdp.errors import PlanMismatchError
from osdp.nn.sliced_weight import LOCAL
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, Route
from osdp.torch_private.autograd import apply_function
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import in_groups, offload, plan_by_hand, split, step_by_exchange
from tests.test_parity import LAYOUTS, difference, whole

TOLERANCE = 1e-9


class Normed(Net):
    """With statistics of its own on each rank."""

    def __init__(self) -> None:
        super().__init__(gated=False)
        self.norm = nn.BatchNorm1d(13)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits = super().forward(batch)
        return self.norm(logits.flatten(0, 1)).view(logits.shape)


def made(kind: Callable[[], Net] = lambda: Net(gated=False)) -> Net:
    torch.manual_seed(7)
    return kind().double()


def plans(model: nn.Module) -> dict[str, Plan]:
    """Ten plans: all modes, units of all kinds, slices, recomputation; on four ranks also groups."""
    world = dist.get_world_size()
    found = {
        name: plan_by_hand(model, modes, world, groups=groups)
        for name, (modes, groups) in LAYOUTS.items()
        if name not in {"step sharded all", "shard each", "keep all"}
    }
    found["by exchange"] = step_by_exchange(found["step sharded each"])
    found["in slices"] = split(found["shard apart"], model, 2)
    found["recomputed"] = found["mixed leaves"].with_sharding(recomputed=("blocks.0", "blocks.1"))
    del found["replicate each"]
    if world > 2:
        found["in groups"] = in_groups(found["shard apart"], Mode.HYBRID_SHARD, 2, Route.FLAT)
        found["in two steps"] = in_groups(found["shard all"], Mode.FULL_SHARD, 2, Route.TWO_STEP_EXCHANGE)
    return found


def every_pair(count: int) -> Iterator[int]:
    """A walk over ``count`` places that goes from each to every other once, from the first one on."""
    left = {place: [other for other in range(count) if other != place] for place in range(count)}
    walk, stack = [], [0]
    while stack:  # Hierholzer, Mathematische Annalen 6, 1873
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return reversed(walk)


def held(model: OSDP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer states, whole."""
    found = {name: whole(value).detach().clone() for name, value in model.named_parameters()}
    found |= {name: value.clone() for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}: {key}"] = whole(value).detach().clone()
    return found


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    batch = tokens(10 * index + dist.get_rank(), 3, 6)
    optimizer.zero_grad()
    loss = loss_of(model(batch), batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str) -> None:
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()}"
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{what}: {name}"


#: What four ranks have beside two: plans with groups, and those that they differ from most.
GROUPED = ("in groups", "in two steps", "mixed leaves", "in slices", "recomputed")


def walk_over_all_pairs(chosen: tuple[str, ...] = ()) -> None:
    """Bit-equal before and after each switch, and at last as in a single process."""
    model = made()
    named = plans(model)
    assert len(named) == (12 if dist.get_world_size() > 2 else 10)
    named = {name: plan for name, plan in named.items() if name in chosen or not chosen}
    order = [list(named)[place] for place in every_pair(len(named))]
    assert len(order) == len(named) * (len(named) - 1) + 1
    wrapped = OSDP(model, plan=named[order[0]])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    step_on(wrapped, optimizer, 0)
    for index, (before, after) in enumerate(itertools.pairwise(order), 1):
        want = held(wrapped, optimizer)
        wrapped.switch(named[after], optimizer)
        assert wrapped.plan == named[after]
        assert_equal(held(wrapped, optimizer), want, f"from {before!r} to {after!r}")
        step_on(wrapped, optimizer, index)

    reference = made()
    stepped = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    world = dist.get_world_size()
    for index in range(len(order)):
        stepped.zero_grad()
        for rank in range(world):
            batch = tokens(10 * index + rank, 3, 6)
            (loss_of(reference(batch), batch) / world).backward()
        stepped.step()
    for name, parameter in wrapped.named_parameters():
        want_weight = reference.get_parameter(name)
        assert difference(whole(parameter), want_weight) < TOLERANCE, name


@pytest.mark.parametrize(
    ("world_size", "chosen"), [(2, ()), (4, GROUPED), pytest.param(4, (), marks=pytest.mark.slow)]
)
def test_switching_between_all_pairs_of_plans(world_size: int, chosen: tuple[str, ...]) -> None:
    run(world_size, walk_over_all_pairs, chosen, timeout=170.0)


def keeps_what_a_user_has_set() -> None:
    model = made(Normed)
    block = model.blocks[0]
    named = {name: plan for name, plan in plans(model).items() if name in {"in slices", "shard all"}}
    named["replicate"] = plan_by_hand(model, Mode.NO_SHARD, 2)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen: list[str] = []
    wrapped.get_submodule("blocks.0").register_forward_hook(lambda *_: seen.append("forward"))
    wrapped.get_parameter("head.weight").register_hook(lambda _: seen.append("gradient"))
    weight: Any = wrapped.get_parameter("blocks.0.up.weight")
    weight.decays = False
    wrapped.marked = "mine"
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.get_submodule("blocks.1").eval()
    for name in ("in slices", "replicate", "shard all"):
        step_on(wrapped, optimizer, 0)
        scheduler.step()
        statistics = model.norm.running_mean.clone()
        wrapped.switch(named[name], optimizer)
        assert wrapped.module is model, name
        assert model.blocks[0] is block, name
        assert torch.equal(model.norm.running_mean, statistics), name
        assert wrapped.marked == "mine", name
        assert not model.blocks[1].training and model.blocks[0].training, name
        seen.clear()
        step_on(wrapped, optimizer, 1)
        assert sorted(seen) == ["forward", "gradient"], name
        moved: Any = wrapped.get_parameter("blocks.0.up.weight")
        assert moved.decays is False, name
        assert not wrapped.get_parameter("frozen.weight").requires_grad, name
        assert wrapped.clip_grad_norm_(1e9) > 0, name
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2**3)


def test_what_a_user_has_set_stays() -> None:
    run(2, keeps_what_a_user_has_set)


def has_left_nothing_behind() -> None:
    """What the last plan stored is freed, except what a user still refers to, which is named."""
    model = made()
    wrapped = OSDP(model, plan=plan_by_hand(model, Mode.FULL_SHARD, 2))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    step_on(wrapped, optimizer, 0)
    gone = [weakref.ref(parameter) for parameter in wrapped.parameters()]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("osdp").addHandler(handler)
    wrapped.switch(plan_by_hand(model, Mode.NO_SHARD, 2), optimizer)
    gc.collect()
    assert not [reference() for reference in gone if reference() is not None]
    assert not records
    average = list(wrapped.parameters())[:1]
    wrapped.switch(plan_by_hand(model, Mode.FULL_SHARD, 2), optimizer)
    if dist.get_rank() == 0:
        assert len(records) == 1
        assert records[0].startswith("1 parameters of the last plan are still referred to"), records
        assert "(embed.weight)" in records[0]
    with pytest.raises(RuntimeError, match="no longer the model's"):
        average[0].sum()


def test_nothing_is_left_behind_but_what_is_named() -> None:
    run(2, has_left_nothing_behind)


def holds_no_values_of_the_plan_before() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for index, name in enumerate(("replicate all", "mixed leaves", "in slices", "shard all")):
        step_on(wrapped, optimizer, index)
        listed, want = list(wrapped.parameters()), held(wrapped, optimizer)
        wrapped.switch(named[name], optimizer)
        assert_equal(held(wrapped, optimizer), want, name)
        for each in listed:
            assert not hasattr(each, LOCAL), name
            own = getattr(each, "_local_tensor", each)
            with torch._C.DisableTorchFunctionSubclass():
                assert own.untyped_storage().nbytes() <= 8, name


def test_a_list_of_parameters_keeps_no_memory_of_the_plan_before() -> None:
    """A plan was left since it needed too much memory, and a list for clipping kept its weights."""
    run(2, holds_no_values_of_the_plan_before)


def refuses() -> None:
    model = made()
    named = {
        "keep": plan_by_hand(model, Mode.FULL_SHARD, 2),
        "next": plan_by_hand(model, Mode.NO_SHARD, 2),
    }
    wrapped = OSDP(model, plan=named["keep"])
    optimizer = torch.optim.AdamW(wrapped.parameters())
    batch = tokens(dist.get_rank(), 3, 6)

    def fails(error: type[Exception], match: str, plan: Any = named["next"], **given: Any) -> None:
        with pytest.raises(error, match=match):
            wrapped.switch(plan, **({"optimizer": optimizer} | given))
        assert wrapped.plan == named["keep"]

    with wrapped.no_sync():
        loss_of(wrapped(batch), batch).backward()
    fails(RuntimeError, "accumulation has kept gradients")
    loss = loss_of(wrapped(batch), batch)
    fails(RuntimeError, "had no backward")
    loss.backward()
    fails(RuntimeError, "no optimizer has stepped")
    optimizer.step()
    fails(ValueError, "left out .AdamW.", optimizer=())
    fails(TypeError, "takes a Plan, not a str", plan="plan.json")
    fails(TypeError, "not str", optimizer=["adam"])
    fails(PlanMismatchError, "fingerprint another", plan=replace(named["next"], model="another"))
    fails(PlanMismatchError, "for 4 ranks, there are 2", plan=replace(named["next"], dp=4))
    fails(ValueError, "offloads", plan=offload(plan_by_hand(model, Mode.FULL_SHARD, 2)))
    # What no check here sees, but the next plan's own: the model goes on under the plan it had.
    decisions = named["next"].stages[0].sharding.decisions
    fails(
        PlanMismatchError,
        "is in no operator of the plan",
        plan=named["next"].with_sharding(
            decisions=decisions[1:],
            units=tuple(
                unit
                for unit in named["next"].stages[0].sharding.units
                if decisions[0].operator not in unit.operators
            ),
        ),
    )
    step_on(wrapped, optimizer, 1)
    odd = torch.optim.AdamW([p for p in wrapped.parameters() if p.dim() == 2])
    step_on(wrapped, odd, 2)
    optimizer.zero_grad()
    odd.state[odd.param_groups[0]["params"][0]]["row"] = torch.zeros(3)
    fails(ValueError, "row of 'embed.weight' has shape", optimizer=[optimizer, odd])
    # On one rank alone: all of them say so.
    plan = named["next"] if dist.get_rank() else replace(named["next"], model="another")
    fails(ValueError, "rank 0: PlanMismatchError", plan=plan, optimizer=optimizer if dist.get_rank() else [])


def test_what_cannot_be_switched_is_refused_and_the_model_goes_on() -> None:
    run(2, refuses)


def in_another_order_on_each_rank() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    parameters = list(wrapped.parameters())
    halves = [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]
    if dist.get_rank():
        halves = [half[::-1] for half in halves[::-1]]
    optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
    for index in range(2):
        for optimizer in optimizers:
            step_on(wrapped, optimizer, index)
    before = [
        held(wrapped, optimizer) for optimizer in (optimizers if dist.get_rank() == 0 else optimizers[::-1])
    ]
    wrapped.zero_grad()
    wrapped.switch(named["mixed leaves"], optimizers)
    after = [
        held(wrapped, optimizer) for optimizer in (optimizers if dist.get_rank() == 0 else optimizers[::-1])
    ]
    for want, got in zip(before, after, strict=True):
        assert_equal(got, want, "switched")


def test_states_follow_their_parameters_whatever_the_order_of_each_rank() -> None:
    """Optimizers of ``set(model.parameters())``: parts of one layer's states were joined with another's."""
    run(2, in_another_order_on_each_rank)


def keeps_an_optimizer_on_one_rank_alone() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    first, second = (torch.optim.AdamW(wrapped.parameters(), lr=1e-2) for _ in range(2))
    for index, optimizer in enumerate((first, second)):
        step_on(wrapped, optimizer, index)
    both = [first, second]
    if dist.get_rank():
        both.remove(first)
        first.state.clear()  # as if it had been collected
        both.append(first)
    with pytest.raises(RuntimeError, match="ranks keep states of other parameters"):
        wrapped.switch(named["replicate all"], both)
    assert wrapped.plan == named["shard all"]
    first.state.clear()
    before = held(wrapped, second)
    wrapped.zero_grad()
    wrapped.switch(named["replicate all"], both)
    assert_equal(held(wrapped, second), before, "switched")


def test_states_that_one_rank_alone_keeps_are_refused() -> None:
    """Its gathers met those of another layer, and states were wrong."""
    run(2, keeps_an_optimizer_on_one_rank_alone)


def inside_a_step() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    batch = tokens(dist.get_rank(), 3, 6)

    def closure() -> torch.Tensor:
        with pytest.raises(RuntimeError, match="is in its step, which calls a closure"):
            wrapped.switch(named["mixed leaves"], optimizer)
        optimizer.zero_grad()
        loss = loss_of(wrapped(batch), batch)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    wrapped.switch(named["mixed leaves"], optimizer)
    assert len(optimizer.param_groups[0]["params"]) == len(list(wrapped.parameters()))


def test_nothing_is_switched_inside_a_step() -> None:
    """The optimizer had no parameters any more after it, and training stood still."""
    run(2, inside_a_step)


def one_steps_less_often() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    parameters = list(wrapped.parameters())
    often, seldom = (torch.optim.SGD(half, lr=0.1) for half in (parameters[:3], parameters[3:]))
    batch = tokens(dist.get_rank(), 3, 6)

    def backward(*stepping: torch.optim.Optimizer) -> None:
        loss_of(wrapped(batch), batch).backward()
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()

    backward(often, seldom)
    backward(often)
    with pytest.raises(RuntimeError, match="gradients that no optimizer has stepped by"):
        wrapped.switch(named["mixed leaves"], [often, seldom])
    backward(often, seldom)
    wrapped.switch(named["mixed leaves"], [often, seldom])
    # What was stepped under the plan before is known under the next.
    backward(often)
    with pytest.raises(RuntimeError, match="gradients that no optimizer has stepped by"):
        wrapped.switch(named["shard all"], [often, seldom])


def gathers_before_its_first_step() -> None:
    """Beside a run without switches: an optimizer that has never stepped gathers over three plans."""
    found = []
    for walk in (("shard all",), ("shard all", "mixed leaves", "in slices")):
        model = made()
        named = plans(model)
        wrapped = OSDP(model, plan=named["shard all"])
        parameters = list(wrapped.parameters())
        often, seldom = (torch.optim.SGD(half, lr=0.1) for half in (parameters[:3], parameters[3:]))
        del parameters
        for index in range(4):
            batch = tokens(10 * index + dist.get_rank(), 3, 6)
            loss_of(wrapped(batch), batch).backward()
            often.step()
            often.zero_grad()
            wrapped.switch(named[walk[index % len(walk)]], [often, seldom])
        seldom.step()
        found.append({name: whole(value).detach().clone() for name, value in wrapped.named_parameters()})
    for name, value in found[0].items():
        assert difference(found[1][name], value) < TOLERANCE, name


def test_gradients_before_the_first_step_of_an_optimizer_go_along() -> None:
    """They were dropped, and the step was one by the last of four batches."""
    run(2, gathers_before_its_first_step)


def begins_inside_of_no_sync() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = made()
    stepped = torch.optim.SGD(reference.parameters(), lr=0.1)
    for name in ("mixed leaves", "in slices", "shard all"):
        optimizer.zero_grad()
        stepped.zero_grad()
        with wrapped.no_sync():
            wrapped.switch(named[name], optimizer)
            loss_of(wrapped(tokens(dist.get_rank(), 3, 6)), tokens(dist.get_rank(), 3, 6)).backward()
            assert not any(wrapped._applied.sharded.syncs.values())
        assert all(wrapped._applied.sharded.syncs.values())
        loss_of(wrapped(tokens(5 + dist.get_rank(), 3, 6)), tokens(5 + dist.get_rank(), 3, 6)).backward()
        optimizer.step()
        for seed in (0, 1, 5, 6):
            (loss_of(reference(tokens(seed, 3, 6)), tokens(seed, 3, 6)) / 2).backward()
        stepped.step()
    for name, parameter in wrapped.named_parameters():
        assert difference(whole(parameter), reference.get_parameter(name)) < TOLERANCE, name


def test_a_switch_inside_of_no_sync_is_one_between_steps() -> None:
    """A loop that accumulates in it from the first microbatch on never refined its plan."""
    run(2, begins_inside_of_no_sync)


def holds_the_parameters_of_a_plan() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    late = torch.optim.SGD([wrapped.get_parameter("head.weight")], lr=0.1)
    listed = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    step_on(wrapped, optimizer, 0)
    wrapped.switch(named["mixed leaves"], optimizer)
    batch = tokens(dist.get_rank(), 3, 6)
    loss_of(wrapped(batch), batch).backward()
    gradients = [parameter.grad for parameter in wrapped.parameters() if parameter.requires_grad]
    for given, gradient in zip(listed, gradients, strict=True):
        assert given.grad is gradient
    for parameter in listed:
        parameter.grad = None
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    loss_of(wrapped(batch), batch).backward()
    before = whole(wrapped.get_parameter("head.weight")).detach().clone()
    late.step()
    assert late.param_groups[0]["params"][0] is wrapped.get_parameter("head.weight")
    assert not torch.equal(before, whole(wrapped.get_parameter("head.weight")))
    for use in (torch.nn.utils.parameters_to_vector, lambda given: given[0].full_tensor()):
        with pytest.raises(RuntimeError, match="no longer the model's"):
            use(listed)


def test_a_list_of_parameters_goes_on_with_the_gradients_of_their_successors() -> None:
    """Those of a sharded plan were left as they were: clipping by such a list clipped nothing any more."""
    run(2, holds_the_parameters_of_a_plan)


def has_a_teacher_put_in() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    step_on(wrapped, optimizer, 0)
    wrapped.teacher = nn.Linear(2, 2).requires_grad_(False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"2 parameters came into the model .*'teacher.bias'"):
            wrapped.switch(named["mixed leaves"], optimizer)
        step_on(wrapped, optimizer, 1)
    del wrapped.teacher
    wrapped.switch(named["recomputed"], optimizer)
    step_on(wrapped, optimizer, 2)


def test_a_module_that_was_put_into_the_model_is_seen_before_anything_is_changed() -> None:
    """A frozen teacher in it was destroyed by a switch, and the model with it."""
    run(2, has_a_teacher_put_in)


def has_a_forward_of_its_own() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["recomputed"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    calls: list[int] = []
    plain = type(model.blocks[0]).forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(model.blocks[0], *args, **kwargs)

    model.blocks[0].forward = patched
    for name in ("mixed leaves", "recomputed", "shard all"):
        wrapped.switch(named[name], optimizer)
        calls.clear()
        step_on(wrapped, optimizer, 2)
        assert calls, name


def test_a_forward_that_was_put_on_a_recomputed_block_stays() -> None:
    run(2, has_a_forward_of_its_own)


def had_a_step_that_raised() -> None:
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    step_on(wrapped, optimizer, 0)

    def raises() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(raises)
    optimizer.zero_grad()
    wrapped.switch(named["mixed leaves"], optimizer)
    step_on(wrapped, optimizer, 1)


def test_a_step_that_raised_is_none_that_runs() -> None:
    """After running out of memory in a step no other plan was taken, the use that a switch is for."""
    run(2, had_a_step_that_raised)


def test_gradients_that_one_of_two_optimizers_still_gathers_are_not_dropped() -> None:
    run(2, one_steps_less_often)


class WithPairs(torch.optim.Optimizer):
    """Keeps two moments of each parameter in a tuple, and a number under a name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.state["k"] = torch.tensor([0])  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["k"] += 1  # type: ignore[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moments"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                first, second = state["moments"]
                first.mul_(0.9).add_(parameter.grad)
                second.mul_(0.9).add_(parameter.grad.square())
                parameter.add_(first / (1 + second.sqrt()), alpha=-0.01)


def has_states_in_tuples() -> None:
    plain, model = made(), made()
    named = plans(model)
    model = OSDP(model, plan=named["shard all"])
    optimizers = [WithPairs(each.parameters()) for each in (plain, model)]
    for index, name in enumerate(("shard all", "replicate all", "mixed leaves", "shard all")):
        model.switch(named[name], optimizers[1])
        batch = tokens(index, 3, 6)  # the same on all ranks
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(batch), batch).backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert difference(whole(parameter), plain.get_parameter(name)) < TOLERANCE, name


def test_states_in_tuples_and_by_name_go_along() -> None:
    """Those in tuples kept the layout of the plan before; one under a name ended the switch, and the job."""
    run(2, has_states_in_tuples)


def unfreezes_after_a_switch() -> None:
    """Layers of two dtypes, all trainable when the model is wrapped, as the error about them advises."""

    def build() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 6).bfloat16(), Cast(), nn.Linear(6, 6))

    model = build()
    world = dist.get_world_size()
    apart = [plan_by_hand(model, mode, world) for mode in (Mode.FULL_SHARD, Mode.NO_SHARD)]
    model = OSDP(model, plan=apart[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    model.module[0].requires_grad_(False)
    step()
    model.switch(apart[1], optimizer)
    step()
    model.module[0].requires_grad_(True)
    step()
    assert model.module[0].weight.grad is not None


class Cast(nn.Module):
    """To float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def test_what_was_trainable_at_first_may_be_thawed_after_a_switch() -> None:
    """The next plan knew only what was trainable when it was applied, and refused the rest."""
    run(2, unfreezes_after_a_switch)


def averages_across_switches() -> None:
    """The loop that the refusal of AveragedModel recommends."""
    plain, model = made(), made()
    named = plans(model)
    model = OSDP(model, plan=named["replicate all"])
    average, wanted = ([p.detach().clone() for p in each.parameters()] for each in (model, plain))
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for index, name in enumerate(
        ("replicate all", "shard all", "mixed leaves", "replicate all", "in slices")
    ):
        model.switch(named[name], optimizers[1])
        batch = tokens(index, 3, 6)
        for each, optimizer, kept in zip((plain, model), optimizers, (wanted, average), strict=True):
            optimizer.zero_grad()
            loss_of(each(batch), batch).backward()
            optimizer.step()
            update(kept, [p.detach() for p in each.parameters()], None)
            with torch.no_grad():
                for one, p in zip(kept, each.parameters(), strict=True):
                    # One by one, where no sharded tensor stands beside them, and with plain tensors.
                    one.lerp_(p, 0.1)
                    p.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).to(p.dtype))
    for mine, other in zip(average, wanted, strict=True):
        assert difference(whole(mine), other) < TOLERANCE


def test_averages_go_on_across_switches() -> None:
    """Copies of parameters keep the layout of their plan, and did not compute with those of the next."""
    run(2, averages_across_switches)


def goes_on_in_bfloat16() -> None:
    """Copies to compute in, evaluation, and a checkpoint of what is stored, after a switch."""
    model = made().float()
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    first, second = (plan_by_hand(model, mode, 2, **mixed) for mode in (Mode.NO_SHARD, Mode.FULL_SHARD))
    losses = []
    for plans_in_turn in ((first, first), (second, first), (first, second)):
        wrapped = OSDP(made().float(), plan=plans_in_turn[0])
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        for index in range(3):
            step_on(wrapped, optimizer, index)
        wrapped.switch(plans_in_turn[1], optimizer)
        with torch.no_grad():
            losses.append(loss_of(wrapped(tokens(1, 3, 6)), tokens(1, 3, 6)).item())
        for index in range(3, 6):
            losses[-1] += step_on(wrapped, optimizer, index)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=2e-2)


def test_mixed_precision_goes_on() -> None:
    run(2, goes_on_in_bfloat16)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def goes_on_after_failures() -> None:
    """Out of memory in a forward, in a backward, and in the loss between them."""
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    optimizer = torch.optim.AdamW(wrapped.parameters())
    batch = tokens(dist.get_rank(), 3, 6)
    for name in ("in slices", "mixed leaves", "shard all"):
        with pytest.raises(TypeError):
            wrapped("no tokens")
        wrapped.switch(named["mixed blocks"], optimizer)
        step_on(wrapped, optimizer, 0)
        handle = model.blocks[0].register_forward_hook(lambda *given: apply_function(_Fails, given[-1]))
        loss = loss_of(wrapped(batch), batch)
        with pytest.raises(MemoryError):
            loss.backward()
        handle.remove()
        wrapped.switch(named[name], optimizer)
        assert all(parameter.grad is None for parameter in wrapped.parameters())
        step_on(wrapped, optimizer, 1)
        wrapped(batch)
        with pytest.raises(RuntimeError, match="reset_iter_state"):
            wrapped.switch(named["shard all"], optimizer)
        wrapped.reset_iter_state()
        with torch.inference_mode():
            wrapped.switch(named["shard all"], optimizer)
        step_on(wrapped, optimizer, 2)


def test_after_a_step_that_failed() -> None:
    run(2, goes_on_after_failures)


def follows_what_was_made_before() -> None:
    """An optimizer and a list for clipping from before wrapping, which no switch was told of."""
    model = made()
    named = {mode: plan_by_hand(model, mode, 2) for mode in (Mode.FULL_SHARD, Mode.NO_SHARD)}
    listed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(listed)
    wrapped = OSDP(model, plan=named[Mode.NO_SHARD])
    for mode in (Mode.FULL_SHARD, Mode.NO_SHARD, Mode.FULL_SHARD):
        wrapped.switch(named[mode])
    batch = tokens(dist.get_rank(), 3, 6)
    loss_of(wrapped(batch), batch).backward()
    assert all(parameter.grad is not None for parameter in listed)
    before = held(wrapped, optimizer)
    optimizer.step()
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    after = held(wrapped, optimizer)
    assert not [name for name in trained if torch.equal(before[name], after[name])]
    wrapped.switch(named[Mode.NO_SHARD], optimizer)
    with pytest.raises(ValueError, match="was left out"):
        wrapped.switch(named[Mode.FULL_SHARD])  # it has stepped under an earlier plan


def test_optimizers_from_before_wrapping() -> None:
    run(2, follows_what_was_made_before)


class _Prepared(torch.optim.Optimizer):
    """As Accelerate's: an optimizer around the one that steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


def leaves_nothing_though_a_loop_keeps_its_loss() -> None:
    """Neither parameters, nor hooks or process groups, however often; the loss of the last step is there."""
    model = made()
    named = plans(model)
    wrapped = OSDP(model, plan=named["shard all"])
    inner = torch.optim.AdamW(wrapped.parameters())
    optimizer = _Prepared(inner)
    batch = tokens(dist.get_rank(), 3, 6)
    trained = sum(parameter.requires_grad for parameter in wrapped.parameters())
    counts = []
    before = "shard all"
    for name in [*named, *named]:
        loss = loss_of(wrapped(batch), batch)
        loss.backward()
        inner.step()
        gone = {key: weakref.ref(parameter) for key, parameter in wrapped.named_parameters()}
        wrapped.switch(named[name], optimizer)
        left = [key for key, reference in gone.items() if reference() is not None]
        # The graph of an operator in slices leads to its weight itself.
        assert before == "in slices" or not left, f"from {before} to {name}: {left}"
        before = name
        assert len(inner.param_groups[0]["params"]) == len(gone)
        assert len(inner.state) == trained
        counts.append((len(_global_optimizer_pre_hooks), len(_world.pg_map)))
    assert counts[len(named) - 1] == counts[-1]


def test_switching_often() -> None:
    run(2, leaves_nothing_though_a_loop_keeps_its_loss)
