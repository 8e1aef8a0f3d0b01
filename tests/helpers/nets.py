"""Tiny models with the awkward parameters: tied, frozen, uneven, 0-dim, of two dtypes."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)


class Block(nn.Module):
    """A residual block; 7 and 5 divide by neither 2 nor 4."""

    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return x + checkpoint(self._work, x, use_reentrant=False)
        return x + self._work(x)

    def _work(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, gate, frozen layer, blocks, head; tokens in, logits out."""

    def __init__(
        self, *, tied: bool = True, gated: bool = True, recompute: bool = False, depth: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.gate = Gate() if gated else nn.Identity()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(5, recompute) for _ in range(depth))
        self.head = nn.Linear(5, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.frozen(self.embed(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(seed: int, *shape: int) -> torch.Tensor:
    """Tokens for :class:`Net`."""
    drawn = torch.randint(0, 13, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of predicting the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


class WithLoss(Net):
    """Its own loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(batch), batch)
