"""Bytes that frameworks keep are those of their own documents."""

import json
from dataclasses import replace

import numpy as np
import pytest

from osdp.cluster.cost.even_step import slots_in_order, usual_bounds
from osdp.cluster.cost.layer_time import layer_seconds
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.export.frameworks import exports
from osdp.cluster.file import node_of
from osdp.cluster.hardware import Cluster, NodeGroup
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.targets import Target, as_trained_by
from osdp.cluster.transformer import Item
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type, workload


@pytest.mark.parametrize(
    ("target", "whole", "sharded"),
    [
        (Target.MEGATRON_BF16, 6, 12),
        (Target.MEGATRON_FP16, 4, 16),
        (Target.DEEPSPEED_FP16, 4, 12),
        # BF16_Optimizer holds gradients of both formats.
        (Target.DEEPSPEED_BF16, 8, 12),
        (Target.FSDP, 6, 10),
    ],
)
def test_a_parameter_takes_what_its_framework_keeps(target: Target, whole: int, sharded: int) -> None:
    plain = workload()
    kept = as_trained_by(plain, target)
    assert (kept.weight_bytes + kept.gradient_bytes, kept.state_bytes) == (whole, sharded)
    assert isinstance(kept, Workload) and kept.shape == plain.shape


@pytest.mark.parametrize("zero", [1, 3])
def test_deepspeed_has_buckets_and_gathers_no_more_than_there_is(zero: int) -> None:
    """A small model was charged the two gigabytes that DeepSpeed gathers at most."""
    layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 2, zero=zero)
    plain = replace(as_trained_by(workload(), Target.DEEPSPEED_FP16), bucket_bytes=0, gathered_bytes=0)

    def working(load: Workload) -> float:
        prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
        items = prices.item_prices(layout, StageSlot((1,), 4))
        return max(prices.working_bytes(layout, item) for item in items.values())

    more = working(as_trained_by(workload(), Target.DEEPSPEED_FP16)) - working(plain)
    shape = workload().shape
    weights = 2 * sum(shape.parameters(item) for item in shape.items)
    assert 10**9 <= more <= 10**9 + (weights if zero == 3 else 0)


@pytest.mark.parametrize("zero", [2, 3])
def test_torchs_pipelines_keep_sharded_gradients_whole_for_a_step(zero: int) -> None:
    layout = ParallelLayout(ParallelDims(2, 2, 1), 1, 4, zero=zero)
    load = as_trained_by(workload(), Target.FSDP)
    assert not load.reduces_in_stages
    found = []
    for each in (load, replace(load, reduces_in_stages=True)):
        prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), each)
        numbers = np.array([1e6])
        found.append(prices.parameter_bytes(layout.strategy, layout, numbers, numbers))
    whole, sharded = found
    assert float(whole[1][0]) == 2 * float(sharded[1][0]) == 4e6
    assert float(whole[2][0]) == float(sharded[2][0]) == 10e6 / 2
    assert float(whole[0][0]) == 2e6


def seconds(load: Workload, layout: ParallelLayout) -> float:
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
    bounds = usual_bounds(load.shape.layers, layout.degrees.pp)
    slots = slots_in_order(prices.cluster, layout)
    return price(prices, layout, bounds, slots).step_seconds


def test_deepspeed_overlaps_by_itself_with_sharded_weights_alone() -> None:
    """ZeRO 3 was charged every gather in full, and lost searches that it should win."""
    load = as_trained_by(workload(), Target.DEEPSPEED_BF16)
    for zero in (1, 2, 3):
        layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 2, zero=zero)
        exposed = seconds(replace(load, sharded_overlap=None), layout)
        assert seconds(load, layout) < exposed if zero == 3 else seconds(load, layout) == exposed
        plan = price(ClusterPrices(cluster((node_type(FAST, 4), 1)), load), layout, (0, 6), [StageSlot((1,))])
        written = json.loads(exports(plan, load)[1].text)["zero_optimization"]
        assert written == {"stage": zero} | ({"overlap_comm": True} if zero == 3 else {})


def test_deepspeed_reduces_gradients_whole() -> None:
    """ZeRO 1 and 2 were priced with reduce-scatters, half of what its all-reduces send."""
    load = replace(as_trained_by(workload(), Target.DEEPSPEED_FP16), reduce_bytes=2, overlap=0.0)
    scattered = replace(load, whole_reductions=False)
    numbers, none = np.array([1e9]), 0.0
    for zero, units in ((0, 2), (1, 3), (2, 1)):
        layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 2, zero=zero)
        prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
        hardware = prices.hardware(layout, StageSlot((1,)))
        scatter = hardware.data.scatter_seconds(2e9)
        found = prices.gradient_seconds(layout, hardware, numbers, numbers, none)
        assert float(found[0]) == pytest.approx(units * scatter, rel=1e-3)
    twice = replace(layout, zero=2)
    reduced = [
        price(ClusterPrices(cluster((node_type(FAST, 4), 1)), each), twice, (0, 6), [StageSlot((1,))])
        for each in (load, scattered)
    ]
    assert reduced[0].seconds.shards == pytest.approx(2 * reduced[1].seconds.shards)
    assert not as_trained_by(workload(), Target.MEGATRON_BF16).whole_reductions


def test_megatron_passes_over_all_gradients_in_each_step() -> None:
    """Clearing, checking and scaling are of whole gradients, however many ranks share the states."""
    load = as_trained_by(workload(), Target.MEGATRON_BF16)
    layout = ParallelLayout(ParallelDims(1, 64, 1), 1, 2, zero=1)
    prices = ClusterPrices(cluster((node_type(FAST, 4), 16)), load)
    hardware = prices.hardware(layout, StageSlot((16,)))
    numbers = np.array([1e9])
    seconds = float(prices.update_seconds(layout, hardware, numbers, numbers)[0])
    assert seconds >= 16e9 / (FAST.memory_bandwidth * prices.rates.memory_share)


def test_megatrons_sharded_gradients_and_weights_are_its_fsdp() -> None:
    """They were written as its distributed optimizer, which keeps both whole, and ran out of memory."""
    load = as_trained_by(workload(), Target.MEGATRON_BF16)
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
    for zero, sharded in ((1, None), (2, "optim_grads"), (3, "optim_grads_params")):
        layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 2, zero=zero)
        found = exports(price(prices, layout, (0, 6), [StageSlot((1,))]), load)[0]
        assert ("--use-megatron-fsdp" in found.text) is (zero > 1)
        assert sharded is None or f"--data-parallel-sharding-strategy {sharded} " in found.text
        assert any("refuses CUDA_DEVICE_MAX_CONNECTIONS" in note for note in found.notes) is (zero > 1)


def test_scores_that_older_gpus_store_are_told_of() -> None:
    load = replace(workload(), flash=True)
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
    plan = price(prices, ParallelLayout(ParallelDims(1, 4, 1), 1, 2), (0, 6), [StageSlot((1,))])
    told = [
        any("before Ampere" in n for n in exports(plan, load, h)[0].notes) for h in ("float16", "bfloat16")
    ]
    assert told == [True, False]


def test_torch_gathers_weights_for_each_microbatch() -> None:
    """FSDP shards them again after each backward, also those that stay gathered until then."""
    load = replace(as_trained_by(workload(), Target.FSDP), overlap=0.0)
    once = replace(load, gathers_each_microbatch=False)
    more = [
        seconds(load, layout) - seconds(once, layout)
        for number in (1, 2, 5)
        for layout in [ParallelLayout(ParallelDims(1, 4, 1), 1, number, zero=2)]
    ]
    # Layer by layer instead of all at once the first one costs latencies alone.
    assert 0 <= more[0] < (more[1] - more[0]) / 2
    assert more[2] - more[1] == pytest.approx(3 * (more[1] - more[0]))
    assert not load.regathers_inputs and as_trained_by(workload(), Target.MEGATRON_BF16).regathers_inputs


def test_megatron_hides_messages_of_interleaved_stages_and_pads_vocabularies() -> None:
    load = as_trained_by(workload(8), Target.MEGATRON_BF16)
    interleaved = ParallelLayout(ParallelDims(2, 1, 2), 1, 4, schedule="interleaved")
    plain = replace(interleaved, schedule="1f1b")
    shown = replace(load, send_overlap=0.0)
    assert seconds(load, interleaved) < seconds(shown, interleaved)
    assert seconds(load, plain) == seconds(shown, plain)
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), shown)
    plan = price(prices, interleaved, usual_bounds(8, 2), slots_in_order(prices.cluster, interleaved))
    # On two ranks it asserts that they are overlapped.
    written = exports(plan, shown)[0]
    assert "--make-vocab-size-divisible-by 128 " in written.text
    assert "--no-overlap-p2p-communication" not in written.text
    assert any("messages of stages on two ranks" in note for note in written.notes)
    more = replace(interleaved, degrees=ParallelDims(4, 1, 1))
    longer = price(prices, more, usual_bounds(8, 4), slots_in_order(prices.cluster, more))
    assert "--no-overlap-p2p-communication" in exports(longer, shown)[0].text
    assert "--no-overlap-p2p-communication" not in exports(longer, load)[0].text
    odd = replace(load, shape=replace(load.shape, vocabulary=50257))
    padded = ClusterPrices(prices.cluster, odd)
    assert [padded.padded(tp).vocabulary for tp in (1, 2, 8)] == [50304, 50432, 51200]
    # Rows of eight elements allow the widest loads, which 50,257 do not.
    one = ParallelLayout(ParallelDims(1, 4, 1), 4, 2)
    assert seconds(odd, one) < seconds(replace(odd, vocabulary_multiple=1), one)


@pytest.mark.parametrize(("gpu", "faster"), [("H100", 0.6 / 0.35), ("A100", 1.0)])
def test_megatron_calls_the_attention_of_cudnn_where_it_is_faster(gpu: str, faster: float) -> None:
    load = replace(as_trained_by(workload(), Target.MEGATRON_BF16), flash=True)
    layout = ParallelLayout(ParallelDims(1, 1, 1), 8, 1, recompute=RecomputeLayers.SELECTIVE)

    def attention(load: Workload) -> float:
        node = node_of({"gpu": gpu, "count": 1, "devices": 1, "network": "1 Gbit/s"}, "")
        prices = ClusterPrices(Cluster((NodeGroup(node, 1),)), load)
        return prices.item_prices(layout, StageSlot((1,), 1))[Item.LAYER].recompute

    assert attention(replace(load, cudnn_attention=False)) / attention(load) == pytest.approx(faster)


def test_selective_recomputation_repeats_softmax_and_dropout() -> None:
    load = replace(workload(6), flash=False)
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), load)
    layout = ParallelLayout(ParallelDims(1, 4, 1), 4, 2, recompute=RecomputeLayers.SELECTIVE)
    item = prices.item_prices(layout, StageSlot((1,), 4))[Item.LAYER]
    work, gpu = prices.work(Item.LAYER, layout), node_type(FAST, 4).gpu
    traffic = work.score_moved_bytes / (gpu.memory_bandwidth * prices.rates.memory_share)
    products = layer_seconds(work, gpu, prices.rates).attention
    assert item.recompute == pytest.approx(products + traffic) and traffic > 0.5 * products


def test_an_embedding_and_a_head_are_summed_once() -> None:
    """Each was charged an all-reduce in forward and one in backward, of which it has one."""
    prices = ClusterPrices(cluster((node_type(FAST, 4), 1)), workload(6))
    layout = ParallelLayout(ParallelDims(1, 1, 4), 1, 2)
    items = prices.item_prices(layout, StageSlot((1,), 1))
    assert items[Item.LAYER].tensor == pytest.approx(4 * items[Item.HEAD].tensor)
    assert items[Item.EMBEDDING].tensor == pytest.approx(items[Item.HEAD].tensor)
    full = prices.item_prices(replace(layout, recompute=RecomputeLayers.FULL), StageSlot((1,), 1))
    assert full[Item.LAYER].tensor == pytest.approx(6 * items[Item.HEAD].tensor)
    assert full[Item.HEAD].tensor == items[Item.HEAD].tensor


def test_a_single_stage_does_not_take_the_costs_of_a_pipeline_that_was_priced_before() -> None:
    """On one of several nodes ZeRO 2 had no communication at all, if the others had been priced before."""
    load = as_trained_by(workload(), Target.FSDP)
    nodes = cluster((node_type(FAST, 4), 2))
    one = ParallelLayout(ParallelDims(1, 4, 1), 1, 2, zero=2)
    fresh, used = ClusterPrices(nodes, load), ClusterPrices(nodes, load)
    used.item_prices(replace(one, degrees=ParallelDims(2, 4, 1)), StageSlot((1,)))
    found = [prices.item_prices(one, StageSlot((1,)))[Item.LAYER] for prices in (fresh, used)]
    assert found[0] == found[1] and found[0].shards > 0


def test_torchs_pipelines_reduce_when_the_last_backward_has_ended() -> None:
    """Four fifths of the reduction were hidden behind a backward that comes before it."""
    load = as_trained_by(workload(), Target.FSDP)
    prices, numbers = ClusterPrices(cluster((node_type(FAST, 4), 1)), load), np.array([1e8])
    shown = []
    for pp in (1, 2):
        layout = ParallelLayout(ParallelDims(pp, 2, 1), 1, 4)
        hardware = prices.hardware(layout, StageSlot((1,), 2))
        shown.append(float(prices.gradient_seconds(layout, hardware, numbers, numbers, 1.0)[0]))
    whole = hardware.data.reduce_seconds(4e8)
    assert shown == pytest.approx([(1 - load.overlap) * whole, whole])
