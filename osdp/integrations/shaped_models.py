"""The model that a shape describes, from the class of transformers that is built like it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from osdp.integrations.huggingface import language_model
from osdp.transformer import TransformerShape

#: Parameters that a model may have beside those its shape counts: norms, types of tokens, heads of encoders.
_BESIDE = 0.03


def model_of_shape(shape: TransformerShape) -> nn.Module:
    """A model of that shape with its parameters on the meta device.

    GPT-2, Llama, BERT or T5, by what the shape says of norms, biases, positions and what a token sees.

    Raises:
        ValueError: None of them is built like that.
    """
    family, fields = _family(shape)
    model = language_model(family, fields)
    count = sum(parameter.numel() for parameter in model.parameters())
    if abs(count / shape.num_parameters - 1) > _BESIDE:
        raise ValueError(
            f"no class of transformers is built like {shape.name}: a {family} of its numbers has {count} "
            f"parameters, the shape {shape.num_parameters}; give the JSON file of its configuration, or a "
            "folder that osdp profile wrote, as --model"
        )
    return model


def _family(shape: TransformerShape) -> tuple[str, Mapping[str, Any]]:
    """The ``model_type`` and the fields of its configuration."""
    if shape.decoder_layers:
        return "t5", {
            "num_layers": shape.layers, "num_decoder_layers": shape.decoder_layers, "d_model": shape.hidden,
            "num_heads": shape.heads, "d_kv": shape.width, "d_ff": shape.inner,
            "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied,
            "feed_forward_proj": "gated-gelu" if shape.gated else "relu",
        }  # fmt: skip
    if not shape.gated and shape.causal:
        return "gpt2", {
            "n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_inner": shape.inner,
            "vocab_size": shape.vocabulary, "n_positions": max(shape.positions, shape.sequence),
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip
    fields: dict[str, Any] = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads, "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary, "max_position_embeddings": max(shape.positions, shape.sequence),
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if not shape.causal:
        return "bert", fields
    more = {"num_key_value_heads": shape.key_heads, "head_dim": shape.width, "attention_bias": shape.biases}
    return "llama", {**fields, **more, "mlp_bias": shape.biases}
