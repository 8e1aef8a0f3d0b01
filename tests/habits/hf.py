"""Models of transformers, as their users train them."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import next_word

_WORDS = 37
#: Some of their layers compute in float32 whatever the model is in.
_IN_FLOAT32 = 2e-5


def _hf(name: str, config: str, **fields: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**fields))
    return model.to(torch.get_default_dtype())


def _gpt2() -> nn.Module:
    return _hf(
        "GPT2LMHeadModel", "GPT2Config", n_layer=2, n_head=2, n_embd=24, vocab_size=_WORDS, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip


def _decoder(kind: str, **fields: Any) -> nn.Module:
    return _hf(
        f"{kind}ForCausalLM", f"{kind}Config", num_hidden_layers=2, hidden_size=24, intermediate_size=40,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=_WORDS, max_position_embeddings=16,
        use_cache=False, **fields,
    )  # fmt: skip


def _trained(ctx: Context, model: Any, steps: int = 2) -> Any:
    """By the next word."""
    model = ctx.wrap(model, ctx.tokens(words=_WORDS))
    optimizer = ctx.sgd(model)
    for step in range(steps):
        tokens = ctx.tokens(step, words=_WORDS)
        ctx.loss(next_word(model(tokens).logits, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
    return model


@habit(tolerance=_IN_FLOAT32)
def gpt2(ctx: Context) -> None:
    """Trains GPT-2."""
    _trained(ctx, _gpt2())


@habit(tolerance=_IN_FLOAT32)
def gpt2_with_labels(ctx: Context) -> None:
    """Trains GPT-2 by the loss that it computes: model(input_ids=..., labels=...).loss."""
    tokens = ctx.tokens(words=_WORDS)
    model = ctx.wrap(_gpt2(), {"input_ids": tokens, "labels": tokens})
    optimizer = ctx.sgd(model)
    for step in range(2):
        tokens = ctx.tokens(step, words=_WORDS)
        ctx.loss(model(input_ids=tokens, labels=tokens).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32)
def gradient_checkpointing(ctx: Context) -> None:
    """Calls gradient_checkpointing_enable() before wrapping."""
    model = _gpt2()
    model.gradient_checkpointing_enable()
    model.train()
    _trained(ctx, model)


@habit(tolerance=_IN_FLOAT32)
def gradient_checkpointing_with_reentrance(ctx: Context) -> None:
    """Calls gradient_checkpointing_enable with use_reentrant=True."""
    model = _gpt2()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    _trained(ctx, model)


@habit(tolerance=_IN_FLOAT32)
def gradient_checkpointing_after_wrapping(ctx: Context) -> None:
    """Calls gradient_checkpointing_enable() on the wrapped model."""
    model = ctx.wrap(_gpt2(), ctx.tokens(words=_WORDS))
    ctx.inner(model).gradient_checkpointing_enable()
    model.train()
    optimizer = ctx.sgd(model)
    tokens = ctx.tokens(words=_WORDS)
    ctx.loss(next_word(model(tokens).logits, tokens)).backward()
    optimizer.step()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32)
def hidden_states(ctx: Context) -> None:
    """Adds a loss on the hidden states: output_hidden_states=True."""
    inputs = {"input_ids": ctx.tokens(words=_WORDS), "output_hidden_states": True}
    model = ctx.wrap(_gpt2(), inputs)
    optimizer = ctx.sgd(model)
    tokens = ctx.tokens(words=_WORDS)
    output = model(input_ids=tokens, output_hidden_states=True)
    penalty = sum(state.square().mean() for state in output.hidden_states)
    ctx.loss(next_word(output.logits, tokens) + 0.01 * penalty).backward()
    optimizer.step()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32)
def padded_batch(ctx: Context) -> None:
    """Trains on a padded batch: attention_mask."""
    tokens = ctx.tokens(words=_WORDS)
    mask = torch.ones_like(tokens)
    mask[:, 4:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    model = ctx.wrap(_gpt2(), inputs)
    optimizer = ctx.sgd(model)
    for _ in range(2):
        logits = model(**inputs).logits
        ctx.loss(next_word(logits[:, :4], tokens[:, :4])).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32, low_tolerance=None, skips={"ddp": "hides it"})
def generate(ctx: Context) -> None:
    """Generates by the model's own generate() between steps."""
    model = _trained(ctx, _gpt2(), steps=1)
    model.eval()
    if ctx.framework == "fsdp2":
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, "generate")
    prompt = ctx.tokens(9, words=_WORDS, length=3)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = ctx.inner(model.module if ctx.osdp else model).generate(prompt, **options)
    ctx.rows("tokens", generated)


@habit(tolerance=_IN_FLOAT32)
def llama(ctx: Context) -> None:
    """Trains Llama."""
    _trained(ctx, _decoder("Llama"))


@habit(tolerance=_IN_FLOAT32)
def qwen2_tied(ctx: Context) -> None:
    """Trains Qwen2 with tied embeddings."""
    _trained(ctx, _decoder("Qwen2", tie_word_embeddings=True))


@habit(tolerance=1e-4, low_tolerance=None, seconds=90.0)
def mixtral(ctx: Context) -> None:
    """Trains Mixtral, a mixture of experts."""
    model = _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    _trained(ctx, model.float())  # no kernel for its experts in float64


@habit(tolerance=_IN_FLOAT32)
def bert(ctx: Context) -> None:
    """Trains BERT with a pooler that nothing reads."""
    _encoder(ctx, "BertModel", "BertConfig")


def _encoder(ctx: Context, name: str, config: str) -> None:
    model = _hf(
        name, config, num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=2,
        vocab_size=_WORDS, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model.pooler.requires_grad_(False)
    model = ctx.wrap(model, ctx.tokens(words=_WORDS))
    optimizer = ctx.sgd(model)
    for step in range(2):
        output = model(ctx.tokens(step, words=_WORDS))
        # Not of sums of squares, which a normalization makes all alike: their gradient is but rounding.
        hidden = output.last_hidden_state.to(torch.get_default_dtype())
        ctx.loss(hidden.sin().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


def _vit(**fields: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        **fields,
    }  # fmt: skip


def _images(ctx: Context, step: int) -> torch.Tensor:
    """Of this step: ``(samples, 3, 8, 8)``."""
    x, _ = ctx.batch(step)
    return x[:, :, None, None].expand(-1, -1, 8, 32).reshape(len(x), 3, 8, 64)[..., ::8].contiguous()


@habit(tolerance=_IN_FLOAT32, unused=True)
def vit_with_an_unused_mask_token(ctx: Context) -> None:
    """Trains ViT with a mask token that no batch uses."""
    model = _hf("ViTForMaskedImageModeling", "ViTConfig", **_vit(encoder_stride=4))
    model = ctx.wrap(model, _images(ctx, 0))
    optimizer = ctx.sgd(model)
    for step in range(2):
        images = _images(ctx, step)
        output = model(images).reconstruction
        ctx.loss((output.to(images.dtype) - images).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32, low_tolerance=0.2)
def t5(ctx: Context) -> None:
    """Trains T5: an encoder, a decoder, shared embeddings."""
    model = _hf(
        "T5ForConditionalGeneration", "T5Config", num_layers=2, d_model=24, d_kv=12, d_ff=40, num_heads=2,
        vocab_size=_WORDS, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    tokens = ctx.tokens(words=_WORDS)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    model = ctx.wrap(model, inputs)
    optimizer = ctx.sgd(model, lr=0.01)
    for step in range(2):
        tokens = ctx.tokens(step, words=_WORDS)
        output = model(input_ids=tokens, decoder_input_ids=tokens)
        ctx.loss(next_word(output.logits, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=_IN_FLOAT32)
def whisper(ctx: Context) -> None:
    """Trains Whisper, whose encoder has frozen positions."""
    model = _hf(
        "WhisperForConditionalGeneration", "WhisperConfig", encoder_layers=2, decoder_layers=2, d_model=24,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        vocab_size=_WORDS, num_mel_bins=6, max_source_positions=4, max_target_positions=16, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def sounds(step: int) -> torch.Tensor:
        return ctx.batch(step, rows=2)[0][:, :, None].expand(-1, -1, 8).contiguous()

    inputs = {"input_features": sounds(0), "decoder_input_ids": ctx.tokens(words=_WORDS)}
    model = ctx.wrap(model, inputs)
    optimizer = ctx.sgd(model)
    for step in range(2):
        tokens = ctx.tokens(step, words=_WORDS)
        output = model(input_features=sounds(step), decoder_input_ids=tokens)
        ctx.loss(next_word(output.logits, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
