"""Prices of layouts on clusters: parts that add up, formulas by hand, the simulated schedules beside them."""

from dataclasses import replace

import numpy as np
import pytest

from osdp.cluster.cost.layer_work import Kernels, SequenceParts, layer_work
from osdp.cluster.cost.links import Ring
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import NetworkLink
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.transformer import Item
from osdp.cost.pipeline.simulate import StageCost, simulate
from osdp.plan.dims import ParallelDims
from osdp.plan.schedule import make_schedule
from tests.helpers.clusters import FAST, SLOW, cluster, node_type, shape, workload

ONE = cluster((node_type(FAST, 4), 1))
FOUR = cluster((node_type(FAST, 4), 4))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 12)])
def test_the_formula_is_what_the_simulated_schedule_takes(schedule: str, pp: int, microbatches: int) -> None:
    # Zero bubble counts on a forward as long as each part of a backward.
    forward, backward = 1.0, 2.0
    per_rank = 2 if schedule == "interleaved" else 1
    played = simulate(
        make_schedule(schedule, pp, microbatches),
        [StageCost(forward / per_rank, backward / per_rank, backward / 2 / per_rank)] * (pp * per_rank),
    )
    total = forward + backward
    share = ParallelLayout(ParallelDims(pp, 1, 1), 1, microbatches, schedule).bubble_share
    expected = (microbatches - share) * total + share * pp * total
    assert played.seconds == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "microbatches", "slices"), [(2, 1, 4), (4, 2, 2), (4, 3, 8)])
def test_slices_shorten_the_fill_as_the_simulated_schedule_says(
    schedule: str, pp: int, microbatches: int, slices: int
) -> None:
    layout = ParallelLayout(ParallelDims(pp, 1, 1), 1, microbatches, schedule, token_slices=slices)
    stages = [StageCost(1.0 / slices, 2.0 / slices, activation_bytes=1)] * pp
    played = simulate(make_schedule(schedule, pp, microbatches, num_slices=slices), stages)
    share = layout.bubble_share
    assert played.seconds == pytest.approx((microbatches - share) * 3.0 + share * pp * 3.0)
    assert [held * slices for held in layout.in_flight] == list(played.peak_activation_bytes)


def test_slices_do_and_keep_together_what_the_sequence_does() -> None:
    gpt = shape(sequence=1024, hidden=1024, heads=16)
    for item in (Item.EMBEDDING, Item.LAYER, Item.HEAD):
        whole, part = (
            layer_work(gpt, item, 2, 1, Kernels(flash=False), parts=SequenceParts(slices))
            for slices in (1, 4)
        )
        assert 4 * sum(gemm.flops for gemm in part.gemms) == sum(gemm.flops for gemm in whole.gemms)
        assert (4 * part.kept_bytes, 4 * part.output_bytes) == (whole.kept_bytes, whole.output_bytes)
        assert part.kernels == whole.kernels
    layout = ParallelLayout(ParallelDims(2, 1, 1), 2, 4)
    prices = ClusterPrices(FOUR, replace(workload(global_batch=8), shape=gpt))
    slot = StageSlot((1,), 2)
    kept = [prices.item_prices(replace(layout, token_slices=k), slot)[Item.LAYER].kept for k in (1, 4)]
    # Keys and values of whole sequences, and their gradients.
    assert kept[1] - kept[0] == 2 * 2 * (2 * 2 * 1024 * 1024)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_activations_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    per_rank = 2 if schedule == "interleaved" else 1
    for pp, microbatches in ((2, 2), (2, 8), (4, 4), (4, 9)):
        layout = ParallelLayout(ParallelDims(pp, 1, 1), 1, microbatches, schedule)
        stages = [StageCost(1.0, 2.0, activation_bytes=1)] * (pp * per_rank)
        peaks = simulate(make_schedule(schedule, pp, microbatches), stages).peak_activation_bytes
        assert [held * per_rank for held in layout.in_flight] == list(peaks)


def test_a_ring_sends_what_the_textbook_says() -> None:
    ring = Ring(4, NetworkLink(1e9, 0.0))
    assert ring.scatter_seconds(4e9) == pytest.approx(3.0)
    assert ring.reduce_seconds(4e9) == pytest.approx(6.0)
    assert Ring(1, NetworkLink(1e9, 1.0)).reduce_seconds(4e9) == 0.0
    # Of many ranks a tree has fewer steps, which all-reduces alone have.
    many = Ring(1024, NetworkLink(1e9, 1.0), nodes=128, near_latency=0.01)
    assert many.reduce_seconds(0.0) == pytest.approx(2 * (14 * 1.0 + 6 * 0.01))
    assert many.scatter_seconds(0.0) == pytest.approx(127 * 1.0 + (1023 - 127) * 0.01)


def test_a_layer_does_and_keeps_what_is_published() -> None:
    gpt = shape(sequence=1024, hidden=1024, heads=16)
    s, h, b = 1024, 1024, 2
    work = layer_work(gpt, Item.LAYER, b, 1, Kernels(flash=False))
    # Narayanan et al. (SC 2021, appendix): 24 b s h^2 + 4 b s^2 h in a forward.
    assert sum(gemm.flops for gemm in work.gemms) == 24 * b * s * h * h + 4 * b * s * s * h
    assert work.kept_bytes == 34 * s * b * h + 5 * 16 * s * s * b
    flash = layer_work(gpt, Item.LAYER, b, 1)
    assert flash.kept_bytes == 34 * s * b * h
    assert sum(gemm.flops for gemm in flash.gemms) == 24 * b * s * h * h + 2 * b * s * s * h
    assert sum(gemm.moved_bytes for gemm in flash.attention) == 0
    half = layer_work(gpt, Item.LAYER, b, 2, Kernels(flash=False))
    assert half.kept_bytes == s * b * h * 10 + (s * b * h * 24 + 5 * 16 * s * s * b) // 2
    assert work.sums == work.forward_sums == 0 and (half.sums, half.forward_sums) == (4, 2)


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    gpt = shape(sequence=1024, hidden=1024, heads=16)
    s, h, b = 1024, 1024, 2
    # Korthikanti et al. (arXiv:2205.05198, table 2): s b h (34 + 5 a s / h) / t.
    split = layer_work(gpt, Item.LAYER, b, 4, Kernels(flash=False, sequence_parallel=True))
    whole = layer_work(gpt, Item.LAYER, b, 4, Kernels(flash=False))
    assert split.kept_bytes == (34 * s * b * h + 5 * 16 * s * s * b) // 4
    # A rank sends its part of the stream, and keeps that part where the layer is recomputed.
    assert (split.output_bytes, split.input_bytes) == (2 * s * b * h // 4, 2 * s * b * h // 4)
    assert (split.sums, split.summed_bytes) == (whole.sums, whole.summed_bytes)


def test_inputs_that_are_not_gathered_again_are_kept_whole() -> None:
    """torchtitan was given the memory of Megatron-LM, which gathers the inputs of products for backward."""
    gpt = shape(sequence=1024, hidden=1024, heads=16)
    for item, blocks in ((Item.LAYER, 2), (Item.HEAD, 1)):
        again, once = (
            layer_work(gpt, item, 2, 4, Kernels(sequence_parallel=True, regathers_inputs=each)).kept_bytes
            for each in (True, False)
        )
        assert once - again == blocks * 2 * (2 * 1024 * 1024) * 3 // 4


def test_tensor_parallel_ranks_send_parts_where_the_framework_does() -> None:
    layout = ParallelLayout(ParallelDims(4, 1, 4), 1, 4)
    load = workload(global_batch=4)
    slots, bounds = [StageSlot((1,))] * 4, (0, 2, 3, 4, 6)
    link, inside = node_type(FAST).outside, node_type(FAST).inside
    message = 2 * 256 * 512
    # An output and its gradient in each of 4 microbatches; the four ranks share the node's link.
    whole = price(ClusterPrices(FOUR, load), layout, bounds, slots).seconds
    assert whole.sends == pytest.approx(4 * 2 * (link.latency + message / (link.bandwidth / 4)))
    parts = price(ClusterPrices(FOUR, replace(load, split_sends=True)), layout, bounds, slots).seconds
    gathered = 3 * inside.latency + 0.75 * message / inside.bandwidth
    assert parts.sends == pytest.approx(4 * 2 * (link.latency + message / link.bandwidth + gathered))
    # Sequence parallelism needs no gathering: the next stage works on parts.
    split = replace(load, sequence_parallel=True, split_sends=True)
    sends = price(ClusterPrices(FOUR, split), layout, bounds, slots).seconds.sends
    assert sends == pytest.approx(4 * 2 * (link.latency + message / link.bandwidth))


def test_a_fused_gate_keeps_two_projections_and_their_product() -> None:
    llama = replace(shape(sequence=1024, hidden=1024, heads=16), gated=True, feed_forward=3072)
    plain, fused = (layer_work(llama, Item.LAYER, 2, 4, Kernels(fused_gate=gate)) for gate in (False, True))
    assert plain.kept_bytes - fused.kept_bytes == 2 * (2 * 1024) * 3072 // 4


def test_masks_are_kept_where_there_is_dropout() -> None:
    gpt = shape(sequence=1024, hidden=1024, heads=16)
    s, h, b = 1024, 1024, 2
    # Without its two masks of a byte; of each score the probability in 16 bits is left.
    assert layer_work(gpt, Item.LAYER, b, 1, Kernels(dropout=False)).kept_bytes == 32 * s * b * h
    scores = layer_work(gpt, Item.LAYER, b, 1, Kernels(flash=False, dropout=False))
    assert scores.score_bytes == 2 * 16 * s * s * b


def plan_of(zero: int = 0, dp: int = 4, **changes: object) -> ClusterPlan:
    layout = replace(ParallelLayout(ParallelDims(1, dp, 1), 1, 4, zero=zero), **changes)  # type: ignore[arg-type]
    prices = ClusterPrices(ONE, workload(global_batch=16))
    return price(prices, layout, (0, len(prices.items)), [StageSlot((1,))])


def test_zero_shards_what_it_says_and_sends_what_that_costs() -> None:
    count = shape().num_parameters
    link = node_type(FAST).inside
    whole, sharded = 2 * count, 2 * count / 4
    zero = [plan_of(stage) for stage in range(4)]
    assert [plan.stages[0].weights for plan in zero] == [whole, whole, whole, sharded]
    assert [plan.stages[0].gradients for plan in zero] == [whole, whole, sharded, sharded]
    assert [plan.stages[0].states for plan in zero] == [12 * count, *[12 * count / 4] * 3]
    part = 0.75 * whole / link.bandwidth
    latency = 3 * link.latency
    assert zero[0].seconds.gradients == pytest.approx(2 * (part + latency))
    assert zero[1].seconds.gradients == pytest.approx(2 * (part + latency))
    assert zero[2].seconds.gradients == pytest.approx(part + latency)
    assert zero[3].seconds.gradients == 0.0
    # An embedding's weight is tied: items are gathered one by one, the head's copy as well.
    items = [shape().parameters(item) for item in shape().items]
    each = sum(0.75 * 2 * number / link.bandwidth + latency for number in items)
    assert zero[2].seconds.shards == pytest.approx(4 * each)
    assert zero[3].seconds.shards == pytest.approx(4 * 3 * each)


def test_wider_gradients_cost_what_their_dtype_does() -> None:
    load = workload(global_batch=16)
    layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 4)
    found = [
        price(ClusterPrices(ONE, wide), layout, (0, 6), [StageSlot((1,))])
        for wide in (load, replace(load, reduce_bytes=4, gradient_bytes=4))
    ]
    latency = 2 * 3 * node_type(FAST).inside.latency
    narrow, wide = (plan.seconds.gradients - latency for plan in found)
    assert wide == pytest.approx(2 * narrow)
    assert found[1].stages[0].gradients == 2 * found[0].stages[0].gradients


def test_compute_hides_communication_up_to_its_own_length() -> None:
    layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 4, zero=3)
    hidden = [
        price(
            ClusterPrices(ONE, replace(workload(global_batch=16), overlap=part)),
            layout,
            (0, 6),
            [StageSlot((1,))],
        )
        for part in (0.0, 0.5, 1.0)
    ]
    assert hidden[0].seconds.shards > hidden[1].seconds.shards > hidden[2].seconds.shards >= 0.0


def test_recomputation_takes_a_forward_and_keeps_inputs() -> None:
    plain, full = plan_of(), plan_of(recompute=RecomputeLayers.FULL)
    assert full.seconds.recompute > 0.2 * full.seconds.compute
    assert full.stages[0].activations < plain.stages[0].activations
    assert full.seconds.compute == plain.seconds.compute


def test_the_parts_add_up_and_every_border_is_paid_for() -> None:
    prices = ClusterPrices(FOUR, workload(global_batch=16))
    layout = ParallelLayout(ParallelDims(4, 2, 2), 1, 8)
    plan = price(prices, layout, (0, 2, 3, 4, 6), [StageSlot((1,))] * 4)
    seconds = plan.seconds
    assert seconds.total == pytest.approx(plan.step_seconds)
    assert seconds.embedding > 0
    free = replace(prices.workload.shape, tied=False)
    untied = price(
        ClusterPrices(FOUR, Workload(shape=free, global_batch=16)), layout, plan.bounds, plan.slots
    )
    assert untied.seconds.embedding == 0.0
    slow_network = cluster((replace(node_type(FAST, 4), outside=NetworkLink(1e8, 2e-5)), 4))
    slower = price(ClusterPrices(slow_network, prices.workload), layout, plan.bounds, plan.slots)
    # Of three borders one belongs to the slowest stage, the others to the bubble.
    sent = 2 * prices.border_bytes(layout)[2] * 4 * (1e-8 - 2e-10)
    grown = slower.seconds.pipeline - seconds.pipeline
    assert grown == pytest.approx((8 + 2) * sent, rel=0.05)


def test_compute_hides_messages_of_interleaved_stages_up_to_its_own_length() -> None:
    """On slow networks four fifths of messages were hidden behind compute that was far shorter."""
    layout = ParallelLayout(ParallelDims(4, 2, 2), 1, 8, schedule="interleaved")
    found = []
    for bandwidth in (1e6, 1e5):
        slow = cluster((replace(node_type(FAST, 4), outside=NetworkLink(bandwidth, 2e-5)), 4))
        prices = ClusterPrices(slow, replace(workload(8, global_batch=16), send_overlap=0.8))
        found.append(price(prices, layout, (0, 3, 5, 7, 10), [StageSlot((1,))] * 4))
    messages = 2 * layout.stages_per_rank * ClusterPrices(FOUR, workload(8)).border_bytes(layout)[2] * 4
    grown = found[1].seconds.pipeline - found[0].seconds.pipeline
    # What the rank waits for in the steady state, less what it computes; fill and drain hide nothing.
    assert grown >= 8 * messages * (1e-5 - 1e-6)
    compute = found[0].seconds.compute
    assert found[0].seconds.sends == pytest.approx(8 * messages * 1e-6 - 0.8 * compute, rel=0.1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_shard_among_their_ranks_and_reduce_with_their_copies(zero: int) -> None:
    """HSDP: a quarter of the shards, gathers inside a node, and an all-reduce of shards between nodes."""
    load = workload(global_batch=16)
    whole = ParallelLayout(ParallelDims(1, 16, 1), 1, 1, zero=zero)
    groups = replace(whole, shard_degree=4)
    prices = ClusterPrices(FOUR, load)
    plans = [price(prices, each, (0, len(prices.items)), [StageSlot((4,))]) for each in (whole, groups)]
    assert plans[1].stages[0].states == pytest.approx(4 * plans[0].stages[0].states, abs=8)
    assert groups.sharding == f"zero{zero} in 4" and groups.shards == 4
    hardware = prices.hardware(groups, StageSlot((4,)))
    assert (hardware.data.size, hardware.data.link) == (4, node_type(FAST).inside)
    assert hardware.copies.size == 4 and hardware.copies.link.bandwidth == 5e9 / 4
    numbers = np.array([1e8])
    seconds = prices.gradient_seconds(groups, hardware, numbers, numbers, 0.0)
    own = {1: hardware.data.scatter_seconds(2e8), 2: 0.0, 3: 0.0}[zero]
    own += hardware.copies.reduce_seconds(2e8 / 4) * (zero == 1)
    own += hardware.data.scatter_seconds(2e8) * (zero < 3)
    assert float(seconds[0]) == pytest.approx(own, rel=1e-6)
    if zero == 3:  # gathers stay in the node; reductions send half as much again between nodes
        assert 0 < plans[1].seconds.shards < plans[0].seconds.shards


@pytest.mark.parametrize(
    ("degree", "changes", "said"),
    [(3, {}, "does not divide dp=16"), (16, {}, "several groups"), (4, {"zero": 0}, "needs a ZeRO stage")],
)
def test_shard_degrees_that_make_no_groups_are_refused(
    degree: int, changes: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replace(ParallelLayout(ParallelDims(1, 16, 1), 1, 1, zero=3), shard_degree=degree, **changes)


def test_one_message_takes_one_adapter() -> None:
    """A pipeline of single devices was given the bandwidth of all adapters of its nodes."""
    wide = replace(node_type(FAST, 8), outside=NetworkLink(4e11, 2e-5))
    one = ParallelLayout(ParallelDims(2, 1, 1), 1, 8)
    for adapters, flow in ((0, 5e10), (4, 1e11), (16, 2.5e10)):
        hardware = ClusterPrices(cluster((replace(wide, adapters=adapters), 2)), workload()).hardware(
            one, StageSlot((1,))
        )
        assert hardware.between.bandwidth == flow
    context = ParallelLayout(ParallelDims(1, 1, 1), 1, 8, cp=16)
    hardware = ClusterPrices(cluster((wide, 2)), workload()).hardware(context, StageSlot((2,)))
    assert hardware.context.link.bandwidth == 5e10 < hardware.data.link.bandwidth


def test_a_ring_of_attention_calls_and_merges_for_each_part() -> None:
    """The more context-parallel ranks, the more kernels a rank calls on the same tokens."""
    long = [shape(1, sequence=256 * cp, positions=256 * cp) for cp in (1, 8)]
    parts = [
        layer_work(each, Item.LAYER, 1, 1, parts=SequenceParts(1, cp))
        for each, cp in zip(long, (1, 8), strict=True)
    ]
    assert parts[1].kernels == parts[0].kernels + 4 * 7
    assert parts[1].moved_bytes - parts[0].moved_bytes == 7 * 3 * 256 * 512 * 2
    gathered = layer_work(long[1], Item.LAYER, 1, 1, Kernels(ring_attention=False), parts=SequenceParts(1, 8))
    assert gathered.kernels == parts[0].kernels


def test_a_network_is_shared_by_the_rings_that_cross_it() -> None:
    prices = ClusterPrices(FOUR, workload(global_batch=16))
    hardware = [
        prices.hardware(ParallelLayout(ParallelDims(1, 16 // tp, tp), 1, 1), StageSlot((4,))) for tp in (1, 4)
    ]
    assert hardware[0].data.link.bandwidth == 4 * hardware[1].data.link.bandwidth == 5e9
    assert (
        prices.hardware(ParallelLayout(ParallelDims(8, 2, 1), 1, 1), StageSlot((1,), 2)).data.link
        == node_type(FAST).inside
    )


def test_tensor_parallel_ranks_of_several_nodes_send_over_the_network() -> None:
    """Sixteen ranks on nodes of eight, and four on nodes of one, were given the link inside a node."""
    inside, outside = node_type(FAST).inside, node_type(FAST).outside
    eight = ClusterPrices(cluster((node_type(FAST, 8), 2)), workload())
    wide = eight.hardware(ParallelLayout(ParallelDims(1, 1, 16), 1, 8), StageSlot((2,))).tensor
    assert (wide.link.bandwidth, wide.nodes, wide.near_latency) == (outside.bandwidth, 2, inside.latency)
    held = eight.hardware(ParallelLayout(ParallelDims(1, 2, 8), 1, 4), StageSlot((2,)))
    assert held.tensor.link == inside and held.data.link.bandwidth == outside.bandwidth / 8
    # A node of one device is in one ring of each kind.
    ones = ClusterPrices(cluster((node_type(FAST, 1), 8)), workload())
    alone = ones.hardware(ParallelLayout(ParallelDims(1, 2, 4), 1, 4), StageSlot((8,)))
    assert alone.tensor.link.bandwidth == alone.data.link.bandwidth == outside.bandwidth


def test_two_devices_of_a_mesh_have_the_link_that_joins_them() -> None:
    prices = ClusterPrices(cluster((replace(node_type(FAST, 4), mesh=True), 1)), workload())
    whole = node_type(FAST).inside.bandwidth
    for dims, tensor, data in (((2, 1, 2), 3, None), ((1, 1, 4), 1, None), ((1, 2, 2), 3, 3)):
        hardware = prices.hardware(ParallelLayout(ParallelDims(*dims), 1, 4), StageSlot((1,), dims[0]))
        assert hardware.tensor.link.bandwidth == pytest.approx(whole / tensor)
        assert hardware.within.bandwidth == pytest.approx(whole / 3)
        if data:
            assert hardware.data.link.bandwidth == pytest.approx(whole / data)


@pytest.mark.parametrize("bounds", [(0, 3), (0, 3, 3), (1, 3, 6), (0, 3, 5)])
def test_stages_that_do_not_make_the_model_are_refused(bounds: tuple[int, ...]) -> None:
    prices = ClusterPrices(FOUR, workload())
    with pytest.raises(
        ValueError, match="2 stages of 6 items need 3 ascending bounds from 0 to 6 and 2 slots"
    ):
        price(prices, ParallelLayout(ParallelDims(2, 8, 1), 1, 1), bounds, [StageSlot((2,))] * 2)


def test_the_memory_of_the_smallest_device_is_the_limit() -> None:
    mixed = cluster((node_type(FAST, 4), 1), (node_type(SLOW, 4), 1))
    prices = ClusterPrices(mixed, workload(global_batch=16))
    plan = price(
        prices, ParallelLayout(ParallelDims(2, 4, 1), 1, 4), (0, 3, 6), [StageSlot((1, 0)), StageSlot((0, 1))]
    )
    assert [stage.limit for stage in plan.stages] == [FAST.memory, SLOW.memory]
    assert plan.peak is plan.stages[1]
