"""Models on ``meta``: the same values under every plan, block by block; and which modules cannot."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.plan.sharding import Mode
from osdp.runtime import apply
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


def test_half_on_meta_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"2 of 4 parameters are on meta, such as '1\.weight'"):
        is_on_meta(net)
