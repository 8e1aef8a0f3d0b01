"""Small models for stages: a tied head, values that skip stages, a parameter beside the modules."""

from typing import Any

import torch
from torch import nn

VOCAB, WIDTH = 23, 8


class Block(nn.Module):
    """A residual block that also looks at the embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Shapes (batch, length, width), (batch, length, 1) and as ``x``."""
        hidden: torch.Tensor = self.dropout(torch.relu(self.up(self.norm(x) + first)))
        return x + mask * self.down(hidden)


class TiedNet(nn.Module):
    """A language model whose head is its embedding; returns logits of shape (batch, length, vocabulary)."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        """Values of the root's own parameter."""
        nn.init.ones_(self.gain)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Tokens and mask of shape (batch, length)."""
        first = self.embed(tokens) * self.gain
        x, weights = first, mask.to(first.dtype).unsqueeze(-1)
        for block in self.blocks:
            x = block(x, weights, first)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class LateTiedNet(TiedNet):
    """The same with a module before the embedding, so that one rank may have both ends of the tie."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.weigh = nn.Linear(1, 1)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Tokens and mask of shape (batch, length)."""
        weights = self.weigh(mask.float().unsqueeze(-1))
        first = self.embed(tokens) * self.gain
        x = first
        for block in self.blocks:
            x = block(x, weights, first)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class UncutNet(nn.Module):
    """The code around its blocks adds what an earlier one made: cuts between them are not possible."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width)."""
        first = self.blocks[0](x)
        second: torch.Tensor = self.blocks[1](first)
        out: torch.Tensor = self.blocks[2](second) + first
        return out


def batch(samples: int, length: int = 5, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of :class:`TiedNet`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (samples, length), generator=generator)
    mask = torch.rand(samples, length, generator=generator) > 0.2
    return {"tokens": tokens, "mask": mask}


def targets(samples: int, length: int = 5, seed: int = 1) -> torch.Tensor:
    """What logits are compared to; about a third counts for nothing."""
    generator = torch.Generator().manual_seed(seed + 100)
    found = torch.randint(0, VOCAB, (samples, length), generator=generator)
    found[torch.rand(samples, length, generator=generator) < 0.3] = -100
    return found


def loss_fn(output: Any, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count of the cross-entropy."""
    total = nn.functional.cross_entropy(output.flatten(0, 1), wanted.flatten(), reduction="sum")
    return total, (wanted != -100).sum()
