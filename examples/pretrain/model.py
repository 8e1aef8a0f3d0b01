"""A small Llama."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

#: Bytes are the tokens.
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def build() -> LlamaForCausalLM:
    """The model, with the same weights on all ranks and in all runs."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)
