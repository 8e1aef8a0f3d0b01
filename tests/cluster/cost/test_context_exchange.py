"""Context parallelism: work, messages, memory and sharding of ranks that divide every sequence."""

from dataclasses import replace

import pytest

from osdp.cluster.cost.context_exchange import exchange_seconds, exchanged_bytes
from osdp.cluster.cost.layer_work import SequenceParts, layer_work
from osdp.cluster.cost.links import Ring, slot_hardware
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import NetworkLink
from osdp.cluster.known_transformers import shape_of
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot
from osdp.cluster.transformer import Item
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type, workload

LINK = NetworkLink(1e9, 1e-5)
NODES = cluster((node_type(FAST, 4), 4))


@pytest.mark.parametrize("item", [Item.EMBEDDING, Item.LAYER, Item.HEAD])
def test_four_ranks_have_a_quarter_of_the_work_and_of_the_activations(item: Item) -> None:
    llama = shape_of("llama2-7b")
    whole, part = (layer_work(llama, item, 2, 1, parts=SequenceParts(cp=cp)) for cp in (1, 4))
    assert sum(gemm.flops for gemm in whole.gemms) == pytest.approx(
        4 * sum(gemm.flops for gemm in part.gemms)
    )
    assert (whole.kept_bytes, whole.output_bytes) == (4 * part.kept_bytes, 4 * part.output_bytes)
    assert whole.summed_bytes == 4 * part.summed_bytes
    # A token slice attends to all keys and has no other half to even it out.
    slice_of = layer_work(llama, item, 2, 1, parts=SequenceParts(slices=4))
    more = 1.0 if item is not Item.LAYER else 2.0
    scores = [sum(gemm.flops for gemm in work.attention) for work in (part, slice_of)]
    assert scores[1] == more * scores[0]


def test_a_ring_shows_what_attention_does_not_hide() -> None:
    ring, nbytes = Ring(4, LINK), 10**6
    step = LINK.seconds(nbytes)
    assert exchange_seconds(ring, nbytes, 0.0, forwards=1, around=True) == pytest.approx(
        3 * step + 3 * LINK.seconds(2 * nbytes)
    )
    # A quarter of the attention beside each message: the forward hides half of each.
    attention = 4 * step / 2
    forward = 3 * step / 2
    backward = 3 * (LINK.seconds(2 * nbytes) - 2.5 * step / 2)
    for forwards in (1, 2):
        found = exchange_seconds(ring, nbytes, attention, forwards=forwards, around=True)
        assert found == pytest.approx(forwards * forward + backward)
    assert exchange_seconds(ring, nbytes, 1.0, forwards=1, around=True) == 0.0
    # Gathered in forward and backward, and reduce-scattered, whatever attention takes.
    gathered = exchange_seconds(ring, nbytes, 1.0, forwards=1, around=False)
    assert gathered == pytest.approx(3 * ring.scatter_seconds(4 * nbytes))
    assert exchange_seconds(Ring(1, LINK), nbytes, 0.0, forwards=1, around=True) == 0.0


def test_bytes_of_other_ranks() -> None:
    assert [exchanged_bytes(cp, 100, around=True) for cp in (1, 2, 4, 8)] == [0, 200, 400, 400]
    assert [exchanged_bytes(cp, 100, around=False) for cp in (1, 2, 4, 8)] == [0, 200, 600, 1400]


def plan_of(cp: int, dp: int, *, tp: int = 1, zero: int = 0) -> ClusterPlan:
    """One stage on four nodes of four devices."""
    layout = ParallelLayout(ParallelDims(1, dp, tp), 1, 16 // dp, zero=zero, cp=cp)
    prices = ClusterPrices(NODES, workload(global_batch=16))
    return price(prices, layout, (0, len(prices.items)), [StageSlot((4,))])


def test_gradients_and_states_are_of_data_and_context_ranks_together() -> None:
    for zero in (0, 1, 3):
        copies, divided = plan_of(1, 16, zero=zero), plan_of(4, 4, zero=zero)
        assert divided.stages[0].states == copies.stages[0].states
        assert divided.stages[0].weights == copies.stages[0].weights
        assert divided.stages[0].activations == pytest.approx(copies.stages[0].activations / 4, rel=1e-3)
    assert plan_of(4, 4).seconds.gradients == plan_of(1, 16).seconds.gradients
    assert plan_of(4, 4).seconds.context > 0.0 == plan_of(1, 16).seconds.context
    assert plan_of(4, 4).seconds.total == pytest.approx(
        plan_of(4, 4).seconds.pipeline + plan_of(4, 4).seconds.gradients + plan_of(4, 4).seconds.optimizer
        + plan_of(4, 4).seconds.embedding
    )  # fmt: skip


def test_a_context_group_stays_in_its_node_if_it_divides_it() -> None:
    node = NODES.groups[0].node
    for tp, cp, link in (
        (1, 4, node.inside),
        (2, 2, node.inside),
        (1, 8, node.outside),
        (4, 2, node.outside),
    ):
        layout = ParallelLayout(ParallelDims(1, 16 // tp // cp, tp), 1, 1, cp=cp)
        found = slot_hardware(NODES, layout, StageSlot((4,))).context
        assert found.size == cp
        # The network of a node is shared by the groups of its tensor-parallel ranks.
        share = tp if link is node.outside else 1
        assert found.link.bandwidth == link.bandwidth / share


def test_a_recomputed_forward_exchanges_again() -> None:
    layout = ParallelLayout(ParallelDims(1, 4, 1), 1, 4, cp=4)
    prices = ClusterPrices(NODES, workload(global_batch=16))
    again = replace(layout, recompute=RecomputeLayers.FULL)
    plans = [price(prices, each, (0, len(prices.items)), [StageSlot((4,))]) for each in (layout, again)]
    assert plans[1].seconds.context > plans[0].seconds.context
