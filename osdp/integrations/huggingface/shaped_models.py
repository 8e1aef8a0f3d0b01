"""Builds the model that a TransformerShape describes, from the transformers class with that architecture."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from osdp.cluster.transformer import TransformerShape
from osdp.integrations.huggingface.models import language_model, token_batch
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.tracing.tensor_parallel.derive import PROVEN_TOKENS, derive, with_sizes_of

_INSTEAD = "give a JSON file of its configuration, or a folder that osdp profile wrote, as --model"

#: Relative difference allowed between the parameters of a model and those counted by its shape, which leaves
#: out norms, token types and heads of encoders.
_BESIDE = 0.03

#: Channels of a head in the narrow model on which tensor parallelism is proven.
_PROVEN_WIDTH = 8

#: Properties of a shape that a model family fixes, with the allowed values.
_BUILT: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"biases": (True,), "learnt positions": (True,), "kv_heads": (0,), "head_width": (0,)},
    "bert": {"biases": (True,), "learnt positions": (True,), "kv_heads": (0,), "head_width": (0,),
             "gated": (False,)},
    "t5": {"biases": (False,), "learnt positions": (False,), "kv_heads": (0,)},
    "llama": {"learnt positions": (False,)},
}  # fmt: skip


def model_of_shape(shape: TransformerShape) -> nn.Module:
    """Make a model of ``shape`` with its parameters on the meta device, without dropout.

    Raises:
        ValueError: No supported class has this architecture.
    """
    model = blocks_of_shape(shape, shape.layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    if abs(count / shape.num_parameters - 1) > _BESIDE:
        raise ValueError(
            f"a {family_of(shape)} with the dimensions of {shape.name} has {count} parameters, but the shape "
            f"has {shape.num_parameters}; {_INSTEAD}"
        )
    return model


def blocks_of_shape(shape: TransformerShape, layers: int) -> nn.Module:
    """The model of :func:`model_of_shape` with ``layers`` layers; its parameters are not counted.

    Raises:
        ValueError: No supported class has this architecture.
    """
    family = family_of(shape)
    return language_model(family, _fields(family, replace(shape, layers=layers)))


def tensor_plan_of_shape(
    model: nn.Module, shape: TransformerShape, degree: int, *, sequence_parallel: bool
) -> TensorParallelPlan:
    """How tensor-parallel ranks share a model of :func:`model_of_shape`.

    Proven on few tokens and, unless a width is not divisible or the vocabulary is too small to be sharded, on
    a narrow model of the same class with as many layers and heads: the same computation on GPT-3's own
    weights takes 14 GiB and a minute.

    Args:
        model: The model.
        shape: Its shape.
        degree: Number of ranks.
        sequence_parallel: Whether they share the sequence, too.

    Raises:
        ValueError: They cannot share its heads, or its feed-forward blocks.
    """
    batch = token_batch(1, min(PROVEN_TOKENS * degree, shape.sequence))
    if shape.inner % degree or shape.vocabulary < shape.hidden:
        # A narrow model does not show that a width is not divisible, or a vocabulary too small to be sharded.
        return derive(model, batch, degree, sequence_parallel=sequence_parallel)
    hidden = _PROVEN_WIDTH * shape.heads
    width = _PROVEN_WIDTH if shape.head_width else 0
    narrow = replace(shape, hidden=hidden, head_width=width, feed_forward=2 * hidden * degree)
    small = blocks_of_shape(narrow, shape.layers)
    plan = derive(small, batch, degree, sequence_parallel=sequence_parallel)
    return with_sizes_of(plan, model)


def family_of(shape: TransformerShape) -> str:
    """The ``model_type`` with the architecture of ``shape``: GPT-2, Llama, BERT or T5.

    Raises:
        ValueError: None has it; the message names the differences to the most similar one.
    """
    if shape.kv_latent or shape.head_norms:
        odd = "latent attention" if shape.kv_latent else "norms of queries and keys"
        raise ValueError(f"no class that is built from dimensions alone has {odd}: {_INSTEAD}")
    family = "llama" if shape.gated else "gpt2"
    if shape.decoder_layers or not shape.causal:
        family = "t5" if shape.decoder_layers else "bert"
    has = {
        "biases": shape.biases,
        "learnt positions": shape.positions > 0,
        "kv_heads": 0 if shape.key_heads == shape.heads else shape.key_heads,
        "head_width": 0 if shape.width * shape.heads == shape.hidden else shape.width,
        "gated": shape.gated,
    }
    faults = [
        f"{name}={has[name]} where a {family} has {allowed[0]}"
        for name, allowed in _BUILT[family].items()
        if has[name] not in allowed
    ]
    if faults:
        raise ValueError(
            f"no supported class of transformers has the architecture of {shape.name}: {', '.join(faults)}; "
            f"{_INSTEAD}"
        )
    return family


def _fields(family: str, shape: TransformerShape) -> Mapping[str, Any]:
    """Configuration fields of the family for ``shape``."""
    if family == "t5":
        return {
            "num_layers": shape.layers, "num_decoder_layers": shape.decoder_layers, "d_model": shape.hidden,
            "num_heads": shape.heads, "d_kv": shape.width, "d_ff": shape.inner,
            "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied,
            "feed_forward_proj": "gated-gelu" if shape.gated else "relu", "dropout_rate": 0.0,
        }  # fmt: skip
    if family == "gpt2":
        return {
            "n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_inner": shape.inner,
            "vocab_size": shape.vocabulary, "n_positions": max(shape.positions, shape.sequence),
            "tie_word_embeddings": shape.tied, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    fields: dict[str, Any] = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads, "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary, "max_position_embeddings": max(shape.positions, shape.sequence),
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if family == "bert":
        return {**fields, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    more = {"num_key_value_heads": shape.key_heads, "head_dim": shape.width, "attention_bias": shape.biases}
    return {**fields, **more, "mlp_bias": shape.biases}
