"""Plain state dicts, and torch's own ways to states, under every plan: as for the plain model."""

import copy
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from osdp import OSDP
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, Route
from osdp.runtime import checkpoint
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import ROOT, in_groups, plan_by_hand, split
from tests.test_parity import LAYOUTS, whole


class Counting(nn.Module):
    """With a buffer that is saved, one that is not, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.word = "start"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias

    def get_extra_state(self) -> str:
        return self.word

    def set_extra_state(self, state: str) -> None:
        self.word = state


def plain(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net(gated=False)
    net.gate = Counting()
    net.gate.calls += seed
    net.gate.word = f"seed {seed}"
    nn.init.normal_(net.gate.bias)
    return net.double()


def hybrid(plan: Plan) -> Plan:
    return in_groups(plan, Mode.HYBRID_SHARD, 2, Route.FLAT)


#: On four ranks some shards are empty, and there are groups; what else there is, two ranks show.
ON_FOUR = ("shard each", "keep all", "in groups", "in groups, mixed")


def layouts() -> Iterator[tuple[str, Any]]:
    """Plans, by name, as functions of a model."""
    found: dict[str, Any] = {}
    for name in ("replicate all", "shard all", "shard each", "keep all", "mixed leaves"):
        modes, groups = LAYOUTS[name]
        found[name] = partial(_plan, modes=modes, groups=groups)
    found["in slices"] = partial(_plan, modes=Mode.FULL_SHARD, groups={}, slices=2)
    found["in slices, some kept"] = partial(_plan, modes=Mode.FULL_SHARD, groups={}, slices=5, kept=2)
    if dist.get_world_size() == 4:
        found["in groups"] = partial(_plan, modes=Mode.FULL_SHARD, groups={}, in_groups=True)
        modes = {"": Mode.NO_SHARD, "blocks": Mode.FULL_SHARD, "blocks.1.up": Mode.SHARD_GRAD_OP}
        found["in groups, mixed"] = partial(_plan, modes=modes, groups={"embed": ROOT}, in_groups=True)
        found = {name: found[name] for name in ON_FOUR}
    yield from found.items()


#: Those in which more than weights is moved about: of each kind of unit one.
FEW = ("replicate all", "keep all", "mixed leaves", "in slices, some kept", "in groups, mixed")


def few_layouts() -> Iterator[tuple[str, Any]]:
    return ((name, make) for name, make in layouts() if name in FEW)


def _plan(
    net: nn.Module, modes: Any, groups: Any, slices: int = 1, kept: int = 0, in_groups: bool = False
) -> Plan:
    plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
    plan = split(plan, net, slices, kept)
    return hybrid(plan) if in_groups else plan


def wrapped(make: Any, seed: int, **dtypes: str) -> OSDP:
    net = plain(seed)
    plan: Plan = make(net)
    return OSDP(net, plan=replace(plan, training=replace(plan.training, **dtypes)))


def check_values(model: nn.Module, want: dict[str, Any], where: Any) -> None:
    found = model.state_dict()
    assert list(found) == list(want), where
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            got = whole(value)
            assert got.dtype == torch.float64 or not got.is_floating_point()
            assert torch.equal(got, want[name]), (where, name)
        else:
            assert value == want[name]


def errors_of(model: nn.Module, state: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    return re.sub(r"for \w*Net:", "for Net:", str(caught.value))  # the class is one of a unit


def loads_as_the_plain_model_does() -> None:
    batch = tokens(0, 2, 6)
    for name, make in layouts():
        model, other = wrapped(make, 1), plain(2)
        state = copy.deepcopy(other.state_dict())
        before = dict(model.module.named_parameters())
        result = model.load_state_dict(state)
        assert result == other.load_state_dict(state), name
        check_values(model, other.state_dict(), name)
        assert all(before[key] is p for key, p in model.module.named_parameters())  # in place
        with torch.no_grad():
            torch.testing.assert_close(model(batch), other(batch), rtol=1e-12, atol=1e-12)
        # Other dtypes are cast as copy_ casts.
        in_half = {
            key: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in plain(3).state_dict().items()
        }
        model.load_state_dict(in_half)
        other.load_state_dict(in_half)
        check_values(model, other.state_dict(), name)
        # Names and shapes are what the plain model finds, in its words.
        part = {key: value for key, value in plain(4).state_dict().items() if "norm" not in key}
        part["blocks.7.up.bias"] = torch.zeros(3)
        assert model.load_state_dict(part, strict=False) == other.load_state_dict(part, strict=False)
        check_values(model, other.state_dict(), name)
        assert errors_of(model, part) == errors_of(other, part)
        part = {**plain(5).state_dict(), "head.weight": torch.zeros(13, 6), "gate.calls": torch.zeros(2)}
        assert errors_of(model, part) == errors_of(other, part)
        check_values(model, other.state_dict(), name)
        # A part of the model.
        block = plain(6).blocks[1]
        model.blocks[1].load_state_dict(block.state_dict())
        other.blocks[1].load_state_dict(block.state_dict())
        check_values(model, other.state_dict(), name)
        # What DistributedDataParallel saved.
        saved = {f"module.{key}": value for key, value in state.items()}
        advice = r"begin with 'module\.', .*consume_prefix_in_state_dict_if_present\(state_dict, 'module\.'\)"
        with pytest.raises(RuntimeError, match=advice):
            model.load_state_dict(saved)


def from_rank_0() -> None:
    for name, make in layouts():
        model, other = wrapped(make, 1), plain(2)
        state = other.state_dict() if dist.get_rank() == 0 else None
        assert checkpoint.load_whole_state_dict(model, state) == ([], [])
        check_values(model, other.state_dict(), name)
        back = checkpoint.whole_state_dict(model)
        if dist.get_rank() == 0:
            assert all(torch.equal(back[key], value) for key, value in state.items() if "extra" not in key)
        # What fits is loaded, all of it or, if it must be, none.
        part = {key: value for key, value in plain(3).state_dict().items() if "norm" not in key}
        part["blocks.7.up.bias"] = torch.zeros(3)
        given = part if dist.get_rank() == 0 else {}
        with pytest.raises(
            RuntimeError, match=r"(?s)nothing was loaded.*Missing.*blocks\.0\.norm.*blocks\.7"
        ):
            checkpoint.load_whole_state_dict(model, given)
        check_values(model, other.state_dict(), name)
        result = checkpoint.load_whole_state_dict(model, given, strict=False)
        assert tuple(result) == tuple(other.load_state_dict(part, strict=False))
        check_values(model, other.state_dict(), name)
        given = {**plain(3).state_dict(), "head.weight": torch.zeros(13, 6)} if dist.get_rank() == 0 else {}
        with pytest.raises(
            RuntimeError, match=r"size mismatch for head\.weight: .*\(\[13, 6\]\).*\(\[13, 5\]\)"
        ):
            checkpoint.load_whole_state_dict(model, given)
    sharded = model.state_dict()
    with pytest.raises(TypeError, match=r"are DTensors, of which other ranks have parts: load them on all"):
        checkpoint.load_whole_state_dict(model, sharded)
    single = plain(1)
    checkpoint.load_whole_state_dict(single, plain(7).state_dict())
    check_values(single, plain(7).state_dict(), "plain")


def torchs_own_ways() -> None:
    rank = dist.get_rank()
    for name, make in few_layouts():
        want = plain(2).state_dict()
        for full, offload in itertools.product((False, True), repeat=2):
            model = wrapped(make, 2)
            state = get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=full, cpu_offload=offload)
            )
            if full and offload and rank:
                assert state == {}
                continue
            assert list(state) == list(want)
            assert all(torch.equal(whole(value), want[key]) for key, value in tensors(state)), (name, full)
        frozen = get_model_state_dict(wrapped(make, 2), options=StateDictOptions(ignore_frozen_params=True))
        assert list(frozen) == [key for key in want if not key.startswith("frozen")]
        for options in (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
            StateDictOptions(),
        ):
            model = wrapped(make, 1)
            given = plain(2).state_dict() if rank == 0 or not options.broadcast_from_rank0 else {}
            set_model_state_dict(model, given, options=options)
            check_values(model, want, (name, options))


def tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))


def round_trips() -> None:
    made = list(layouts())
    for (name, make), (_, other) in zip(made, made[1:] + made[:1], strict=True):
        model = wrapped(make, 2)
        want = plain(2).state_dict()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        for into in (wrapped(make, 1), wrapped(other, 1)):
            into.load_state_dict(model.state_dict())
            check_values(into, want, name)
        file.seek(0)
        into = wrapped(make, 1)
        into.load_state_dict(torch.load(file, weights_only=True))
        check_values(into, want, name)


def saved_by_rank_0() -> None:
    """Its part was taken for that of each rank."""
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        net = plain(0)
        model = OSDP(net, plan=plan_by_hand(net, mode, dist.get_world_size()))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        files = [file.getvalue()]
        dist.broadcast_object_list(files)
        state = torch.load(io.BytesIO(files[0]), weights_only=False)
        if dist.get_rank() == 0 or mode is Mode.NO_SHARD:
            model.load_state_dict(state)
        else:
            with pytest.raises(RuntimeError, match="holds the part of the rank at"):
                model.load_state_dict(state)


def between_forward_and_backward() -> None:
    batch = tokens(1, 2, 6)
    for name, make in few_layouts():
        for dtypes in ({}, {"param_dtype": "bfloat16"}):
            model, other = wrapped(make, 2, **dtypes), wrapped(make, 2, **dtypes)
            losses = [loss_of(net(batch), batch) for net in (model, other)]
            check_values(model, plain(2).state_dict(), name)
            for loss in losses:
                loss.backward()
            for (key, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
                if left.requires_grad:
                    assert left.grad is not None and right.grad is not None, (name, key)
                    assert torch.equal(whole(left.grad), whole(right.grad)), (name, key)


# -- optimizers ---------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = tokens(step, 2, 6)
        optimizer.zero_grad()
        loss_of(model(batch), batch).backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.01}], lr=0.05
    )


def check_training(model: nn.Module, reference: nn.Module, where: Any) -> None:
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            whole(got.detach()), want.detach(), rtol=1e-9, atol=1e-9, msg=f"{where}: {name}"
        )


def optimizers() -> None:
    reference = plain(2)
    theirs = optimizer_of(reference)
    train(reference, theirs, range(2))
    plain_model = copy.deepcopy(reference.state_dict())
    unsharded = copy.deepcopy(get_optimizer_state_dict(reference, theirs))
    train(reference, theirs, range(2, 3))
    full = StateDictOptions(full_state_dict=True)
    for name, make in few_layouts():
        model = wrapped(make, 2)
        optimizer = optimizer_of(model)
        train(model, optimizer, range(2))
        # As torch has it: the plain model's.
        state = get_optimizer_state_dict(model, optimizer, options=full)
        for key, values in unsharded["state"].items():
            for kind, value in values.items():
                torch.testing.assert_close(state["state"][key][kind], value, rtol=1e-9, atol=1e-9)
        own = copy.deepcopy(optimizer.state_dict())
        sharded = copy.deepcopy(get_state_dict(model, optimizer))
        train(model, optimizer, range(2, 3))
        check_training(model, reference, name)
        # The same plan, by the optimizer's own state dict.
        again = wrapped(make, 1)
        again.load_state_dict(plain_model)
        optimizer = optimizer_of(again)
        optimizer.load_state_dict(own)
        train(again, optimizer, range(2, 3))
        check_training(again, reference, (name, "own"))
        # States of the unsharded run, on all ranks and on rank 0 alone.
        for options in (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
            again = wrapped(make, 1)
            optimizer = optimizer_of(again)
            given: Any = (plain_model, unsharded)
            if options.broadcast_from_rank0 and dist.get_rank():
                given = ({}, {})
            set_model_state_dict(again, copy.deepcopy(given[0]), options=options)
            set_optimizer_state_dict(again, optimizer, copy.deepcopy(given[1]), options=options)
            train(again, optimizer, range(2, 3))
            check_training(again, reference, (name, options))
        # Sharded as they are.
        again = wrapped(make, 1)
        optimizer = optimizer_of(again)
        set_state_dict(again, optimizer, model_state_dict=sharded[0], optim_state_dict=sharded[1])
        train(again, optimizer, range(2, 3))
        check_training(again, reference, (name, "sharded"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plain_state_dict_loads_as_into_the_plain_model(ranks: int) -> None:
    run(ranks, loads_as_the_plain_model_does, timeout=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_dict_of_rank_0_alone(ranks: int) -> None:
    run(ranks, from_rank_0, timeout=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_functions_of_model_states(ranks: int) -> None:
    run(ranks, torchs_own_ways, timeout=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_file_with_the_shards_of_rank_0_is_refused_by_the_others(ranks: int) -> None:
    run(ranks, saved_by_rank_0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_dicts_survive_files_and_other_plans(ranks: int) -> None:
    run(ranks, round_trips, timeout=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_dicts_between_forward_and_backward_have_what_is_stored(ranks: int) -> None:
    run(ranks, between_forward_and_backward, timeout=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_of_optimizers_move_between_torchs_functions_and_plans(ranks: int) -> None:
    run(ranks, optimizers, timeout=300)
