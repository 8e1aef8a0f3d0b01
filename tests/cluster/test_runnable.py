"""Layouts of the planner become plans that run: unequal stages of unequal nodes train as a single process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from osdp import OSDP
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.known_transformers import SHAPES
from osdp.cluster.plan import ParallelLayout, StageSlot, Workload
from osdp.cluster.runnable import _Described, device_of_stage, runnable_plan, step_bounds, traced_layers
from osdp.cluster.search.layouts import arrange
from osdp.cluster.search.space import cells_of
from osdp.cluster.transformer import Item
from osdp.integrations.huggingface import masked_lm_loss, token_batch
from osdp.integrations.huggingface.shaped_models import blocks_of_shape, model_of_shape, tensor_plan_of_shape
from osdp.model.description import ModelDesc
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.tracing.dataflow import trace_flow
from osdp.tracing.sample_batch import SampleBatch
from tests.helpers import distributed
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, shape
from tests.helpers.stage_nets import TiedNet, batch, loss_fn, targets
from tests.helpers.transformer_models import build

UNEQUAL = cluster((node_type(FAST, 2), 1), (node_type(SLOW, 2), 1))
#: Blocks of the net below, with numbers that make them large enough to be cut unevenly.
WORK = Workload(shape=shape(4, hidden=4096, sequence=2048), global_batch=8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return TiedNet()


def plan_of(degrees: ParallelDims, zero: int | None = 0, **changes: object) -> Plan:
    layout = replace(ParallelLayout(degrees, 2, 4 // degrees.dp, zero=zero), **changes)  # type: ignore[arg-type]
    prices = ClusterPrices(UNEQUAL, WORK)
    cells = cells_of(UNEQUAL, UNEQUAL.counts, degrees.tp * degrees.dp)
    assert cells is not None
    found = arrange(prices, layout, cells)
    assert found is not None
    return runnable_plan(found, UNEQUAL, WORK, net(), batch(2), kind="cpu")


def train_under(plans: list[Plan]) -> None:
    plain = net()
    total, count = loss_fn(plain(**batch(8)), targets(8))
    expected = total.item() / count.item()
    for plan in plans:
        loss = OSDP(net(), plan=plan).train_step(batch(8), targets(8), loss_fn)
        assert loss.item() == pytest.approx(expected, rel=1e-5), plan


def test_unequal_stages_train_as_a_single_process() -> None:
    layouts = (
        (ParallelDims(2, 2, 1), 0),
        (ParallelDims(2, 2, 1), 3),
        (ParallelDims(2, 1, 2), 0),
        (ParallelDims(1, 4, 1), 3),
    )
    plans = [plan_of(degrees, zero) for degrees, zero in layouts]
    # What is decided item by item is decided operator by operator when it is traced.
    plans += [
        plan_of(degrees, None, recompute=None) for degrees in (ParallelDims(2, 2, 1), ParallelDims(1, 4, 1))
    ]
    for plan in plans[:3]:
        held = [[m for m in stage.modules if m.count(".") == 1] for stage in plan.stages]
        # The slow node has fewer layers than the fast one.
        assert len(held[0]) + len(held[1]) == 4 and len(held[0]) != len(held[1])
    distributed.run(4, train_under, plans, timeout=120)


def train_languages(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        inputs, labels = language_batch(name, 4)
        total, count = masked_lm_loss(build(name)(**inputs), labels)
        loss = OSDP(build(name), plan=plan).train_step(inputs, labels, masked_lm_loss)
        assert loss.item() == pytest.approx((total / count).item(), rel=1e-5), name


def language_batch(name: str, samples: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(3, 200, (samples, 16), generator=generator) for _ in range(2))
    return {"input_ids": tokens} | ({"decoder_input_ids": labels} if name == "t5" else {}), labels


def test_encoders_and_encoder_decoders_run_in_stages() -> None:
    plans = {}
    for name, decoder_layers in (("bert", 0), ("t5", 2)):
        load = Workload(shape=shape(2, decoder_layers=decoder_layers), global_batch=4)
        prices = ClusterPrices(UNEQUAL, load)
        cells = cells_of(UNEQUAL, UNEQUAL.counts, 2)
        assert cells is not None
        found = arrange(prices, ParallelLayout(ParallelDims(2, 2, 1), 1, 2), cells)
        assert found is not None
        plans[name] = runnable_plan(found, UNEQUAL, load, build(name), language_batch(name, 1)[0], kind="cpu")
    distributed.run(4, train_languages, plans, timeout=120)


def test_zero_decides_which_ways_there_are() -> None:
    ways = {}
    for zero in range(4):
        plan = plan_of(ParallelDims(1, 4, 1), zero)
        ways[zero] = {decision.mode for decision in plan.decisions if decision.mode is not Mode.NO_SHARD}
    assert ways == {
        0: set(),
        1: {Mode.SHARD_OPTIMIZER},
        2: {Mode.SHARD_GRAD_OP},
        # What the root's unit holds stays gathered.
        3: {Mode.FULL_SHARD, Mode.SHARD_GRAD_OP},
    }
    shared = plan_of(ParallelDims(1, 2, 2), 1)
    assert {decision.mode for decision in shared.decisions} <= {Mode.NO_SHARD, Mode.SHARD_GRAD_OP}
    assert any("ZeRO 1 becomes SHARD_GRAD_OP" in note for note in shared.notes)


def test_devices_with_slower_memory_are_slower() -> None:
    fast, narrow = (replace(FAST, name=f"{part:g}", memory_bandwidth=part * 1500e9) for part in (1.0, 0.25))
    devices = cluster((node_type(fast, 2), 1), (node_type(narrow, 2), 1))
    slots = (StageSlot((1, 0)), StageSlot((0, 1)))
    layout = ParallelLayout(ParallelDims(2, 2, 1), 2, 2)
    plans = [price(ClusterPrices(devices, WORK), layout, (0, 3, 6), order) for order in (slots, slots[::-1])]
    one, other = (device_of_stage(plan, devices, WORK, "cuda") for plan in plans)
    # Matrix products take as long, everything else four times as long.
    assert one.slowdowns[0] == 1.0 and 1.0 < one.slowdowns[1] < 4.0
    assert other.slowdowns[1] == pytest.approx(1 / one.slowdowns[1])
    assert one.memory_bandwidth == pytest.approx(4 * other.memory_bandwidth) and one.flops == other.flops
    assert one.copy_bandwidth == other.copy_bandwidth


def test_another_number_of_layers_is_refused() -> None:
    model = net()
    flow, desc = trace_flow(model, SampleBatch.of(batch(2))), ModelDesc.from_module(model, batch(2))
    bounds = step_bounds(flow, desc, [1, 3])
    assert [flow.steps[at].module for at in bounds[1:-1]] == ["blocks.1"]
    assert bounds[-1] == len(flow.steps)
    with pytest.raises(ValueError, match="the layout has 5 layers and TiedNet has 4 blocks"):
        step_bounds(flow, desc, [2, 3])


def test_a_layout_is_priced_as_it_is_cut() -> None:
    prices = ClusterPrices(UNEQUAL, WORK)
    cells = cells_of(UNEQUAL, UNEQUAL.counts, 2)
    assert cells is not None
    layout = ParallelLayout(ParallelDims(2, 2, 1), 2, 2)
    found = arrange(prices, layout, cells)
    assert found is not None
    even = [price(prices, layout, (0, 3, 6), slots) for slots in (found.slots, found.slots[::-1])]
    assert all(found.step_seconds < plan.step_seconds for plan in even)


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "llama2-7b"])
def test_the_plan_takes_the_memory_that_its_layout_was_priced_with(name: str) -> None:
    numbers = replace(SHAPES[name], layers=4, sequence=512)
    load = Workload(shape=numbers, global_batch=32)
    model, devices = model_of_shape(numbers), cluster((node_type(FAST, 4), 2))
    traced = traced_layers(model, token_batch(1, 512), load)
    assert {each.case.item for each in traced} == {Item.EMBEDDING, Item.LAYER, Item.HEAD}
    prices = ClusterPrices(devices, load, traced=traced)
    for degrees, zero in ((ParallelDims(1, 8, 1), 0), (ParallelDims(1, 8, 1), 2), (ParallelDims(2, 4, 1), 0)):
        layout = ParallelLayout(degrees, 2, 16 // degrees.dp, zero=zero)
        cells = cells_of(devices, devices.counts, degrees.dp)
        assert cells is not None
        found = arrange(prices, layout, cells)
        assert found is not None
        plan = runnable_plan(found, devices, load, model, token_batch(2, 512))
        share = (found.peak.total - found.peak.reserve) / plan.predicted.peak_bytes
        # Where layers are sharded the plan may gather several at once, since there is room.
        assert 0.95 < share < 1.05 if zero == 0 else 0.75 < share < 1.1


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "bert-large"])
def test_a_plan_made_of_few_blocks_is_that_of_the_whole_trace(name: str) -> None:
    numbers = replace(SHAPES[name], layers=7, sequence=64)
    load = Workload(shape=numbers, global_batch=16, sequence_parallel=True)
    model, few = model_of_shape(numbers), blocks_of_shape(numbers, 4)
    devices = cluster((node_type(FAST, 4), 2))
    prices = ClusterPrices(devices, load, traced=traced_layers(model, token_batch(1, 64), load))
    assert prices.traced == traced_layers(model, token_batch(1, 64), load, few_blocks=few)
    tensor = tensor_plan_of_shape(model, numbers, 2, sequence_parallel=True)
    for degrees in (ParallelDims(1, 8, 1), ParallelDims(4, 2, 1), ParallelDims(2, 2, 2)):
        layout = ParallelLayout(degrees, 2, 8 // degrees.dp)
        cells = cells_of(devices, devices.counts, degrees.tp * degrees.dp)
        assert cells is not None
        found = arrange(prices, layout, cells)
        assert found is not None
        basis = found, devices, load, model, token_batch(2, 64)
        assert runnable_plan(*basis, tensor_plan=tensor, few_blocks=few) == runnable_plan(*basis)
    with pytest.raises(ValueError, match="with 7 blocks has other parameters or buffers than the model"):
        runnable_plan(*basis, few_blocks=blocks_of_shape(replace(numbers, vocabulary=999), 4))
    with pytest.raises(ValueError, match="with 7 blocks has other parameters or buffers than the model"):
        runnable_plan(*basis, few_blocks=few.half())
    with pytest.raises(ValueError, match="tensor_plan is for 4 ranks, and the layout has tp=2"):
        runnable_plan(*basis, tensor_plan=replace(tensor, degree=4))


def test_a_rank_computes_and_exchanges_in_the_dtype_of_compute() -> None:
    numbers = replace(SHAPES["gpt2"], layers=2, sequence=64)
    model, sample = model_of_shape(numbers), token_batch(1, 64)
    plan = tensor_plan_of_shape(model, numbers, 2, sequence_parallel=False)
    wide, narrow = (
        _Described.of(model, sample, None, 2, dtype).rank(plan, sequence_parallel=False)
        for dtype in (None, "bfloat16")
    )
    assert [op.parameters for op in narrow.desc.operators] == [op.parameters for op in wide.desc.operators]
    # It sent twice as much as it does when both descriptions were of float32.
    summed = [
        sum(each.nbytes for entry in rank.exchanges for each in entry.exchanges) for rank in (wide, narrow)
    ]
    assert summed[1] < 0.6 * summed[0]
    assert narrow.desc.computed_in == "bfloat16"
    # So do stages, whose messages are values of the dataflow.
    sent = [_Described.of(model, sample, None, 2, dtype).flow for dtype in (None, "bfloat16")]
    middle = [
        max(value.nbytes(1) for value in flow.values if value.dtype == dtype)
        for flow, dtype in zip(sent, ("float32", "bfloat16"), strict=True)
    ]
    assert middle[1] * 2 == middle[0]


def test_other_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="small has 3 layers and TiedNet 4 blocks"):
        traced_layers(net(), batch(2), Workload(shape=shape(3), global_batch=2))


def test_any_plan_is_loaded_by_plan(tmp_path: Path) -> None:
    stages, alone = plan_of(ParallelDims(2, 2, 1)), plan_of(ParallelDims(1, 4, 1))
    stages.save(tmp_path / "stages.json")
    alone.save(tmp_path / "alone.json")
    assert Plan.load(tmp_path / "stages.json") == stages
    assert Plan.load(tmp_path / "alone.json") == alone
