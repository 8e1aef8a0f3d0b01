"""Models whose code reads values of tensors, so that they cannot be traced without data.

Each is a stack of blocks of ordinary layers and one odd one, that routes, branches, packs or leaves torch;
they return their loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.support.models import Batch, Case


class Experts(nn.Module):
    """Each token goes to one expert; an expert runs on the rows it got, if any."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        flat = x.flatten(0, -2)
        best, which = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (which == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * best[rows, None])
        return x + out.view_as(x)


class Branch(nn.Module):
    """One of two layers, by the sign of the mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        return x + (self.up(x) if x.mean().item() > 0 else self.down(x))


class MaskedRows(nn.Module):
    """Computes on the rows of a mask only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        mask = x[..., 0] > 0
        out = x.clone()
        out[mask] = torch.tanh(self.inner(x[mask]))
        return out


class Rounds(nn.Module):
    """One round or two, as the input asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.round = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        for _ in range(1 + int(x.detach().abs().max() > 1)):
            x = x + torch.tanh(self.round(x))
        return x


class Sine(torch.autograd.Function):
    """Computed by NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The sine of ``x``."""
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The gradient of ``x``."""
        (x,) = ctx.saved_tensors
        return grads[0] * torch.from_numpy(np.cos(x.detach().numpy()))


class ByNumpy(nn.Module):
    """A layer whose activation is a function of NumPy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        out: torch.Tensor = Sine.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return x + out


class Strongest(nn.Module):
    """Attends to the tokens above the mean norm only, of which there are as many as there are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        rows = []
        for sample in x:
            norms = sample.detach().norm(dim=-1)
            keys, values = self.pair(sample[norms >= norms.mean()]).chunk(2, -1)
            scores = self.query(sample) @ keys.t() / keys.shape[-1] ** 0.5
            rows.append(scores.softmax(-1) @ values)
        return x + torch.stack(rows)


class Counted(nn.Module):
    """A batch norm whose statistics are means over all batches so far, which it counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=None)
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        return x + self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Stack(nn.Module):
    """Blocks of an ordinary perceptron and an odd layer, over tokens.

    Args:
        odd: Makes the odd layer.
        width: Features.
        depth: Blocks.
        vocab: Tokens.
    """

    def __init__(self, odd: Callable[[], nn.Module], width: int, depth: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), odd())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from itself."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Packed(nn.Module):
    """Attention within each sequence of a packed row; lengths are values of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Features of the same shape."""
        pieces = []
        for piece in x.split(lengths.tolist()):
            q, k, v = self.project(piece).chunk(3, -1)
            pieces.append(nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0])
        return x + torch.cat(pieces)


class PackedStack(nn.Module):
    """Attention within sequences of a packed row, and perceptrons."""

    def __init__(self, width: int, depth: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.attention = nn.ModuleList(Packed(width) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from itself."""
        x = self.embed(ids).flatten(0, 1)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = attention(x, lengths.flatten())
            x = x + mlp(x)
        return nn.functional.cross_entropy(self.head(x), ids.flatten())


class EarlyExit(Stack):
    """Its own code decides how many of its blocks run: the model is one."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from itself."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
            if x.detach().abs().max().item() > 1e6:
                break
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


#: The odd layers of :class:`Stack`.
ODD: dict[str, Callable[[int], nn.Module]] = {
    "experts": Experts,
    "branch": Branch,
    "masked rows": MaskedRows,
    "rounds": Rounds,
    "numpy": ByNumpy,
    "strongest": Strongest,
    "counted": Counted,
}


def build(name: str, width: int = 384, depth: int = 4, vocab: int = 512) -> nn.Module:
    """One of the models: of :data:`ODD`, or ``"packed"``, or ``"early exit"``."""
    if name == "packed":
        return PackedStack(width, depth, vocab)
    if name == "early exit":
        return EarlyExit(nn.Identity, width, depth, vocab)
    return Stack(partial(ODD[name], width), width, depth, vocab)


def batch(name: str, size: int, generator: torch.Generator, length: int = 64, vocab: int = 512) -> Batch:
    """A batch of so many samples; of ``"packed"`` two sequences in each, and their lengths."""
    found = {"ids": torch.randint(vocab, (size, length), generator=generator)}
    if name != "packed":
        return found
    half = torch.randint(1, length, (size,), generator=generator)
    return found | {"lengths": torch.stack([half, length - half], 1)}


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
            max_position_embeddings=64, use_cache=False, experts_implementation="eager",
        )
    )  # fmt: skip


def _tokens(size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(512, (size, 64), generator=generator)
    return {"input_ids": ids, "labels": ids}


#: All of them, at a size whose steps can be timed.
CASES = {
    name: Case(name, partial(build, name), partial(batch, name), blocks)
    for name, blocks in {
        **dict.fromkeys((*ODD, "early exit"), ("blocks",)),
        "packed": ("attention", "mlp"),
    }.items()
} | {"mixtral": Case("mixtral", _mixtral, _tokens, ("model.layers",))}
