"""Layers with experts: what they are, what dividing them over ranks saves, and what sending tokens costs."""

import dataclasses

import pytest

from osdp.cluster.cost.even_step import EvenSteps
from osdp.cluster.cost.layer_work import layer_work
from osdp.cluster.cost.links import AllToAll
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import NetworkLink
from osdp.cluster.known_transformers import SHAPES, shape_from_config
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.search.space import cells_of, chunks_fault
from osdp.cluster.transformer import Item, TransformerShape
from osdp.plan.dims import ParallelDims
from tests.helpers.clusters import FAST, cluster, node_type

EXPERTS = TransformerShape(
    name="experts", layers=4, hidden=256, heads=4, sequence=128, vocabulary=1000, gated=True, biases=False,
    experts=8, experts_per_token=2, expert_width=512, shared_width=128, dense_layers=1,
)  # fmt: skip
NODES = cluster((node_type(FAST), 2))


def plan_of(ep: int, dp: int = 8, shape: TransformerShape = EXPERTS, **options: object) -> ClusterPlan:
    layout = ParallelLayout(ParallelDims(1, dp, 8 // dp), 1, 2, ep=ep, **options)  # type: ignore[arg-type]
    prices = ClusterPrices(NODES, Workload(shape=shape, global_batch=16))
    cells = cells_of(NODES, NODES.counts, layout.stage_ranks)
    assert cells is not None
    return price(prices, layout, (0, len(shape.items)), cells.slots)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7), ("deepseek-moe-16b", 16.4), ("deepseek-v2-lite", 15.7),
        ("deepseek-v2", 235.7), ("deepseek-v3", 671.0), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1),
    ],
)  # fmt: skip
def test_published_models_have_as_many_parameters_as_is_said(name: str, billions: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_a_token_meets_the_experts_that_it_visits() -> None:
    # Mixtral: 12.9 billion active parameters (Jiang et al., arXiv:2401.04088).
    assert SHAPES["mixtral-8x7b"].active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    # DeepSeek-V2 and V3: 21 and 37 billion (arXiv:2405.04434 and 2412.19437, abstracts).
    assert SHAPES["deepseek-v2"].active_parameters / 1e9 == pytest.approx(21, abs=0.5)
    assert SHAPES["deepseek-v3"].active_parameters / 1e9 == pytest.approx(37, abs=0.7)
    assert SHAPES["llama3-8b"].active_parameters == SHAPES["llama3-8b"].num_parameters


def test_a_rank_with_several_parts_has_layers_of_one_kind() -> None:
    """Interleaved, its dense layers were not those of the chain's first part, which were priced."""
    for dense, told in ((1, None), (2, "whose first 2 layers are unlike the others")):
        fault = chunks_fault(dataclasses.replace(EXPERTS, dense_layers=dense))
        assert fault is None if told is None else told in str(fault)


def test_the_first_layers_may_be_dense() -> None:
    assert EXPERTS.items == (Item.EMBEDDING, Item.LAYER, *(Item.EXPERT_LAYER,) * 3, Item.HEAD)
    dense, sparse = (EXPERTS.parameters(item) for item in (Item.LAYER, Item.EXPERT_LAYER))
    feed = 3 * 256 * 1024
    assert sparse - dense == 256 * 8 + 3 * 256 * (8 * 512 + 128) - feed
    assert EXPERTS.parameters(Item.EXPERT_LAYER, ep=4) == sparse - 6 * 3 * 256 * 512
    assert EXPERTS.expert_parameters(Item.LAYER) == 0


def test_one_expert_that_all_tokens_visit_computes_what_a_dense_layer_does() -> None:
    one = dataclasses.replace(
        EXPERTS, experts=1, experts_per_token=1, expert_width=0, shared_width=0, dense_layers=0
    )
    dense, sparse = (layer_work(one, item, 2, 1) for item in (Item.LAYER, Item.EXPERT_LAYER))
    router = 2.0 * 256 * 256  # tokens x width x one expert
    assert sum(gemm.flops for gemm in sparse.gemms) == sum(gemm.flops for gemm in dense.gemms) + router
    assert sparse.routed_bytes == dense.summed_bytes
    # The copies for the experts come on top.
    assert sparse.kept_bytes > dense.kept_bytes


def test_each_rank_computes_as_many_tokens_however_experts_are_divided() -> None:
    whole, *divided = (layer_work(EXPERTS, Item.EXPERT_LAYER, 4, 1, ep=ep) for ep in (1, 2, 8))
    for work in divided:
        assert sum(gemm.flops for gemm in work.gemms) == sum(gemm.flops for gemm in whole.gemms)
        assert work.kept_bytes == whole.kept_bytes
        assert work.backward_bytes < whole.backward_bytes  # fewer weights whose gradients are added up
    copies = 4 * 128 * 2
    assert whole.routed_bytes == copies * 256 * 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_are_stored_once_for_each_group_and_sharded_over_the_groups(zero: int) -> None:
    experts = 3 * 8 * 3 * 256 * 512
    total = EXPERTS.num_parameters
    for ep in (1, 2, 8):
        (stage,) = plan_of(ep, zero=zero).stages
        # Weights of 2 bytes, gradients of 2, states of 12; ZeRO shards each from its stage on.
        for found, size, sharded in (
            (stage.weights, 2, zero >= 3),
            (stage.gradients, 2, zero >= 2),
            (stage.states, 12, zero >= 1),
        ):
            whole = total - experts + experts / ep
            shared = (total - experts) / 8 + experts / ep / (8 // ep)
            assert found == pytest.approx(size * (shared if sharded else whole), rel=1e-6)


def test_gradients_of_experts_are_reduced_among_those_who_hold_them() -> None:
    sparse = dataclasses.replace(EXPERTS, dense_layers=0)
    rest = dataclasses.replace(
        sparse, experts=0, experts_per_token=0, expert_width=0, shared_width=0, feed_forward=128
    )
    without = plan_of(1, shape=rest).seconds.gradients
    of_experts = {ep: plan_of(ep, shape=sparse).seconds.gradients - without for ep in (1, 2, 4, 8)}
    # With the experts divided over all ranks the rest is left, with a router.
    assert of_experts[8] < 0.02 * of_experts[1]
    # A ring crosses from one node of four to the other for each rank of a node, however few experts each has:
    # (n - 1) / n of what n ranks share, 8 or 4 or 2 of them.
    assert of_experts[2] / of_experts[1] == pytest.approx((3 / 4) / (7 / 8), rel=0.02)
    assert of_experts[4] / of_experts[1] == pytest.approx((1 / 2) / (7 / 8), rel=0.02)


def test_tokens_travel_to_experts_and_back_in_both_passes() -> None:
    group = plan_of(4).seconds.experts
    assert plan_of(1).seconds.experts == 0.0 < group
    again = plan_of(4, recompute=RecomputeLayers.FULL).seconds.experts
    assert again == pytest.approx(1.5 * group)
    # Eight ranks are on two nodes, four on one.
    assert plan_of(8).seconds.experts > 2 * group


def test_an_all_to_all_sends_into_the_node_and_out_of_it_at_once() -> None:
    within, between = NetworkLink(100.0, 0.5), NetworkLink(10.0, 2.0)
    assert AllToAll(1, 1, within, between).seconds(80.0) == 0.0
    assert AllToAll(4, 4, within, between).seconds(80.0) == 0.5 + 0.6
    assert AllToAll(8, 4, within, between).seconds(80.0) == 2.0 + 4.0
    assert AllToAll(8, 1, within, between).seconds(80.0) == 2.0 + 7.0


def test_experts_of_one_rank_alone_are_not_gathered() -> None:
    prices = ClusterPrices(NODES, Workload(shape=EXPERTS, global_batch=16))
    added = {}
    for ep in (4, 8):
        layout = ParallelLayout(ParallelDims(1, 8, 1), 1, 2, zero=3, ep=ep)
        item = prices.item_prices(layout, StageSlot((2,)))[Item.EXPERT_LAYER]
        added[ep] = prices.working_bytes(layout, item) - item.working
    rest, expert = EXPERTS.parameters(Item.EXPERT_LAYER, ep=8), 3 * 256 * 512
    # Weights and gradients of two layers at a time, of 2 bytes each; of four ranks each has two experts.
    assert added == {4: 8 * (rest + expert), 8: 8 * (rest - expert)}


def test_ranks_that_do_not_divide_have_no_experts_in_common() -> None:
    with pytest.raises(ValueError, match="ep=3 does not divide the 4 ranks with the same weights"):
        ParallelLayout(ParallelDims(1, 4, 1), 1, 1, ep=3)


def test_steps_of_experts_are_not_fitted() -> None:
    with pytest.raises(ValueError, match="layers with experts, as experts has them, cannot be fitted"):
        EvenSteps(ClusterPrices(NODES, Workload(shape=EXPERTS, global_batch=8)))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"experts": 0, "shared_width": 0, "dense_layers": 0, "expert_width": 0}, "need experts"),
        ({"experts_per_token": 9}, "1 to 8 of experts=8, but experts_per_token=9"),
        ({"dense_layers": 4}, "dense_layers=4 leaves none of its 4 layers"),
        ({"shared_width": -1}, "cannot be negative"),
    ],
)
def test_experts_that_cannot_be_are_refused(fields: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(EXPERTS, **fields)


def test_configurations_of_transformers_are_read() -> None:
    transformers = pytest.importorskip("transformers")
    size = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "intermediate_size": 96, "max_position_embeddings": 32, "head_dim": 16,
    }  # fmt: skip
    mixtral = transformers.MixtralConfig(**size, num_local_experts=4, num_experts_per_tok=2)
    qwen = transformers.Qwen3MoeConfig(
        **size, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[]
    )
    latent = {
        "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 100, "intermediate_size": 96, "max_position_embeddings": 32, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1,
        "topk_group": 1,
    }  # fmt: skip
    v2 = transformers.DeepseekV2Config(**latent, q_lora_rank=None)
    v3 = transformers.DeepseekV3Config(**latent, q_lora_rank=20)
    for config in (mixtral, qwen, v2, v3):
        import torch

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        shape = shape_from_config(config.to_dict(), config.model_type)
        assert shape.experts == (8 if config is not mixtral else 4)
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    partly = qwen.to_dict() | {"decoder_sparse_step": 2}
    with pytest.raises(ValueError, match="some of its layers alone"):
        shape_from_config(partly, "qwen")
