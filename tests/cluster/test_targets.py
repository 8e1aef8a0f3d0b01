"""Bytes that frameworks keep are those of their own documents."""

from dataclasses import replace

import numpy as np
import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.plan import ParallelLayout, StageSlot, Workload
from osdp.cluster.targets import Target, as_trained_by
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
