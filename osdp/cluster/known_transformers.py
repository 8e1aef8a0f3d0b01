"""Transformer shapes by model name, from a Hugging Face Transformers configuration, or from dimensions."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from osdp.cluster.transformer import TransformerShape
from osdp.codec import quote, read_json


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=50257, positions=1024
    )


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    inner: int,
    *,
    keys: int = 0,
    sequence: int = 4096,
    vocabulary: int = 32000,
    rotary_base: int = 0,
) -> TransformerShape:
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary,
        feed_forward=inner, kv_heads=keys, gated=True, biases=False, tied=False, rotary_base=rotary_base,
        dropout=False,
    )  # fmt: skip


def _t5(name: str, layers: int, hidden: int, heads: int, inner: int, width: int = 64) -> TransformerShape:
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, sequence=512, vocabulary=32128,
        feed_forward=inner, head_width=width, biases=False, causal=False, decoder_layers=layers,
    )  # fmt: skip


#: Length, vocabulary and base of rotary positions of Llama 3 (Grattafiori et al., 2024, table 3).
_LLAMA3 = {"sequence": 8192, "vocabulary": 128256, "rotary_base": 500_000}


def _experts(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    widths: tuple[int, int],
    experts: tuple[int, int],
    vocabulary: int,
) -> TransformerShape:
    """Like Llama, with ``experts`` in a layer and per token, and widths inside dense blocks and experts."""
    return TransformerShape(
        name=name, layers=layers, hidden=hidden, heads=heads, feed_forward=widths[0],
        expert_width=widths[1], experts=experts[0], experts_per_token=experts[1], gated=True,
        vocabulary=vocabulary, biases=False, tied=False, dropout=False, sequence=4096,
    )  # fmt: skip


def _latent(shape: TransformerShape, shared: int, dense: int, query_latent: int = 0) -> TransformerShape:
    """With the latent attention of DeepSeek-V2 and V3, shared experts and dense layers."""
    return replace(
        shape, kv_latent=512, head_width=128, rotary_width=64, value_width=128, query_latent=query_latent,
        shared_width=shared, dense_layers=dense,
    )  # fmt: skip


#: Published models: GPT-2 (Radford et al., 2019, table 2), GPT-3 (Brown et al., 2020, table 2.1), BERT
#: (Devlin et al., 2019), Llama 2 (Touvron et al., 2023) and 3 (Grattafiori et al., 2024, table 3), T5
#: (Raffel et al., 2020), Mixtral (Jiang et al., arXiv:2401.04088, table 1), DeepSeekMoE (Dai et al.,
#: arXiv:2401.06066, appendix A), DeepSeek-V2 (arXiv:2405.04434, section 3.1.2 and appendix B) and V3
#: (arXiv:2412.19437, section 4.2, without its module that predicts a second token) and Qwen3 (Qwen Team,
#: arXiv:2505.09388, table 2; widths from the models' own configurations).
SHAPES: dict[str, TransformerShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        replace(_gpt2("gpt3-175b", 96, 12288, 96), sequence=2048, positions=2048),
        TransformerShape(
            name="bert-large", layers=24, hidden=1024, heads=16, sequence=512, vocabulary=30522,
            positions=512,
            causal=False,
        ),
        _llama("llama2-7b", 32, 4096, 32, 11008),
        _llama("llama2-13b", 40, 5120, 40, 13824),
        _llama("llama2-70b", 80, 8192, 64, 28672, keys=8),
        _llama("llama3-8b", 32, 4096, 32, 14336, keys=8, **_LLAMA3),
        _llama("llama3-70b", 80, 8192, 64, 28672, keys=8, **_LLAMA3),
        replace(
            _experts("mixtral-8x7b", 32, 4096, 32, (14336, 14336), (8, 2), 32000),
            kv_heads=8, rotary_base=1_000_000,
        ),
        replace(
            _experts("deepseek-moe-16b", 28, 2048, 16, (10944, 1408), (64, 6), 102400),
            shared_width=2 * 1408, dense_layers=1,
        ),
        _latent(
            _experts("deepseek-v2-lite", 27, 2048, 16, (10944, 1408), (64, 6), 102400), 2 * 1408, 1
        ),
        _latent(
            _experts("deepseek-v2", 60, 5120, 128, (12288, 1536), (160, 6), 102400), 2 * 1536, 1, 1536
        ),
        _latent(_experts("deepseek-v3", 61, 7168, 128, (18432, 2048), (256, 8), 129280), 2048, 3, 1536),
        replace(
            _experts("qwen3-30b-a3b", 48, 2048, 32, (6144, 768), (128, 8), 151936),
            kv_heads=4, head_width=128, rotary_base=1_000_000, head_norms=True,
        ),
        replace(
            _experts("qwen3-235b-a22b", 94, 4096, 64, (12288, 1536), (128, 8), 151936),
            kv_heads=4, head_width=128, rotary_base=1_000_000, head_norms=True,
        ),
        _t5("t5-large", 24, 1024, 16, 4096),
        _t5("t5-3b", 24, 1024, 32, 16384, 128),
    )
}  # fmt: skip

#: Field names of Transformers configurations for each field of a shape; the first one present counts.
_FIELDS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"),
    "vocabulary": ("vocab_size",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim", "d_kv"),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx"),
    "decoder_layers": ("num_decoder_layers",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size",),
    "shared_width": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "kv_latent": ("kv_lora_rank",),
    "query_latent": ("q_lora_rank",),
    "rotary_width": ("qk_rope_head_dim",),
    "value_width": ("v_head_dim",),
}

#: Fields of a shape that are there for latent attention alone.
_OF_LATENTS = ("query_latent", "rotary_width", "value_width")

#: Fields of a shape that are there for layers with experts alone.
_OF_EXPERTS = ("experts", "experts_per_token", "expert_width", "shared_width", "dense_layers")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of a Transformers ``model_type`` that its configuration does not contain.

    Attributes:
        needed: Fields of the shape, or keys of its configuration, without which its class of configurations
            takes those of one published model; :data:`_MAY_BE_NONE` among them say so by ``null``.
    """

    gated: bool = False
    biases: bool = True
    qkv_biases: bool = False
    learnt_positions: bool = True
    tied: bool = True
    causal: bool = True
    dropout: bool = True
    head_norms: bool = False
    needed: tuple[str, ...] = ()


def _like_llama(*needed: str, **others: bool) -> _Kind:
    plain = {"gated": True, "biases": False, "learnt_positions": False, "tied": False, "dropout": False}
    return _Kind(**(plain | others), needed=("feed_forward", *needed))


#: What a configuration may have as ``null``: no latent of queries or shared experts, heads as usual.
_MAY_BE_NONE = ("query_latent", "n_shared_experts", "kv_heads", "head_width")
_EXPERTS = ("experts", "experts_per_token")
_DEEPSEEK = (*_EXPERTS, "expert_width", "n_shared_experts", "dense_layers")
_LATENTS = ("kv_latent", "query_latent", "qk_nope_head_dim", "rotary_width", "value_width")
_KINDS = {
    **dict.fromkeys(("gpt2", "gpt_neo"), _Kind()),
    "opt": _Kind(needed=("feed_forward",)),
    "gptj": _Kind(learnt_positions=False, tied=False),
    **dict.fromkeys(("bert", "roberta"), _Kind(causal=False, needed=("feed_forward",))),
    "t5": _Kind(biases=False, learnt_positions=False, causal=False, needed=("feed_forward", "head_width")),
    "llama": _like_llama(),
    "mistral": _like_llama("kv_heads"),
    "qwen2": _like_llama("kv_heads", qkv_biases=True),
    "mixtral": _like_llama("kv_heads", *_EXPERTS),
    "qwen2_moe": _like_llama("kv_heads", *_EXPERTS, "expert_width", "shared_width", qkv_biases=True),
    "olmoe": _like_llama(*_EXPERTS),
    "deepseek": _like_llama(*_DEEPSEEK),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _like_llama(*_DEEPSEEK, *_LATENTS)),
    "qwen3": _like_llama("kv_heads", "head_width", head_norms=True),
    "qwen3_moe": _like_llama("kv_heads", *_EXPERTS, "expert_width", head_norms=True),
    **dict.fromkeys(("gemma", "gemma2"), _like_llama("kv_heads", "head_width", tied=True)),
}


def shape_of(model: str, overrides: Mapping[str, Any] | None = None) -> TransformerShape:
    """Look up the shape of a model.

    Args:
        model: A name in :data:`SHAPES`, or a JSON file with a Transformers configuration or the fields of a
            :class:`TransformerShape`.
        overrides: Fields of the shape to change.

    Raises:
        ValueError: The model or a field is unknown; the message lists the known ones and the closest match;
            or learnt positions are fewer than the sequence.
    """
    if model.endswith(".json"):
        content = read_json(model)
        if not isinstance(content, dict):
            raise ValueError(f"{model}: must be a JSON object with a configuration, got {quote(content)}")
        try:
            shape = shape_from_config(content, Path(model).stem, (overrides or {}).get("sequence"))
        except (TypeError, ArithmeticError, LookupError) as error:  # fields with values that are no numbers
            raise ValueError(f"{model}: {error}") from error
    elif model in SHAPES:
        shape = SHAPES[model]
    else:
        close = difflib.get_close_matches(model, SHAPES, n=1, cutoff=0.3)
        raise ValueError(
            f"unknown model {model!r}; there are {', '.join(SHAPES)}"
            + (f"; did you mean {close[0]}?" if close else "")
            + " A JSON file with a configuration is accepted as well"
        )
    made = with_fields(shape, overrides or {})
    if 0 < made.positions < made.sequence:
        raise ValueError(
            f"{made.name} has {made.positions} learnt positions, fewer than its sequence of {made.sequence}: "
            f"pass a shorter sequence, or positions={made.sequence} if the model is to have more"
        )
    return made


def with_fields(shape: TransformerShape, overrides: Mapping[str, Any]) -> TransformerShape:
    """A copy of the shape with some fields changed.

    Raises:
        ValueError: A field is unknown, or has the wrong type.
    """
    known = [field.name for field in dataclass_fields(TransformerShape)]
    if unknown := sorted(set(overrides) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        meant = f"; did you mean {near[0]}" if near else ""
        raise ValueError(f"a model has no {', '.join(unknown)}{meant}; there are {', '.join(known)}")
    return replace(shape, **overrides)


def shape_from_config(config: Mapping[str, Any], name: str, sequence: int | None = None) -> TransformerShape:
    """Make a shape from a Transformers configuration, or from the fields of a shape.

    Args:
        config: The configuration.
        name: Name of the shape if the configuration has none.
        sequence: Tokens per sample if the configuration has none.

    Raises:
        ValueError: A number is missing, or the ``model_type`` is unknown.
    """
    own = {field.name for field in dataclass_fields(TransformerShape)}
    if "layers" in config:
        if unknown_fields := sorted(set(config) - own):
            near = difflib.get_close_matches(unknown_fields[0], sorted(own), n=1)
            raise ValueError(
                f"the dimensions of {name} have no {', '.join(unknown_fields)}"
                + (f"; did you mean {near[0]}?" if near else "")
                + f" There are {', '.join(sorted(own))}"
            )
        return TransformerShape(**{"name": name, **config})
    word = str(config.get("model_type", ""))
    unknown = (
        f"the configuration of {name} has the model_type {word!r}, which is not supported; there are "
        f"{', '.join(_KINDS)}. Specify the fields of a TransformerShape instead ({', '.join(sorted(own))}), "
        "if they describe the model"
    )
    if word and word not in _KINDS:
        raise ValueError(unknown)
    found = {
        field: next(config[key] for key in keys if config.get(key) is not None)
        for field, keys in _FIELDS.items()
        if any(config.get(key) is not None for key in keys)
    }
    if sequence is not None:
        found.setdefault("sequence", sequence)
    kind = _KINDS.get(word, _Kind())
    missing = [
        field for field in (*_ALWAYS, *kind.needed) if field not in found and not _tells(config, field)
    ]
    if missing:
        names = [
            f"{field} ({' or '.join(_FIELDS[field])})" if field in _FIELDS else field for field in missing
        ]
        raise ValueError(
            f"the configuration of {name} lacks {', '.join(names)}; no default is assumed, please add "
            + ("it" if len(missing) == 1 else "them")
            + (" (a sequence is also given by --seq)" if "sequence" in missing else "")
        )
    if word not in _KINDS:
        raise ValueError(unknown)
    _require_every_layer(config, name)
    if not found.get("experts"):
        found = {field: value for field, value in found.items() if field not in _OF_EXPERTS}
    elif config.get("n_shared_experts"):
        width = found.get("expert_width", found.get("feed_forward", 0))
        found["shared_width"] = config["n_shared_experts"] * width
    if found.get("kv_latent"):
        # What transformers calls head_dim is there the part with rotary positions.
        found["head_width"] = config.get("qk_nope_head_dim", 0)
    else:
        found = {field: value for field, value in found.items() if field not in _OF_LATENTS}
    if not config.get("is_encoder_decoder"):
        found.pop("decoder_layers", None)
    elif "decoder_layers" not in found:
        found["decoder_layers"] = config.get("decoder_layers", found["layers"])
    return TransformerShape(
        name=str(config.get("name", name)),
        **found,
        gated=kind.gated or str(config.get("feed_forward_proj", "")).startswith("gated"),
        biases=kind.biases,
        qkv_biases=kind.qkv_biases,
        positions=found["sequence"] if kind.learnt_positions else 0,
        tied=bool(config.get("tie_word_embeddings", kind.tied)),
        causal=kind.causal,
        head_norms=kind.head_norms,
        rotary_base=_rotary_base(config),
        dropout=_has_dropout(config, kind.dropout),
    )


#: Fields of a shape that every configuration must tell.
_ALWAYS = ("layers", "hidden", "heads", "vocabulary", "sequence")


def _tells(config: Mapping[str, Any], field: str) -> bool:
    """Whether a configuration has a value for ``field``, or ``null`` where that says that there is none."""
    values = [config[key] for key in _FIELDS.get(field, (field,)) if key in config]
    return bool(values) and (field in _MAY_BE_NONE or any(value is not None for value in values))


def _require_every_layer(config: Mapping[str, Any], name: str) -> None:
    """Check that no layers but the first are without experts, which a shape does not tell."""
    given = {key: config.get(key) for key in ("decoder_sparse_step", "moe_layer_freq", "mlp_only_layers")}
    odd = [f"{key}={quote(value)}" for key, value in given.items() if value not in (None, 1, [])]
    if odd:
        raise ValueError(f"{name} has experts in some of its layers alone ({', '.join(odd)}): not supported")


#: Of Su et al. (RoFormer, arXiv:2104.09864), and what frameworks take unless they are told otherwise.
_USUAL_ROTARY_BASE = 10_000


def _rotary_base(config: Mapping[str, Any]) -> int:
    """Base of rotary positions, 0 if it is the usual one; transformers 5 has it one level deeper."""
    inner = config.get("rope_parameters")
    found = inner.get("rope_theta") if isinstance(inner, Mapping) else None
    found = found or config.get("rope_theta") or 0
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"rope_theta must be a number, got {quote(found)}")
    base = int(found)
    return 0 if base == _USUAL_ROTARY_BASE else base


#: Fields of Transformers configurations that are probabilities of a dropout inside layers.
_DROPOUTS = (
    "attn_pdrop", "resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout",
    "dropout_rate", "attention_dropout", "hidden_dropout", "resid_dropout",
)  # fmt: skip


def _has_dropout(config: Mapping[str, Any], usual: bool) -> bool:
    """Whether any is above 0; as is usual for the kind of model if none is told."""
    told = [float(config[name]) for name in _DROPOUTS if isinstance(config.get(name), (int, float))]
    return any(probability > 0 for probability in told) if told else usual
