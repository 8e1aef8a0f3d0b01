"""Models whose code reads values of tensors: experts by hand, early exits, packed rows, NumPy inside."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH = 16


class Experts(nn.Module):
    """Each token goes to one expert; an expert runs on the rows it got, if any."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.up(x) if x.mean().item() > 0 else self.down(x))


class MaskedRows(nn.Module):
    """Computes on the rows of a mask only."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[..., 0] > 0
        out = x.clone()
        out[mask] = torch.tanh(self.inner(x[mask]))
        return out


class Repeated(nn.Module):
    """As many rounds as the input asks for."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.round = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x.detach().abs().max() > 1)):
            x = x + torch.tanh(self.round(x))
        return x


class Sine(torch.autograd.Function):
    """Computed by NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.from_numpy(np.cos(x.detach().numpy()))


class ByNumpy(nn.Module):
    """A layer whose activation is a function of NumPy."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Sine.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return x + out


class Packed(nn.Module):
    """Attention within each sequence of a packed row; lengths are values of the batch."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pieces = []
        for piece in x.split(lengths.tolist()):
            q, k, v = self.project(piece).chunk(3, -1)
            pieces.append(nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0])
        return x + torch.cat(pieces)


class Around(nn.Module):
    """Ordinary layers around such a module."""

    def __init__(self, kind: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), "odd": kind()})
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block["odd"](block["mlp"](x))  # type: ignore[index]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class AroundPacked(nn.Module):
    """Ordinary layers around attention in a packed row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.attention = nn.ModuleList(Packed() for _ in range(2))
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.attention:
            x = layer(x, lengths)
        return nn.functional.cross_entropy(self.head(x), ids)


class AtTheRoot(nn.Module):
    """The model's own code reads values: it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if x.sum().item() > 1e9:
            x = -x
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


#: How to make each model, and the modules that are opaque in it.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "experts": (lambda: Around(Experts), ("blocks.0.odd", "blocks.1.odd")),
    "branch": (lambda: Around(Branch), ("blocks.0.odd", "blocks.1.odd")),
    "masked rows": (lambda: Around(MaskedRows), ("blocks.0.odd", "blocks.1.odd")),
    "repeated": (lambda: Around(Repeated), ("blocks.0.odd", "blocks.1.odd")),
    "numpy": (lambda: Around(ByNumpy), ("blocks.0.odd", "blocks.1.odd")),
    "packed": (AroundPacked, ("attention.0", "attention.1")),
    "root": (AtTheRoot, ("",)),
}


def batch_for(name: str, seed: int) -> dict[str, torch.Tensor]:
    """A batch for one of :data:`MODELS`."""
    generator = torch.Generator().manual_seed(seed)
    if name == "packed":
        return {
            "ids": torch.randint(0, 23, (12,), generator=generator),
            "lengths": torch.tensor([3, 4, 5] if seed % 2 else [6, 2, 4]),
        }
    return {"ids": torch.randint(0, 23, (2, 8), generator=generator)}
