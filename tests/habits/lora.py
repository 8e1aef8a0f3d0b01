"""Low-rank adapters: by hand, and by PEFT."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, next_word

#: Words of the tiny GPT-2.
_WORDS = 37


class Adapted(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=24, vocab_size=_WORDS, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _peft(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], **options)
    model = peft.get_peft_model(_gpt2(), config)
    # PEFT starts from an update of zero and in float32.
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.get_default_dtype())
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def _fine_tuned(ctx: Context, model: Any, steps: int = 2) -> Any:
    model = ctx.wrap(model, ctx.tokens(words=_WORDS))
    optimizer = ctx.sgd(model)
    for step in range(steps):
        tokens = ctx.tokens(step, words=_WORDS)
        ctx.loss(next_word(model(tokens).logits, tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
    return model


@habit()
def by_hand(ctx: Context) -> None:
    """Adapts linear layers by hand: frozen base, trained factors."""
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model), steps=3)
    ctx.gradients(model)
    ctx.weights(model)


@habit()
def merged(ctx: Context) -> None:
    """Merges the factors into the frozen weights after training: base.add_(up @ down) under no_grad."""
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up = Adapted(block.up)
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    with torch.no_grad():
        for block in ctx.inner(model).blocks:
            update = block.up.up.weight @ block.up.down.weight
            block.up.base.weight.add_(update)
            block.up.up.weight.zero_()
        ctx.rows("output", model(ctx.batch(9)[0]))
    ctx.weights(model)


@habit(tolerance=1e-6)
def peft_lora(ctx: Context) -> None:
    """Fine-tunes GPT-2 with PEFT's LoRA."""
    _fine_tuned(ctx, _peft())


@habit(tolerance=1e-6)
def peft_rank_stabilised(ctx: Context) -> None:
    """Fine-tunes with LoRA of which biases are trained as well, scaled by the root of the rank."""
    _fine_tuned(ctx, _peft(bias="lora_only", use_rslora=True))


@habit(tolerance=1e-6, low_tolerance=0.3)
def peft_dora(ctx: Context) -> None:
    """Fine-tunes with DoRA, which trains the norms of the adapted weights."""
    _fine_tuned(ctx, _peft(use_dora=True))


@habit(tolerance=1e-6)
def peft_with_a_trained_head(ctx: Context) -> None:
    """Fine-tunes with LoRA and trains the final norm in full: modules_to_save."""
    _fine_tuned(ctx, _peft(modules_to_save=["ln_f"]))


@habit(tolerance=1e-6)
def peft_with_gradient_checkpointing(ctx: Context) -> None:
    """Fine-tunes with LoRA, gradient checkpointing and enable_input_require_grads."""
    model = _peft()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _fine_tuned(ctx, model)


@habit(tolerance=1e-6, skips={"fsdp2": "gathers nothing there"})
def peft_adapter_disabled(ctx: Context) -> None:
    """Evaluates the base model in between: with model.disable_adapter()."""
    model = _fine_tuned(ctx, _peft())
    with torch.no_grad(), ctx.inner(model).disable_adapter():
        ctx.rows("base", model(ctx.tokens(9, words=_WORDS)).logits)
    with torch.no_grad():
        ctx.rows("adapted", model(ctx.tokens(9, words=_WORDS)).logits)
