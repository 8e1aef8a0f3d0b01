"""Small models that habits train: uneven widths, and enough parameters that a search mixes modes."""

import torch
from torch import nn

FEATURES, CLASSES, WORDS = 6, 3, 17


class Block(nn.Module):
    """Residual: widths that divide by neither 2 nor 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 101)
        self.down = nn.Linear(101, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Features ``(samples, 6)`` in, ``(samples, 3)`` out."""

    def __init__(self, depth: int = 3, width: int = 25) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """What the head sees."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


class Words(nn.Module):
    """Tokens ``(samples, length)`` in, logits ``(samples, length, 17)`` out; the head may be tied."""

    def __init__(self, tied: bool = True, depth: int = 3, width: int = 25) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error, in the dtype of the target."""
    return nn.functional.mse_loss(output.to(target.dtype), target)


def next_word(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of predicting the next token, in the default dtype."""
    logits = logits[:, :-1].to(torch.get_default_dtype())
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
