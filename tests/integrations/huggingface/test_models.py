"""Models of transformers whose head computes the loss."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from osdp import LMHeadLoss
from osdp.integrations.huggingface import (
    HEAD_LOSS_MODELS,
    causal_lm,
    causal_lm_loss,
    masked_lm_loss,
    with_head_loss,
)
from osdp.integrations.huggingface.models import language_model

pytest.importorskip("transformers")

_SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 8},
}
_SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


def _model(kind: str, **fields: Any) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {} if kind == "gpt2" else {**_SHAPE}
    if kind in ("llama", "mistral", "qwen2", "qwen3"):
        shape["num_key_value_heads"] = 1
    shape |= {"vocab_size": 50, "max_position_embeddings": 16, "pad_token_id": 0, "intermediate_size": 24}
    config = CONFIG_MAPPING[kind](**{**shape, **_SHAPES.get(kind, {}), "use_cache": False, **fields})
    return AutoModelForCausalLM.from_config(config).double().eval()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 5:] = -100
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("kind", HEAD_LOSS_MODELS)
def test_loss_and_gradients_are_those_of_the_logits(kind: str) -> None:
    plain = _model(kind)
    sliced = with_head_loss(copy.deepcopy(plain), num_slices=7)
    assert list(sliced.state_dict()) == list(plain.state_dict())
    wanted, got = plain(**_batch()).loss, sliced(**_batch()).loss
    # transformers takes its logits to float32 before the loss.
    torch.testing.assert_close(got, wanted.double(), rtol=1e-6, atol=0)
    wanted.backward()
    got.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert [name for name, _ in sliced.named_parameters()] == list(gradients)
    for name, parameter in sliced.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


def test_tied_weights_stay_tied_when_tied_again() -> None:
    model = with_head_loss(_model("gpt2"))
    model.tie_weights()  # type: ignore[operator]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore


def test_the_sum_over_a_larger_batch_is_divided_by_its_count() -> None:
    plain, batch = _model("llama"), {**_batch(), "num_items_in_batch": 100}
    wanted = plain(**batch).loss
    got = with_head_loss(plain)(**batch).loss
    torch.testing.assert_close(got, wanted.double(), rtol=1e-6, atol=0)


def test_models_that_scale_their_logits_are_refused() -> None:
    scaled = causal_lm("gemma2", {**_SHAPE, "vocab_size": 50, "head_dim": 8, "num_key_value_heads": 1})
    with pytest.raises(ValueError, match=r"a Gemma2ForCausalLM is not .* gpt2, .*osdp\.LMHeadLoss"):
        with_head_loss(scaled)
    with pytest.raises(ValueError, match="a Linear is not"):
        with_head_loss(nn.Linear(2, 2))


def test_a_model_that_has_it_is_refused_again_and_wants_labels() -> None:
    model = with_head_loss(_model("qwen2"))
    assert isinstance(model.get_output_embeddings(), LMHeadLoss)  # type: ignore[operator]
    with pytest.raises(ValueError, match="already"):
        with_head_loss(model)
    with pytest.raises(ValueError, match="labels are needed"):
        model(input_ids=_batch()["input_ids"])
    # Models differ in what comes second.
    with pytest.raises(TypeError, match="positional"):
        model(_batch()["input_ids"], _batch()["attention_mask"])
    assert model.config.model_type == "qwen2"


def test_a_tuple_may_be_asked_for_and_a_second_head_is_not_dropped() -> None:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    asked = with_head_loss(_model("gpt2"))(**_batch(), return_dict=False).loss
    assert asked == with_head_loss(_model("gpt2"))(**_batch()).loss
    with pytest.raises(ValueError, match="a GPT2DoubleHeadsModel is not"):
        with_head_loss(GPT2DoubleHeadsModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)))


def test_the_loss_as_sum_and_count_is_that_of_the_model() -> None:
    model, batch = _model("gpt2"), _batch()
    wanted = model(**batch).loss
    labels = batch.pop("labels")
    total, count = causal_lm_loss(model(**batch), labels)
    # The first label of each sample has no position that predicts it.
    assert count.item() == (labels[:, 1:] != -100).sum().item()
    torch.testing.assert_close((total / count).to(wanted.dtype), wanted)
    torch.testing.assert_close(causal_lm_loss(model(**batch).logits, labels)[0], total)


def test_positions_of_masked_models_predict_their_own_labels() -> None:
    labels = torch.tensor([[3, -100, 1]])
    logits = torch.randn(1, 3, 5)
    total, count = masked_lm_loss(logits, labels)
    assert count.item() == 2
    chosen = -logits.log_softmax(-1)[0, [0, 2], [3, 1]].sum()
    torch.testing.assert_close(total, chosen)
    assert [x.item() for x in masked_lm_loss(logits, torch.full((1, 3), 9), ignore_index=9)] == [0, 0]


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"logits of shape \(2, 3, 5\) need labels of shape \(2, 3\), got \(2, 4\)"
    ):
        causal_lm_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))


def test_a_written_configuration_of_an_encoder_decoder_is_read_again() -> None:
    small = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 64}
    written = language_model("t5", small).config.to_dict()
    written.pop("model_type")
    # The class has no such field until it is set.
    assert written["decoder_start_token_id"] == 0
    again = language_model("t5", written)
    assert again.config.decoder_start_token_id == 0 and again.config.d_model == 32
