"""The models that are measured, by name: each with a sample batch, its repeated blocks and no dropout.

All of them return their loss (as ``output.loss`` or as the output itself), so the same call is traced,
profiled and trained. Batches are a function of the seed alone: every candidate sees the same data in the
same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from osdp import LMHeadLoss
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


class WithLoss(nn.Module):
    """A network and the mean squared error of its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, target: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """The loss of the network's output for ``inputs``."""
        return nn.functional.mse_loss(self.net(**inputs), target)


class Mlp(nn.Module):
    """Blocks of two linear layers with a residual connection."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last block."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class TableMlp(nn.Module):
    """A table of vectors, as of a recommender, in front of an :class:`Mlp`."""

    def __init__(self, rows: int, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.mlp = Mlp(width, depth)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The output for the vectors of ``ids``."""
        output: torch.Tensor = self.mlp(self.table(ids))
        return output


class StemVit(nn.Module):
    """Encoder layers over patches that convolutions make (Xiao et al., arXiv 2106.14881, figure 1)."""

    def __init__(self, width: int, heads: int, depth: int, side: int, classes: int) -> None:
        super().__init__()
        sizes = (3, width // 8, width // 4, width // 2)
        self.stem = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(sizes)
            ),
            nn.Conv2d(sizes[-1], width, 1),
        )
        self.positions = nn.Parameter(torch.zeros((side // 8) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of the classes."""
        x = self.stem(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions (He et al., arXiv 1512.03385, figure 5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both branches, rectified."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A bottleneck ResNet with ``depths[i]`` blocks in stage i."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                inner = width * 2**stage
                blocks.append(Bottleneck(channels, inner, 2 if stage and not index else 1))
                channels = 4 * inner
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of the classes."""
        x = self.stem(images)
        for block in self.layers:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Seq2Seq(nn.Module):
    """``nn.Transformer`` from tokens to tokens."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(
            width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, source: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of ``labels``."""
        states = self.transformer(self.embedding(source), self.embedding(labels))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


def _tokens(vocab: int, length: int, size: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(vocab, (size, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _pixels(name: str, side: int, classes: int, size: int, generator: torch.Generator) -> Batch:
    images = torch.randn(size, 3, side, side, generator=generator)
    return {name: images, "labels": torch.randint(classes, (size,), generator=generator)}


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


class HeadWithLoss(nn.Module):
    """States of an embedding, and a head that computes its loss in slices of the vocabulary."""

    def __init__(self, width: int, vocab: int, slices: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = LMHeadLoss(nn.Linear(width, vocab, bias=False), num_slices=slices)

    def forward(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of ``labels``."""
        total, count = self.head(self.norm(states), labels)
        return total / count


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
    _LARGE_VOCABULARY,
    with_sliced_head("llama-32k sliced head", _LARGE_VOCABULARY),
    transformer("transformer", layers=2, width=192, heads=4, length=48, vocab=1000),
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

#: One of each of the eight families, for accuracy over models.
FAMILIES = ("gpt2-small", "bert", "opt", "llama", "vit", "resnet", "mlp", "transformer")

#: Models whose largest operator, convolutions or batch decide the peak, beside those families.
SKEWED = ("gpt2-wide", "llama-32k", "bert-128", "mlp-table", "vit-stem", "convnext")

#: The two shapes of the throughput claim.
SHAPES = ("gpt2-deep", "gpt2-wide")
