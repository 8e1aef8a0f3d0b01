"""Sequences in slices: gradients against a single process that takes them whole; refusals."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp import OSDP, ModelDesc, Training, codec
from osdp.comm.objects import on_first_rank
from osdp.integrations.huggingface import causal_lm_loss, masked_lm_loss
from osdp.plan.dims import ParallelDims
from osdp.plan.search_options import SearchOptions
from osdp.plan.shard_math import slice_bounds
from osdp.plan.sharding import Mode
from osdp.plan.token_slices import TokenSlices
from osdp.profiler.roofline import estimate
from osdp.runtime.token_slices.kv_prefix import Prefix
from osdp.search.pipeline.planner import plan_at
from osdp.search.sharding.planner import Candidate
from osdp.tracing.dataflow import trace_flow
from tests.helpers import distributed
from tests.helpers.plans import plan_by_hand
from tests.runtime.pipeline.test_apply import devices, whole

pytest.importorskip("transformers")

import transformers

from osdp.integrations.huggingface.slice_cache import SliceCache, check_sliceable
from osdp.integrations.huggingface.token_loss import check_by_position, next_token_labels
from osdp.integrations.huggingface.token_step import Slicer
from osdp.plan.plan import Plan
from tests.helpers import transformer_models

DECODERS = ("gpt2", "gpt_neo", "gptj", "opt", "llama", "qwen2", "mistral")
SAMPLES, LENGTH, PARTS = 4, 9, 2
UNEVEN, EVEN, SINGLE, WHOLE = ([1, 6, 2], "gpipe"), (3, "1f1b"), (9, "1f1b"), (1, "gpipe")


def decoder(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = transformer_models.build(name).to(dtype)
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


def batch(name: str, *, left: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs, whose last sample is padded on one side, and labels."""
    inputs = transformer_models.batch_of(name, samples=SAMPLES)
    labels = inputs.pop("labels")
    if left:
        inputs["attention_mask"], labels = inputs["attention_mask"].flip(1), labels.flip(1)
        # What a padded position says is nobody's business: it looks at nothing.
        labels[:, 1:][inputs["attention_mask"][:, :-1] == 0] = -100
    return inputs, labels


def reference(
    name: str, inputs: dict[str, torch.Tensor], labels: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a process that has all; scaled at the end, as steps do."""
    model = decoder(name, dtype)
    total, count = causal_lm_loss(model(**inputs), labels)
    total.backward()
    gradients = {name: p.grad / count for name, p in model.named_parameters(remove_duplicate=False)}
    return float(total.detach() / count), gradients


def plan_of(
    name: str,
    layout: ParallelDims,
    mode: Mode = Mode.NO_SHARD,
    computed: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """A plan with stages of as many steps, as text; made once for all ranks."""
    model, device = decoder(name, dtype), devices(layout.dp)
    samples = SAMPLES // PARTS // layout.dp
    training = Training(local_batch=samples, microbatches=PARTS, param_dtype=computed)
    sample = {key: value[:samples] for key, value in batch(name)[0].items()}
    model_desc, flow = ModelDesc.from_module(model, sample), trace_flow(model, sample)
    bounds = [*slice_bounds(len(flow.steps), layout.pp)]
    candidate = Candidate(training, estimate(model_desc, device, training))
    cuts = (0, *(stop for _, stop in bounds))
    rules = SearchOptions(allowed=(mode,))
    return codec.to_json(plan_at(cuts, model_desc, flow, candidate, device, rules, layout, "1f1b"))


def staged(name: str, plan: str, dtype: torch.dtype = torch.float32) -> OSDP:
    return OSDP(decoder(name, dtype), plan=codec.from_json(Plan, plan))


def wrapped(name: str, **options: Any) -> OSDP:
    """Without stages, or with layers that ranks share."""
    dp = dist.get_world_size() // (options.get("pp", 1) * options.get("tp", 1))
    sample = {key: value[: SAMPLES // PARTS // dp] for key, value in batch(name)[0].items()}
    training = Training(local_batch=SAMPLES // PARTS // dp, microbatches=PARTS)
    model = decoder(name)
    model_desc = on_first_rank(partial(ModelDesc.from_module, model, sample))
    profile = estimate(model_desc, devices(dp), training)
    return OSDP(model, model_desc, devices(dp), training=training, profile=profile, **options)


def mine(model: OSDP, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The samples of this data-parallel rank."""
    dp = SAMPLES // model.mesh["dp"].size()
    part = slice(model.mesh["dp"].get_local_rank() * dp, (model.mesh["dp"].get_local_rank() + 1) * dp)
    return {key: value[part] for key, value in inputs.items()}, labels[part]


def worst(model: OSDP, wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient by its norm; of those that are zero but for rounding, by all."""
    joint = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    found = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = torch.clamp(wanted[name].norm(), min=1e-3 * joint)
        found = max(found, float((whole(parameter.grad) - wanted[name]).norm() / scale))
    return found


def check(
    name: str,
    model: OSDP,
    slicings: Sequence[tuple[Any, str]],
    limit: float,
    *,
    left: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    inputs, labels = batch(name, left=left)
    loss, gradients = reference(name, inputs, labels, dtype)
    own, wanted = mine(model, inputs, labels)
    for slices, schedule in slicings:
        model.zero_grad()
        got = model.train_step(own, wanted, causal_lm_loss, schedule=schedule, token_slices=slices)
        assert abs(float(got) / loss - 1) < max(limit, 1e-6), (name, slices, "loss")
        error = worst(model, gradients)
        assert error < limit, (name, slices, schedule, error)


def slices_of_the_plan(plan: str) -> None:
    made = replace(codec.from_json(Plan, plan), token_slices=TokenSlices((1, 6, 2)))
    model = OSDP(decoder("gpt2"), plan=codec.from_json(Plan, codec.to_json(made)))
    check("gpt2", model, [(None, "gpipe"), (None, "1f1b")], 1e-5)
    inputs, labels = mine(model, *batch("gpt2"))
    model.zero_grad()
    with pytest.raises(ValueError, match=r"slices \[1, 6, 2\] add up to 9 tokens, and the sequence has 8"):
        model.train_step({key: value[:, :8] for key, value in inputs.items()}, labels[:, :8], causal_lm_loss)


def test_a_plan_says_how_sequences_are_cut() -> None:
    distributed.run(2, slices_of_the_plan, plan_of("gpt2", ParallelDims(2, 1, 1)))


def decoders_in_two_stages(plans: dict[str, str], exact: dict[str, str], low: str) -> None:
    for name, plan in plans.items():
        model = staged(name, plan)
        check(name, model, (UNEVEN, EVEN), 1e-5)
        check(name, model, (EVEN,), 1e-5, left=True)
    for name, plan in exact.items():
        model = staged(name, plan, torch.float64)
        check(name, model, (UNEVEN, EVEN, SINGLE, WHOLE), 1e-12, dtype=torch.float64)
    check("llama", staged("llama", low), (EVEN,), 0.05)
    check("gpt2", wrapped("gpt2", dp=2, strategy="FULL_SHARD"), (UNEVEN,), 1e-5)


def test_slices_give_the_gradients_of_whole_sequences_on_every_decoder() -> None:
    plans = {name: plan_of(name, ParallelDims(2, 1, 1)) for name in DECODERS}
    low = plan_of("llama", ParallelDims(2, 1, 1), computed="bfloat16")
    exact = {name: plan_of(name, ParallelDims(2, 1, 1), dtype=torch.float64) for name in ("gpt2", "mistral")}
    distributed.run(2, decoders_in_two_stages, plans, exact, low, timeout=120)


def beside_other_axes(sharded: str, four: str) -> None:
    check("gpt2", staged("gpt2", sharded), (UNEVEN, EVEN), 1e-5)
    check("llama", staged("llama", four), (EVEN,), 1e-5)
    check("qwen2", wrapped("qwen2", pp=2, tp=2, schedule="1f1b"), (EVEN,), 1e-5)


def test_slices_beside_data_and_tensor_parallelism() -> None:
    sharded = plan_of("gpt2", ParallelDims(2, 2, 1), Mode.FULL_SHARD)
    distributed.run(4, beside_other_axes, sharded, plan_of("llama", ParallelDims(4, 1, 1)), timeout=120)


# -- recomputation, memory ---------------------------------------------------------------------------------


def recomputed(plan: str) -> None:
    model = staged("gpt2", plan)
    assert any(stage.sharding.recomputed for stage in model.plan.stages)
    check("gpt2", model, (UNEVEN, EVEN), 1e-5)


def test_recomputation_finds_the_keys_and_values_of_before_the_slice() -> None:
    plan = codec.from_json(Plan, plan_of("gpt2", ParallelDims(1, 1, 1)))
    plan = plan.with_sharding(recomputed=("transformer.h.0", "transformer.h.1"))
    distributed.run(1, recomputed, codec.to_json(plan))


def test_gradients_of_keys_and_values_are_kept_once_for_all_slices() -> None:
    model = decoder("llama")
    prefix, tokens = Prefix(SliceCache.of(model)()), torch.ones(1, 8, dtype=torch.int64)
    passes = []
    for _ in range(4):
        call = partial(model, input_ids=tokens[:, :2])
        passes.append(prefix.forward(lambda more, call=call: call(**more).logits.sum(), 2))
    held: set[int] = set()
    for keys, loss in reversed(passes):
        roots = list(prefix.roots(keys))
        held |= {gradient.untyped_storage().data_ptr() for _, gradient in roots}
        prefix.collect(keys)
        tensors, gradients = zip((loss, None), *roots, strict=True)
        torch.autograd.backward(tensors, gradients)
        assert all(leaf.grad is None for pair in keys.past.values() for leaf in pair)
    # Keys and values of two layers, whatever the number of slices.
    assert len(held) == 4


def test_keys_and_values_of_all_slices_lie_in_one_tensor_each() -> None:
    """Joined anew for each slice they took (M + 1) / 2 times the memory of M slices."""
    model = decoder("llama")
    prefix, tokens = Prefix(SliceCache.of(model)(8)), torch.ones(SAMPLES, 2, dtype=torch.int64)
    passes = [prefix.forward(lambda more: model(input_ids=tokens, **more), 2) for _ in range(4)]
    held = [tensor for keys, _ in passes for pair in keys.held.values() for tensor in pair]
    assert len(held) == 4 * 4 and held[-1].shape[-2] == 8
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert list(stored.values()) == [held[-1].nbytes] * 4


def test_what_is_recomputed_finds_the_length_that_it_found_first() -> None:
    """Attention of Llama 4 asks for it, and scaled the queries of other positions."""
    model, tokens = decoder("llama"), torch.ones(1, 4, dtype=torch.int64)
    prefix = Prefix(SliceCache.of(model)(8))
    found: list[Any] = []
    for _ in range(2):
        keys, _loss = prefix.forward(lambda more: model(input_ids=tokens, **more).logits.sum(), 4)
        found.append(keys)
    assert [[keys.get_seq_length(layer) for layer in (0, 1)] for keys in found] == [[0, 0], [4, 4]]
    assert [keys.held[1][0].shape[-2] for keys in found] == [4, 8]


def test_frozen_layers_take_no_gradients_of_keys_and_values() -> None:
    """They saved their activations for it, from the second slice on."""
    model: Any = decoder("llama", torch.float64)
    model.requires_grad_(False)
    trained = list(model.model.layers[1].requires_grad_(True).parameters())
    tokens = torch.randint(3, 257, (1, 8), generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(model(input_ids=tokens).logits.square().sum(), trained)
    prefix = Prefix(SliceCache.of(model)(8))
    passes = []
    for part in tokens.split(4, dim=1):
        call = partial(model, input_ids=part)
        passes.append(prefix.forward(lambda more, call=call: call(**more).logits.square().sum(), 4))
    past = passes[1][0].past
    assert [[leaf.requires_grad for leaf in past[layer]] for layer in (0, 1)] == [[False] * 2, [True] * 2]
    for keys, loss in reversed(passes):
        roots = list(prefix.roots(keys))
        prefix.collect(keys)
        tensors, gradients = zip((loss, None), *roots, strict=True)
        torch.autograd.backward(tensors, gradients)
    for parameter, gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_slices_of_a_shared_sequence_can_be_shared() -> None:
    slicer, inputs = Slicer(decoder("gpt2"), shared_by=2), {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
    assert slicer.slicing(inputs, 3).slices.lengths == (4, 2, 2)
    with pytest.raises(ValueError, match=r"slices of \[3, 5\] tokens cannot be shared by 2"):
        slicer.slicing(inputs, [3, 5])
    with pytest.raises(ValueError, match="one token cannot be shared"):
        slicer.request(inputs["input_ids"], 2, None)


def other_slices() -> None:
    model = wrapped("gpt2", strategy="FULL_SHARD")
    inputs, labels = mine(model, *batch("gpt2"))
    # Also in a later step: ranks may pad their batches to other lengths.
    model.train_step(inputs, labels, causal_lm_loss, token_slices=2)
    model.zero_grad()
    with pytest.raises(ValueError, match=r"differ in the number of token slices: .* to "):
        model.train_step(inputs, labels, causal_lm_loss, token_slices=2 + dist.get_rank())


def test_ranks_that_cut_unlike_are_refused() -> None:
    distributed.run(2, other_slices)


# -- what is refused -----------------------------------------------------------------------------------------


def mean_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    total, count = causal_lm_loss(output, labels)
    return total / count


def reversed_loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return causal_lm_loss(output.logits.flip(1), labels)


def refusals() -> None:
    model = OSDP(decoder("gpt2"), plan=plan_by_hand(decoder("gpt2"), Mode.NO_SHARD, 1))
    inputs, labels = batch("gpt2")
    step = partial(model.train_step, inputs, labels, num_microbatches=1)
    for slices, message in (
        ([3, 3], "add up to 6 tokens, and the sequence has 9"),
        (10, "a sequence of 9 tokens cannot be cut into 10 slices"),
        ([9, 0], "each has at least one token"),
    ):
        with pytest.raises(ValueError, match=message):
            step(causal_lm_loss, token_slices=slices)
    with pytest.raises(ValueError, match=r"must be a pair \(sum, count\)"):
        step(mean_loss, token_slices=3)
    with pytest.raises(ValueError, match="the loss mixes positions"):
        step(reversed_loss, token_slices=3)
    # Labels of a reply alone: the first positions count for nothing.
    reply = torch.cat([torch.full_like(labels[:, :5], -100), labels[:, 5:]], dim=1)
    with pytest.raises(ValueError, match="the loss mixes positions"):
        model.train_step(inputs, reply, reversed_loss, token_slices=3)
    with pytest.raises(ValueError, match="token slices need loss_fn="):
        step(None, token_slices=3)
    with pytest.raises(ValueError, match="labels cannot be an input of token slices"):
        model.train_step({**inputs, "labels": labels}, labels, causal_lm_loss, token_slices=3)
    packed = {"input_ids": inputs["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])}
    with pytest.raises(ValueError, match="several sequences packed into one"):
        model.train_step(packed, labels, causal_lm_loss, token_slices=3)
    with pytest.raises(ValueError, match="several sequences packed into one"):
        ones = torch.ones_like(inputs["input_ids"])
        model.train_step({**packed, "attention_mask": ones}, labels, causal_lm_loss, token_slices=3)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(samples, 9\)"):
        wide = {**inputs, "attention_mask": torch.ones(SAMPLES, 1, LENGTH, LENGTH)}
        model.train_step(wide, labels, causal_lm_loss, token_slices=3)
    with pytest.raises(ValueError, match=r"targets of shape \(samples, 9\) are needed"):
        model.train_step(inputs, labels[:, :4], partial(by_heart, None), token_slices=3)
    for wrong in (2.5, "3", True):
        with pytest.raises(
            TypeError, match="token_slices is a number of slices, their lengths or TokenSlices"
        ):
            step(causal_lm_loss, token_slices=wrong)
    model.train_step(inputs, next_token_labels(labels), masked_lm_loss, num_microbatches=1, token_slices=3)
    # Also once the loss is proven: on ranks of other stages nothing else would tell.
    with pytest.raises(ValueError, match=r"targets of shape \(samples, 9\) are needed"):
        model.train_step(inputs, labels[:, :4], masked_lm_loss, num_microbatches=1, token_slices=3)


def test_where_nothing_counts_nothing_is_proven() -> None:
    labels = torch.full((1, 40), -100)
    assert not check_by_position(masked_lm_loss, labels, 40, 7)
    labels[0, 3] = 1
    assert check_by_position(masked_lm_loss, labels, 40, 7)


def by_advantage(
    output: Any, targets: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    labels, advantages = targets
    chosen = output.logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(advantages[:, None] * chosen).sum(), torch.tensor(labels.numel())


def test_a_loss_is_tried_on_the_numbers_of_the_samples_that_it_is_tried_on() -> None:
    """The others' came as well: shapes did not match."""
    targets = torch.ones(SAMPLES, LENGTH, dtype=torch.int64), torch.rand(SAMPLES)
    assert check_by_position(by_advantage, targets, LENGTH, 7)


def test_a_loss_is_tried_where_it_will_be_computed() -> None:
    """Targets may come on the CPU, and the loss have weights on the GPU."""
    places: set[str] = set()

    def loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places.update((output.logits.device.type, labels.device.type))
        return torch.zeros(()), torch.tensor(labels.shape[1])

    labels = torch.ones(1, 8, dtype=torch.int64)
    Slicer(decoder("gpt2"), device=torch.device("meta")).loss(loss, labels, 8)
    assert places == {"meta"}


def test_positions_may_jump_at_padding() -> None:
    slicer, mask = Slicer(decoder("gpt2")), torch.tensor([[0, 0, 1, 1]])
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": mask}
    slicer.slicing({**inputs, "position_ids": torch.tensor([[0, 0, 0, 1]])}, 2)
    with pytest.raises(ValueError, match="several sequences packed into one"):
        slicer.slicing({**inputs, "position_ids": torch.tensor([[0, 0, 1, 0]])}, 2)


def by_heart(_: None, output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return causal_lm_loss(output, labels)


def test_slices_and_losses_that_do_not_fit_are_refused() -> None:
    distributed.run(1, refusals)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", r"its attention \(BertSelfAttention\) attends to later tokens, too"),
        ("vit", "attends to later tokens, too"),
        ("t5", "attends to later tokens, too"),
        ("plain", "has no cache like transformers' decoders"),
    ],
)
def test_models_whose_sequences_cannot_be_cut_are_refused_with_the_reason(name: str, reason: str) -> None:
    model = nn.Linear(2, 2) if name == "plain" else transformer_models.build(name)
    with pytest.raises(ValueError, match=reason):
        check_sliceable(model)


def test_what_is_refused_is_what_was_asked_for() -> None:
    slicer, tokens = Slicer(transformer_models.build("bert")), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cannot be cut into token slices: .*; train without token_slices"):
        slicer.slicing({"input_ids": tokens}, 2)
    with pytest.raises(ValueError, match=r"cannot be generated token by token: .*; use predict"):
        slicer.request(tokens, 1, None)


def test_a_cache_that_training_would_drop_is_refused() -> None:
    model: Any = decoder("llama")
    slicer, inputs = Slicer(model), batch("llama")[0]
    model.model.gradient_checkpointing = True
    with pytest.raises(ValueError, match="drops the cache in training"):
        slicer.slicing(inputs, 3)
    check_sliceable(model, trains=False)


def test_a_decoder_that_is_configured_to_look_at_later_tokens_is_refused() -> None:
    model: Any = decoder("llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"\(is_causal=False in its configuration\) attends to later tokens"):
        check_sliceable(model)


def test_recurrent_layers_are_refused_before_the_first_step() -> None:
    """A plan with slices was written, and refused on the cluster."""
    model: Any = decoder("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"caches more than keys and values from token to token \(LinearAtt"):
        check_sliceable(model)
    with pytest.raises(ValueError, match=r"token by token: .*; use predict, or the model's own generate"):
        check_sliceable(model, trains=False)


def test_frequencies_that_depend_on_the_length_are_refused() -> None:
    """The first slices of Phi-3 had the frequencies of short sequences, in silence."""
    sizes: dict[str, Any] = {
        "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
        "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config: Any = transformers.Phi3Config(
        **sizes, max_position_embeddings=32, original_max_position_embeddings=4, rope_parameters=rope
    )
    slicer, tokens = Slicer(transformers.Phi3ForCausalLM(config)), torch.ones(1, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"other rotary frequencies \(longrope\) for inputs of more than 4"):
        slicer.slicing({"input_ids": tokens}, 3)
    assert slicer.slicing({"input_ids": tokens}, [5, 4]).slices.lengths == (5, 4)
    assert slicer.slicing({"input_ids": tokens[:, :4]}, 2).slices.lengths == (2, 2)
    # What is padded has fewer positions: here four, and four in a first slice of six tokens.
    mask = torch.ones_like(tokens)
    for padding, lengths, is_exact in ((5, [6, 3], True), (2, [6, 3], False), (2, [7, 2], True)):
        mask[:, :padding] = 0
        mask[:, padding:] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        if is_exact:
            slicer.slicing(given, lengths)
        else:
            with pytest.raises(ValueError, match="make the first slice longer than 4 tokens, or train"):
                slicer.slicing(given, lengths)
    with pytest.raises(ValueError, match="pass max_new_tokens=2 or fewer"):
        slicer.request(tokens[:, :3], 3, None)
    slicer.request(tokens[:, :3], 2, None)
    slicer.request(tokens[:, :5], 3, None)
    with pytest.raises(ValueError, match="3 tokens of a prompt and max_new_tokens=3 pass token 4"):
        slicer.request(tokens[:, :5], 3, torch.tensor([[0, 0, 1, 1, 1]]))
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=8, rope_parameters=stretched)
    with pytest.raises(ValueError, match=r"\(dynamic\) for inputs of more than 8 .*; train without token"):
        Slicer(transformers.LlamaForCausalLM(config)).slicing({"input_ids": tokens}, [8, 1])
