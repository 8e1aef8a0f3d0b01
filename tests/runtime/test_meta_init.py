"""Models on ``meta``: the same values under every plan, block by block; and which modules cannot."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.runtime.computation import Computation
from osdp.runtime.meta_init import blocks, check_initialisers, is_on_meta
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import ROOT, plan_by_hand, split
from tests.test_parity import LAYOUTS, difference, whole


def on_meta(**options: bool) -> Net:
    with torch.device("meta"):
        return Net(**options)


def initial(layout: str, *, tied: bool, slices: int = 1) -> dict[str, torch.Tensor]:
    # Ranks differ in their seeds; rank 0's counts.
    torch.manual_seed(40 + dist.get_rank())
    net = on_meta(gated=False, tied=tied)
    modes, groups = LAYOUTS[layout]
    apply(net, split(plan_by_hand(net, modes, dist.get_world_size(), groups=groups), net, slices))
    assert len(list(net.parameters())) == (15 if tied else 16), "ties must hold"
    batch = tokens(dist.get_rank(), 2, 6)
    before = {name: whole(p.detach()).clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of(net(batch), batch).backward()
    optimizer.step()
    after = {name: whole(p.detach()) for name, p in net.named_parameters()}
    assert any(difference(after[name], before[name]) > 0 for name in before)
    return before


def same_under_every_plan() -> list[torch.Tensor]:
    found = []
    for tied in (True, False):
        values = {layout: initial(layout, tied=tied) for layout in LAYOUTS}
        values |= {"in slices": initial("shard apart", tied=tied, slices=3)}
        first = values["replicate all"]
        for layout, got in values.items():
            assert got.keys() == first.keys()
            for name in first:
                assert torch.equal(got[name], first[name]), (layout, name)
        assert first["blocks.0.up.weight"].std() > 0
        assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
        assert torch.equal(first["blocks.0.norm.weight"], torch.ones(5))
        found += list(first.values())
    return found


def gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    values = []
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        torch.manual_seed(40)
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        groups = {"": ROOT} | {f"transformer.h.{i}": f"transformer.h.{i}" for i in range(2)}
        applied = apply(model, plan_by_hand(model, mode, dist.get_world_size(), groups=groups))
        values.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})
        batch = torch.arange(12).view(2, 6)
        model(batch, labels=batch).loss.backward()
        assert applied.clip_grad_norm_(1.0) > 0
    for name, want in values[0].items():
        assert torch.equal(values[1][name], want), name
    # What a parent initialises in its child: residual projections are scaled down by sqrt(2 * layers).
    projection = values[0]["transformer.h.0.attn.c_proj.weight"]
    assert projection.std() == pytest.approx(0.02 / 2, rel=0.1)


def peak_stays_small() -> None:
    """A stack of Linear whose whole size is 32 times a block's: live bytes while it is applied."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with torch.device("meta"):
        net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(32)])
    block = 256 * 256 * 4
    plan = plan_by_hand(net, Mode.FULL_SHARD, dist.get_world_size())
    tracker = MemTracker()
    with tracker:
        apply(net, plan)
    peak = max(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    shards = 32 * block // dist.get_world_size()
    assert shards <= peak <= shards + 2 * block, (peak, shards, block)
    assert all(isinstance(p, DTensor) and not p.is_meta for p in net.parameters())


def test_meta_models_start_the_same_under_every_plan() -> None:
    results = run(2, same_under_every_plan, timeout=100)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gpt2_on_meta() -> None:
    run(2, gpt2, timeout=100)


def test_no_rank_holds_more_than_its_shards_and_a_block() -> None:
    run(2, peak_stays_small, fresh=True)


def test_blocks_cover_every_module_once_and_children_first() -> None:
    net = Net()
    order = [module for group in blocks(net) for module in group]
    assert {id(m) for m in order} >= {id(m) for m in net.modules() if m._parameters}
    assert len({id(m) for m in order}) == len(order)
    assert order.index(net.blocks[0].up) < order.index(net.blocks[0])


def test_modules_that_cannot_initialise_themselves_are_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(ValueError, match=r"1 \(Bare\).*reset_parameters"):
        check_initialisers(net)


class Scaled(nn.Sequential):
    """A container with a parameter of its own."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


class Timm(nn.Module):
    """Its ``_init_weights`` is for some modules only, as in nanoGPT and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("causal", torch.ones(3, dtype=torch.bool))
        self.scaled = Scaled(nn.Identity())

    def reset_parameters(self) -> None:
        self.mask.fill_(2.0)
        self.causal.fill_(False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.scaled(self.linear(inputs))) + self.mask.sum()


class Tokens(nn.Module):
    """Holds what nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Timm()
        self.cls_token = nn.Parameter(torch.ones(4))

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs + self.cls_token)


def empty(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def by_the_modules_around() -> None:
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        model = empty(Timm)
        apply(model, plan_by_hand(model, mode, 2))
        assert torch.equal(whole(model.linear.weight), torch.full((4, 4), 0.5)), mode
        assert torch.equal(whole(model.norm.weight), torch.ones(4)), mode
        assert torch.equal(whole(model.scaled.scale), torch.full((4,), 3.0)), mode
        assert model.mask.tolist() == [2.0] * 3 and model.norm.running_var.tolist() == [1.0] * 4, mode
        for fail, said in ((None, "neither .* initialise cls_token"), (lambda module: None, "function left")):
            model = empty(Tokens)
            with pytest.raises(ValueError, match=said.replace("function", "param_init_fn")):
                plan = plan_by_hand(model, mode, 2)
                apply(model, plan, computation=Computation(param_init_fn=fail))


def by_functions_for_fsdp() -> None:
    """They may give modules storage, which those that are sharded no longer took."""

    def materialised(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD):
        model = empty(Timm)
        apply(model, plan_by_hand(model, mode, 2), computation=Computation(param_init_fn=materialised))
        assert torch.equal(whole(model.norm.weight), torch.ones(4)), mode
        assert model.mask.tolist() == [2.0] * 3, mode


def from_the_first_rank() -> None:
    """As under ``sync_module_states``: the other ranks have nothing, and used to wait for ever."""
    torch.manual_seed(0)
    source = Net(gated=False)
    for mode in (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.FULL_SHARD):
        torch.manual_seed(0)
        net = Net(gated=False) if dist.get_rank() == 0 else on_meta(gated=False)
        apply(net, plan_by_hand(net, mode, 2))
        for name, parameter in net.named_parameters():
            assert torch.equal(whole(parameter), source.get_parameter(name)), (mode, name)
    net = on_meta(gated=False) if dist.get_rank() == 0 else Net(gated=False)
    with pytest.raises(ValueError, match="rank 0 is on meta, and those of ranks 1 have values"):
        apply(net, plan_by_hand(net, Mode.FULL_SHARD, 2))


def test_modules_are_initialised_by_themselves_and_by_the_model_around_them() -> None:
    """What ``_init_weights`` of the root left alone stayed zero, norms among it, and buffers anything."""
    run(2, by_the_modules_around)


def test_functions_written_for_fsdp_initialise() -> None:
    run(2, by_functions_for_fsdp)


def test_other_ranks_may_have_no_values() -> None:
    run(2, from_the_first_rank)


def test_half_on_meta_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"2 of 4 parameters are on meta, such as '1\.weight'"):
        is_on_meta(net)
