"""Memory beyond the numbers of a model: contexts, communicators, lost space, copies that pipelines keep."""

import math
from dataclasses import replace

import pytest

from osdp.cluster.cost.layer_work import Kernels, layer_work
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.predicted import StageBytes
from osdp.cluster.transformer import Item
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type, shape, workload

NODE = cluster((node_type(FAST, 4), 1))
PIPELINE = ParallelLayout(ParallelDims(2, 2, 1), 1, 4)


def first_stage(load: Workload, layout: ParallelLayout = PIPELINE) -> StageBytes:
    """Memory of the first of two stages of two layers each."""
    return price(ClusterPrices(NODE, load), layout, (0, 3, 6), [StageSlot((1,), 2)] * 2).stages[0]


def test_every_axis_with_several_ranks_has_a_communicator() -> None:
    load = replace(workload(), reserve=5, communicator_bytes=7)
    prices = ClusterPrices(NODE, load)
    degrees = [(1, 1, 1), (1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 2, 1)]
    reserves = [prices.reserve(ParallelLayout(ParallelDims(*each), 1, 1)) for each in degrees]
    assert reserves == [5, 12, 12, 19, 19]
    assert first_stage(load).reserve == 19


def test_the_allocator_loses_a_share_of_what_comes_and_goes_where_layers_are_recomputed() -> None:
    """Megatron-DeepSpeed's runs of 176 billion parameters held 1.3 times what their tensors add up to."""
    exact, lossy = (replace(workload(), fragmentation=share) for share in (0.0, 0.2))
    again = replace(PIPELINE, recompute=RecomputeLayers.FULL)
    assert first_stage(exact) == first_stage(lossy)
    before, after = first_stage(exact, again), first_stage(lossy, again)
    assert after.activations == pytest.approx(before.activations / 0.8, abs=8)
    assert after.weights == before.weights and after.states == before.states
    with pytest.raises(ValueError, match=r"fragmentation must be in 0\.\.1, less than 1, got 1"):
        replace(exact, fragmentation=1.0)


def test_a_pipeline_may_keep_what_it_received_and_sent() -> None:
    plain, kept = workload(), replace(workload(), boundary_copies=1)
    stream = plain.shape.sequence * plain.shape.hidden * plain.weight_bytes
    # The first stage has two microbatches in flight, and sends alone.
    assert first_stage(kept).activations - first_stage(plain).activations == 2 * stream


def test_a_fused_loss_keeps_logits_in_the_compute_dtype_alone() -> None:
    model = shape()
    plain, fused = (layer_work(model, Item.HEAD, 2, 2, Kernels(fused_loss=on)) for on in (False, True))
    logits = 2 * model.sequence * math.ceil(model.vocabulary / 2)
    assert plain.kept_bytes - fused.kept_bytes == 4 * logits
    assert (plain.working_bytes, fused.working_bytes) == (4 * logits, 0)
