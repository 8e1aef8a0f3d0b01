"""T5: a search leaves embeddings that a module registers which never runs to the root, or replicates them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp import Link, ModelDesc, Plan, Training, make_plan
from osdp.plan.sharding import Mode
from osdp.profiler.roofline import estimate
from osdp.runtime import apply
from tests.habits.running.plans import device_of
from tests.helpers.distributed import run

RANKS, WORDS = 4, 37


def build() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        num_layers=2, d_model=24, d_kv=12, d_ff=40, num_heads=2, vocab_size=WORDS, dropout_rate=0.0,
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config).double()
    return model


def batch(ranks: range) -> dict[str, torch.Tensor]:
    made = [torch.Generator().manual_seed(rank) for rank in ranks]
    tokens = torch.cat([torch.randint(0, WORDS, (2, 6), generator=generator) for generator in made])
    return {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens.roll(-1, 1)}


def searched() -> Iterator[Plan]:
    """Different plans, by ever less memory and of every kind that a search can be asked for."""
    desc = ModelDesc.from_module(build(), batch(range(1)))
    training = Training(local_batch=desc.local_batch, optimizer="SGD", momentum=True)
    device = device_of(RANKS)
    inside = tuple(
        Link(link.collective, part, 4 if part == "two_step 2" else 2, link.latency / 10, link.bandwidth * 10)
        for link in device.links
        for part in ("inside 2", "across 2", "two_step 2")
    )
    device = replace(device, links=(*device.links, *inside))
    profile = estimate(desc, device, training)

    def made(limit: int, **options: Any) -> Plan:
        limited = replace(device, memory_limit=limit)
        return make_plan(None, desc, limited, training=training, profile=profile, **options)

    whole, least, hybrid = (
        made(device.memory_limit, strategy=mode, recompute=False, slices=())
        for mode in ("NO_SHARD", "FULL_SHARD", "HYBRID_SHARD")
    )
    yield from (whole, least, hybrid)
    low, high = least.predicted.peak_bytes, whole.predicted.peak_bytes
    for part in (-1, 1, 3, 5, 7, 9):
        yield made(low + (high - low) * part // 10, offload=False)


def gradients(model: nn.Module, ranks: range) -> dict[str, torch.Tensor]:
    model(**batch(ranks)).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def trained(plans: list[Plan]) -> list[str]:
    rank = dist.get_rank()
    wanted, faults = gradients(build(), range(RANKS)), []
    for index, plan in enumerate(plans):
        model = build()
        apply(model, plan)
        got = gradients(model, range(rank, rank + 1))
        assert got.keys() == wanted.keys()
        off = max(float((got[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
        # Some of its layers compute in float32 whatever the model is in.
        if not off <= 2e-5:
            faults.append(f"plan {index} ({sorted(map(str, set(plan.modes.values())))}): off by {off:.2g}")
    return faults


def test_searched_plans_apply_and_train() -> None:
    plans = list(dict.fromkeys(searched()))
    places = {
        (unit.mode, unit.root)
        for plan in plans
        for unit in plan.units
        if "encoder.embed_tokens" in unit.operators
    }
    assert places == {(Mode.NO_SHARD, False), (Mode.SHARD_GRAD_OP, True), (Mode.HYBRID_SHARD, True)}
    assert run(RANKS, trained, plans, timeout=100) == [[]] * RANKS
