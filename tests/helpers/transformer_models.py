"""Narrow transformers of many architectures, two layers each, with the quirks that sharding meets.

Vocabularies are uneven, weights tied as the configurations say, fused matrices fused, some masks partial.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

HEADS = 4
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(vocab: int, heads: int = HEADS, **more: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=vocab, n_layer=2, n_embd=8 * heads, n_head=heads, n_positions=32,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_SPECIAL, **more},
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt_neo(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.GPTNeoConfig(
        vocab_size=vocab, hidden_size=32, num_layers=2, num_heads=heads, window_size=4,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=32, **_SPECIAL,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config)


def gptj(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.GPTJConfig(
        vocab_size=vocab, n_embd=32, n_layer=2, n_head=heads, rotary_dim=4, n_positions=32, **_SPECIAL
    )
    return transformers.GPTJForCausalLM(config)


def bert(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=vocab, num_attention_heads=heads, **_USUAL, **_NO_DROPOUT, **_SPECIAL
    )
    return transformers.BertForMaskedLM(config)


def opt(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=2, num_attention_heads=heads, ffn_dim=64,
        word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=32, **_SPECIAL,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def llama(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=vocab, num_attention_heads=heads, **_USUAL, **_SPECIAL)
    return transformers.LlamaForCausalLM(config)


def qwen2(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.Qwen2Config(
        vocab_size=vocab, num_attention_heads=heads, num_key_value_heads=2, **_USUAL, **_SPECIAL
    )
    return transformers.Qwen2ForCausalLM(config)


def qwen3(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=vocab, num_attention_heads=heads, num_key_value_heads=4, head_dim=16, **_USUAL, **_SPECIAL
    )
    return transformers.Qwen3ForCausalLM(config)


def mistral(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.MistralConfig(
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=2,
        sliding_window=4,
        **_USUAL,
        **_SPECIAL,
    )
    return transformers.MistralForCausalLM(config)


def vit(vocab: int, heads: int = HEADS) -> nn.Module:
    sizes = {name: size for name, size in _USUAL.items() if name != "max_position_embeddings"}
    config = transformers.ViTConfig(
        num_attention_heads=heads, image_size=8, patch_size=4, **sizes, **_NO_DROPOUT
    )
    return transformers.ViTForImageClassification(config)


def t5(vocab: int, heads: int = HEADS) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=vocab, num_layers=2, d_model=32, num_heads=heads, d_kv=8, d_ff=64, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (gpt2, gpt_neo, gptj, bert, opt, llama, qwen2, qwen3, mistral, vit, t5)
}


def build(name: str, vocab: int = 257, heads: int = HEADS) -> nn.Module:
    """The model of an architecture, always with the same values."""
    torch.manual_seed(7)
    return ARCHITECTURES[name](vocab, heads)


def batch_of(name: str, vocab: int = 257, samples: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch for it, with labels; the last sample of a text is padded."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(samples, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(samples) % 2}
    ids = torch.randint(3, vocab, (samples, 9), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[-1, 6:], labels[-1, 6:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
