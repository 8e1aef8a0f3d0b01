"""Configurations of other frameworks say what a plan says, in the words of each."""

import pytest

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.export.breakdown import breakdown, step_parts
from osdp.cluster.export.frameworks import exports
from osdp.cluster.plan import ClusterPlan, ParallelLayout, StageSlot
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type, workload

NODES = cluster((node_type(FAST, 4), 2))
LOAD = workload(6, global_batch=8)


def plan_of(pp: int, dp: int, *, cp: int = 1, zero: int = 1) -> ClusterPlan:
    """Stages of whole nodes."""
    layout = ParallelLayout(ParallelDims(pp, dp, 1), 1, 8 // dp, zero=zero, cp=cp)
    prices = ClusterPrices(NODES, LOAD)
    bounds = (0, *range(8 // pp, 8, 8 // pp), 8)
    return price(prices, layout, bounds, [StageSlot((2 // pp,))] * pp)


def test_context_parallelism_is_exported_where_it_exists() -> None:
    megatron, deepspeed, accelerate, torchtitan = exports(plan_of(2, 2, cp=2), LOAD.shape)
    assert "--context-parallel-size 2 " in megatron.text
    # The batch is that of the data-parallel ranks alone.
    assert "--global-batch-size 8 " in megatron.text and "--pipeline-model-parallel-size 2 " in megatron.text
    assert any(note.startswith("cp=2: it has no context parallelism") for note in deepspeed.notes)
    assert "parallelism_config_cp_size: 2" in accelerate.text and "num_processes: 8" in accelerate.text
    assert "--parallelism.context_parallel_degree '2'" in torchtitan.text
    assert "--parallelism.data_parallel_shard_degree '2'" in torchtitan.text
    assert not any("context" in each.text for each in exports(plan_of(2, 4), LOAD.shape))
    sharded = exports(plan_of(2, 1, cp=4, zero=0), LOAD.shape)[-1]
    assert any("sharded over the 4 context-parallel ranks" in note for note in sharded.notes)


def test_the_breakdown_adds_up_with_the_exchanges() -> None:
    plan = plan_of(2, 2, cp=2)
    parts = {name: seconds for name, seconds, _ in step_parts(plan)}
    assert parts["context parallelism"] > 0.0
    assert sum(parts.values()) == pytest.approx(plan.step_seconds)
    text = breakdown(plan, NODES, LOAD.shape)
    assert "tp/pp/dp 1/2/2 cp2" in text and "over 2 x 2 data- and context-parallel ranks" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_of_a_rank_are_exported_in_model_order(stages: int) -> None:
    layout = ParallelLayout(
        ParallelDims(2, 4, 1), 1, 2, "interleaved", virtual_stages=0 if stages == 2 else stages
    )
    load = workload(13, global_batch=8)
    plan = price(ClusterPrices(NODES, load), layout, (0, 8, 15), [StageSlot((1,))] * 2)
    megatron, *_, torchtitan = exports(plan, load.shape)
    # Ranks have seven and six layers; the embedding's stage has no more than others of its rank.
    parts = {2: "Ettt|ttt|tttt|tttL", 3: "Ett|tt|tt|tt|ttt|ttL", 4: "Et|tt|tt|tt|tt|t|tt|tL"}[stages]
    assert f"--pipeline-model-parallel-layout '{parts}'" in megatron.text
    assert torchtitan.text.count("tok_embeddings") == 1 and "Interleaved1F1B" in torchtitan.text
