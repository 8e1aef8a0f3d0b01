"""The models that are measured, by name: each with a sample batch, its repeated blocks and no dropout.

All of them return their loss (as ``output.loss`` or as the output itself), so the same call is traced,
profiled and trained. Batches are a function of the seed alone: every candidate sees the same data in the
same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.support.networks import (
    HeadWithLoss,
    Mlp,
    ResNet,
    Seq2Seq,
    StemVit,
    TableMlp,
    UNet,
    WithLoss,
)
from osdp.integrations.huggingface import with_head_loss
from osdp.model.fqn import is_inside

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model to measure.

    Attributes:
        name: What it is called.
        build: Makes the model on the current default device, with weights from the current seed.
        batch: Makes a batch of so many samples from a generator.
        blocks: FQN prefixes of the containers whose children are the repeated blocks.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    blocks: tuple[str, ...]

    def model(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """The model, with the same weights for the same seed."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.build().train()

    def sample(self, size: int, seed: int = 0, device: str = "cpu") -> Batch:
        """A batch of ``size`` samples, the same for the same seed."""
        batch = self.batch(size, torch.Generator().manual_seed(seed))
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks of ``model``, in order."""
        names = [name for name, _ in model.named_modules()]
        depth = {prefix: prefix.count(".") + 1 for prefix in self.blocks}
        return [
            model.get_submodule(name)
            for name in names
            for prefix, dots in depth.items()
            if name != prefix and is_inside(name, prefix) and name.count(".") == dots
        ]


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model of this file returned."""
    return output if isinstance(output, torch.Tensor) else output.loss


def step_seed(step: int, rank: int, world_size: int) -> int:
    """Seed of the batch of ``rank`` in ``step``: no two share one."""
    return 1 + step * world_size + rank


def _tokens(vocab: int, length: int, size: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(vocab, (size, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _pixels(name: str, side: int, classes: int, size: int, generator: torch.Generator) -> Batch:
    images = torch.randn(size, 3, side, side, generator=generator)
    return {name: images, "labels": torch.randint(classes, (size,), generator=generator)}


def _noisy(side: int, size: int, generator: torch.Generator) -> Batch:
    images, target = (torch.randn(size, 3, side, side, generator=generator) for _ in range(2))
    return {"images": images, "times": torch.randint(1000, (size,), generator=generator), "target": target}


def _rows(rows: int, width: int, size: int, generator: torch.Generator) -> Batch:
    target = torch.randn(size, width, generator=generator)
    return {"ids": torch.randint(rows, (size,), generator=generator), "target": target}


def _vectors(width: int, size: int, generator: torch.Generator) -> Batch:
    names = ("x", "target")
    return {name: torch.randn(size, width, generator=generator) for name in names}


def _pairs(vocab: int, length: int, size: int, generator: torch.Generator) -> Batch:
    names = ("source", "labels")
    return {name: torch.randint(vocab, (size, length), generator=generator) for name in names}


def _hub(kind: str, options: Mapping[str, Any]) -> nn.Module:
    """A transformers model from a configuration: ``_hub("GPT2LMHeadModel", {...})``."""
    import transformers

    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**options))


def gpt2(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """A GPT-2 of any shape over ``vocab`` tokens."""
    options = {
        "vocab_size": vocab, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM",
    }  # fmt: skip
    build = partial(_hub, "GPT2LMHeadModel", options)
    return Case(name, build, partial(_tokens, vocab, length), ("transformer.h",))


def bert(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """A BERT that predicts every token."""
    options = {
        "vocab_size": vocab, "max_position_embeddings": length, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    build = partial(_hub, "BertForMaskedLM", options)
    return Case(name, build, partial(_tokens, vocab, length), ("bert.encoder.layer",))


def opt(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """An OPT."""
    options = {
        "vocab_size": vocab, "max_position_embeddings": length, "hidden_size": width,
        "word_embed_proj_dim": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "ffn_dim": 4 * width, "dropout": 0.0, "attention_dropout": 0.0, "use_cache": False,
        "layerdrop": 0.0, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
    }  # fmt: skip
    build = partial(_hub, "OPTForCausalLM", options)
    return Case(name, build, partial(_tokens, vocab, length), ("model.decoder.layers",))


def llama(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """A Llama with untied embeddings and grouped keys."""
    options = {
        "vocab_size": vocab, "max_position_embeddings": length, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": max(1, heads //
        2), "intermediate_size": 8 * width // 3 // 8 * 8, "use_cache": False, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    build = partial(_hub, "LlamaForCausalLM", options)
    return Case(name, build, partial(_tokens, vocab, length), ("model.layers",))


def moe(
    name: str, *, layers: int, width: int, heads: int, experts: int, length: int, vocab: int = 256
) -> Case:
    """A Qwen3-MoE, two of whose experts see each token."""
    options = {
        "vocab_size": vocab, "max_position_embeddings": length, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": width // heads, "intermediate_size": 2 * width, "moe_intermediate_size": 2 * width,
        "num_experts": experts, "num_experts_per_tok": 2, "use_cache": False, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    build = partial(_hub, "Qwen3MoeForCausalLM", options)
    return Case(name, build, partial(_tokens, vocab, length), ("model.layers",))


def with_sliced_head(name: str, case: Case, slices: int = 8) -> Case:
    """A causal language model of transformers that computes its loss in slices of the vocabulary."""

    def build() -> nn.Module:
        return with_head_loss(case.build(), num_slices=slices)

    return replace(case, name=name, build=build)


def vit(name: str, *, layers: int, width: int, heads: int, side: int = 64, classes: int = 100) -> Case:
    """A ViT with patches of 8 x 8 pixels."""
    options = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * width, "image_size": side, "patch_size": 8, "num_labels": classes,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    build = partial(_hub, "ViTForImageClassification", options)
    # The encoder moved between versions of transformers; a prefix that is not there names no block.
    return Case(
        name, build, partial(_pixels, "pixel_values", side, classes), ("vit.encoder.layer", "vit.layers")
    )


def resnet(name: str, *, depths: tuple[int, ...], width: int, side: int = 64, classes: int = 100) -> Case:
    """A bottleneck ResNet."""
    build = partial(ResNet, depths, width, classes)
    return Case(name, build, partial(_pixels, "images", side, classes), ("layers",))


def mlp(name: str, *, layers: int, width: int) -> Case:
    """A residual MLP."""
    return Case(name, lambda: WithLoss(Mlp(width, layers)), partial(_vectors, width), ("net.layers",))


def table_mlp(name: str, *, rows: int, layers: int, width: int) -> Case:
    """A residual MLP behind a table."""
    build = partial(TableMlp, rows, width, layers)
    return Case(name, lambda: WithLoss(build()), partial(_rows, rows, width), ("net.mlp.layers",))


def unet(name: str, *, levels: int, width: int, side: int = 32) -> Case:
    """A diffusion model's UNet with the loss of its noise."""
    build = partial(UNet, width, levels)
    return Case(name, lambda: WithLoss(build()), partial(_noisy, side), ("net.down", "net.up"))


def stem_vit(name: str, *, layers: int, width: int, heads: int, side: int = 64, classes: int = 100) -> Case:
    """A ViT with a stem of convolutions."""
    build = partial(StemVit, width, heads, layers, side, classes)
    return Case(name, build, partial(_pixels, "images", side, classes), ("layers",))


def convnext(
    name: str, *, depths: Sequence[int], widths: Sequence[int], side: int = 64, classes: int = 100
) -> Case:
    """A ConvNeXt."""
    options = {
        "hidden_sizes": list(widths), "depths": list(depths), "image_size": side, "num_labels": classes,
        "drop_path_rate": 0.0,
    }  # fmt: skip
    build = partial(_hub, "ConvNextForImageClassification", options)
    blocks = tuple(f"convnext.encoder.stages.{stage}.layers" for stage in range(len(depths)))
    return Case(name, build, partial(_pixels, "pixel_values", side, classes), blocks)


def head_with_loss(name: str, *, width: int, vocab: int, length: int, slices: int) -> Case:
    """A language-model head by itself."""

    def batch(size: int, generator: torch.Generator) -> Batch:
        return {
            "states": torch.randn(size, length, width, generator=generator),
            "labels": torch.randint(vocab, (size, length), generator=generator),
        }

    return Case(name, lambda: HeadWithLoss(width, vocab, slices), batch, ())


def transformer(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """The encoder-decoder that comes with torch."""
    build = partial(Seq2Seq, vocab, width, heads, layers)
    blocks = ("transformer.encoder.layers", "transformer.decoder.layers")
    return Case(name, build, partial(_pairs, vocab, length), blocks)


def t5(name: str, *, layers: int, width: int, heads: int, length: int, vocab: int = 256) -> Case:
    """A T5: one embedding for both halves and the head, and one attention bias for the blocks of a half."""
    options = {
        "vocab_size": vocab, "d_model": width, "d_kv": width // heads, "d_ff": 4 * width,
        "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "dropout_rate": 0.0,
        "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    build = partial(_hub, "T5ForConditionalGeneration", options)
    return Case(name, build, partial(_tokens, vocab, length), ("encoder.block", "decoder.block"))


def mamba(name: str, *, layers: int, width: int, length: int, vocab: int = 256) -> Case:
    """A Mamba, whose state spaces are scanned token by token."""
    options = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    build = partial(_hub, "MambaForCausalLM", options)
    return Case(name, build, partial(_tokens, vocab, length), ("backbone.layers",))


#: The vocabulary of Llama 2 (Touvron et al., arXiv 2307.09288, section 2.2) over a small body.
_LARGE_VOCABULARY = llama("llama-32k", layers=6, width=256, heads=4, length=64, vocab=32000)

_CASES = (
    gpt2("gpt2-tiny", layers=2, width=64, heads=2, length=32),
    gpt2("gpt2-small", layers=4, width=192, heads=4, length=64, vocab=1000),
    gpt2("gpt2-deep", layers=16, width=192, heads=4, length=64),
    gpt2("gpt2-grouped", layers=6, width=256, heads=4, length=64),
    gpt2("gpt2-wide", layers=3, width=768, heads=12, length=64),
    bert("bert", layers=4, width=192, heads=4, length=64, vocab=1000),
    bert("bert-128", layers=4, width=256, heads=4, length=128, vocab=4000),
    opt("opt", layers=4, width=192, heads=4, length=64, vocab=1000),
    llama("llama", layers=4, width=192, heads=4, length=64, vocab=1000),
    vit("vit", layers=4, width=192, heads=4),
    resnet("resnet", depths=(2, 2, 2), width=32),
    mlp("mlp", layers=6, width=256),
    table_mlp("mlp-table", rows=9216, layers=3, width=256),  # 60 % of the parameters are the table's
    stem_vit("vit-stem", layers=4, width=256, heads=4),
    convnext("convnext", depths=(2, 2, 4, 2), widths=(48, 96, 192, 384)),
    moe("moe", layers=4, width=192, heads=4, experts=4, length=64, vocab=1000),
    unet("unet", levels=3, width=48),
    _LARGE_VOCABULARY,
    with_sliced_head("llama-32k sliced head", _LARGE_VOCABULARY),
    transformer("transformer", layers=2, width=192, heads=4, length=48, vocab=1000),
    # The published cases of the OSDP project (benchmarks.published_cases), a sixteenth as wide; the second
    # with a sixteenth of the tokens and of the vocabulary.
    gpt2("gpt2-published", layers=48, width=96, heads=3, length=6, vocab=10),
    opt("opt-published", layers=8, width=448, heads=7, length=32, vocab=3142),
    t5("t5", layers=3, width=192, heads=4, length=48, vocab=4000),
    mamba("mamba", layers=4, width=256, length=16, vocab=4000),
)
_FULL_SIZE = (
    gpt2("gpt2-124m", layers=12, width=768, heads=12, length=1024, vocab=50257),
    gpt2("gpt2-1.5b", layers=48, width=1600, heads=25, length=1024, vocab=50257),
    llama("llama-1b", layers=16, width=2048, heads=32, length=1024, vocab=32000),
    bert("bert-large", layers=24, width=1024, heads=16, length=512, vocab=30522),
    vit("vit-large", layers=24, width=1024, heads=16, side=224, classes=1000),
    resnet("resnet-50", depths=(3, 4, 6, 3), width=64, side=224, classes=1000),
)

CASES = {case.name: case for case in (*_CASES, *_FULL_SIZE)}

#: Models of the size they are published in, for a GPU.
FULL_SIZE = tuple(case.name for case in _FULL_SIZE)

#: Three of them that are measured within minutes.
QUICK_FULL_SIZE = ("gpt2-124m", "bert-large", "resnet-50")

#: One of each of the eight families, for accuracy over models.
FAMILIES = ("gpt2-small", "bert", "opt", "llama", "vit", "resnet", "mlp", "transformer")

#: Models whose largest operator, convolutions or batch decide the peak, beside those families.
SKEWED = ("gpt2-wide", "llama-32k", "bert-128", "mlp-table", "vit-stem", "convnext")

#: The two shapes of the throughput claim.
SHAPES = ("gpt2-deep", "gpt2-wide")
