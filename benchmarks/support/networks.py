"""Networks that are measured and come with neither torch nor transformers."""

from itertools import pairwise

import torch
from torch import nn

from osdp import LMHeadLoss


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


class ResidualBlock(nn.Module):
    """Two convolutions with a shift that the time of the diffusion gives, beside a shortcut."""

    def __init__(self, channels: int, out: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(8, channels), nn.GroupNorm(8, out)))
        self.convolutions = nn.ModuleList(
            (nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1))
        )
        self.shift = nn.Linear(width, out)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Images ``x``, (B, channels, H, W), at times embedded in ``time``, (B, width)."""
        silu = nn.functional.silu
        found = self.convolutions[0](silu(self.norms[0](x))) + self.shift(silu(time))[:, :, None, None]
        found = self.convolutions[1](silu(self.norms[1](found)))
        output: torch.Tensor = found + self.shortcut(x)
        return output


class Attention(nn.Module):
    """Attention between the places of an image, with a residual connection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of the shape of ``x``, (B, channels, H, W)."""
        places = self.norm(x).flatten(2).transpose(1, 2)
        found = self.attention(places, places, places, need_weights=False)[0]
        return x + found.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """The noise in an image at a time of its diffusion (Ho et al., arXiv 2006.11239, appendix B).

    ::

        images - down[0] ---------------------------- up[-1] - noise
                    '- down[1] ------------ up[-2] -'
                          '- ... - middle - ... -'      each level half as wide and high
    """

    def __init__(self, width: int, levels: int, steps: int = 1000) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels)]
        self.times = nn.Sequential(nn.Embedding(steps, width), nn.Linear(width, 4 * width), nn.SiLU())
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(ResidualBlock(a, b, 4 * width) for a, b in pairwise((width, *sizes)))
        self.middle = ResidualBlock(sizes[-1], sizes[-1], 4 * width)
        self.attention = Attention(sizes[-1], 4)
        self.up = nn.ModuleList(
            ResidualBlock(2 * b, a, 4 * width) for a, b in reversed(list(pairwise((width, *sizes))))
        )
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The noise in ``images``, (B, 3, H, W), at ``times``, (B,)."""
        time, x = self.times(times), self.stem(images)
        skipped = []
        for block in self.down:
            skipped.append(block(x, time))
            x = nn.functional.avg_pool2d(skipped[-1], 2)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat((x, skipped.pop()), dim=1), time)
        noise: torch.Tensor = self.head(x)
        return noise
