"""The architectures that must train through stages and tensor-parallel parts, small but with their quirks.

Fewer and narrower layers than the released models, from the same configuration classes, with their true
ratios of width to feed-forward, their head counts scaled, their vocabularies (GPT-2's 50,257 tokens divide by
nothing) and dropout off, so that results can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@dataclass(frozen=True)
class Architecture:
    """A model and what goes into it.

    Attributes:
        name: Of the released model.
        make: Builds it with a number of layers; weights of the current seed.
        vocabulary: Tokens of its text inputs; 0 for images.
        classes: Size of the last dimension of its logits.
    """

    name: str
    make: Callable[[int], nn.Module]
    vocabulary: int
    classes: int

    def batch(self, samples: int, length: int = 16) -> dict[str, torch.Tensor]:
        """Inputs, the same each time; the first sample of a text is padded."""
        generator = torch.Generator().manual_seed(1)
        if not self.vocabulary:
            return {"pixel_values": torch.randn(samples, 3, 32, 32, generator=generator)}
        tokens = torch.randint(0, self.vocabulary, (samples, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        found = {"input_ids": tokens, "attention_mask": mask}
        if self.name == "t5":
            found["decoder_input_ids"] = torch.randint(
                0, self.vocabulary, (samples, length - 4), generator=generator
            )
        return found

    def targets(self, samples: int, length: int = 16) -> torch.Tensor:
        """What its logits are compared to; some of a text count for nothing (-100)."""
        generator = torch.Generator().manual_seed(2)
        if not self.vocabulary:
            return torch.randint(0, self.classes, (samples,), generator=generator)
        length = length - 4 if self.name == "t5" else length
        found = torch.randint(0, self.classes, (samples, length), generator=generator)
        found[0, length // 2 :] = -100
        return found


def loss_of_logits(output: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies of all targets that count, and their number."""
    logits = output.logits.float().flatten(0, -2)
    total = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)
    return total, (targets != -100).sum()


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=48, n_head=4, n_positions=64, use_cache=False, **_NO_DROPOUT)
    )


def _gpt_neo(layers: int) -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    kinds = [[["global", "local"], layers // 2]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            hidden_size=40, num_layers=layers, num_heads=4, attention_types=kinds, window_size=8,
            max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def _gptj(layers: int) -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    return GPTJForCausalLM(
        GPTJConfig(
            n_embd=64, n_layer=layers, n_head=4, rotary_dim=8, n_positions=64, vocab_size=50400,
            use_cache=False, **_NO_DROPOUT,
        )
    )  # fmt: skip


def _bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=28996, hidden_size=48, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=192, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _opt(layers: int) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            hidden_size=48, num_hidden_layers=layers, ffn_dim=192, num_attention_heads=4, dropout=0.0,
            max_position_embeddings=64, word_embed_proj_dim=48, use_cache=False,
        )
    )  # fmt: skip


def _llama_like(config: str, model: str, **fields: Any) -> Callable[[int], nn.Module]:
    def make(layers: int) -> nn.Module:
        import transformers

        made = getattr(transformers, config)(
            hidden_size=64, num_hidden_layers=layers, intermediate_size=172, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, **fields,
        )  # fmt: skip
        whole: nn.Module = getattr(transformers, model)(made)
        return whole

    return make


def _vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=48, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=192,
            image_size=32, patch_size=8, num_labels=11, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _t5(layers: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=48, d_kv=12, d_ff=96, num_layers=layers // 2, num_decoder_layers=layers // 2, num_heads=4,
            dropout_rate=0.0, use_cache=False,
        )
    )  # fmt: skip


ARCHITECTURES: dict[str, Architecture] = {
    found.name: found
    for found in (
        Architecture("gpt2", _gpt2, 50257, 50257),
        Architecture("gpt_neo", _gpt_neo, 50257, 50257),
        Architecture("gptj", _gptj, 50257, 50400),
        Architecture("bert", _bert, 28996, 28996),
        Architecture("opt", _opt, 50272, 50272),
        Architecture("llama", _llama_like("LlamaConfig", "LlamaForCausalLM"), 32000, 32000),
        Architecture(
            "qwen2",
            _llama_like("Qwen2Config", "Qwen2ForCausalLM", vocab_size=50257, tie_word_embeddings=True),
            50257,
            50257,
        ),
        Architecture(
            "mistral", _llama_like("MistralConfig", "MistralForCausalLM", sliding_window=8), 32000, 32000
        ),
        Architecture("vit", _vit, 0, 11),
        Architecture("t5", _t5, 32128, 32128),
    )
}
