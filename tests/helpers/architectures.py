"""Transformers beyond :mod:`tests.helpers.transformer_models`, in float64, with their batches."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.helpers import transformer_models

VOCAB = 97
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "experts_implementation": "batched_mm",
}  # fmt: skip


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, decoder_start_token_id=1, dropout=0.0,
        suppress_tokens=None, begin_suppress_tokens=None, **_SPECIAL,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16,
        dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=None, **_SPECIAL,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def clip() -> nn.Module:
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": VOCAB, "max_position_embeddings": 16, **_SPECIAL},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return transformers.CLIPModel(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, mask_time_prob=0.0,
        classifier_proj_size=8,
    )  # fmt: skip
    return transformers.Wav2Vec2ForSequenceClassification(config)


def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=VOCAB, embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **_SPECIAL,
    )  # fmt: skip
    return transformers.AlbertForMaskedLM(config)


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    return transformers.DistilBertForMaskedLM(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_MOE, num_local_experts=4))


def qwen3_moe() -> nn.Module:
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_MOE, **experts))


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False, **_SPECIAL
    )
    return transformers.MambaForCausalLM(config)


_OWN: dict[str, Callable[[], nn.Module]] = {
    builder.__name__: builder
    for builder in (whisper, bart, clip, wav2vec2, albert, distilbert, mixtral, qwen3_moe, mamba)
}
#: Those of the other module that differ from these and from each other.
NAMES = (*_OWN, "gpt2", "bert", "opt", "llama", "vit", "t5")


def build(name: str) -> nn.Module:
    """The model of an architecture in float64, always with the same values."""
    torch.manual_seed(7)
    model = _OWN[name]() if name in _OWN else transformer_models.build(name, VOCAB)
    return model.double()


def batch_of(name: str, seed: int) -> dict[str, Any]:
    """A batch for it, with labels."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    if name == "whisper":
        return {"input_features": floats(2, 8, 32), "labels": ids}
    if name == "wav2vec2":
        return {"input_values": floats(2, 120), "labels": torch.tensor([0, 1])}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": floats(2, 3, 8, 8), "return_loss": True}
    if name == "vit":
        return {"pixel_values": floats(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    return {"input_ids": ids, "labels": ids}
