"""Layers whose parameters are odd: attention, recurrence, convolutions, norms of rows, scalars, ties."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import WORDS, Block, Net, Words, mse, next_word


def _words(ctx: Context, net: nn.Module, steps: int = 2) -> None:
    model = ctx.wrap(net, ctx.tokens())
    optimizer = ctx.sgd(model)
    for step in range(steps):
        tokens = ctx.tokens(step)
        ctx.loss(next_word(model(tokens), tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def tied_weights(ctx: Context) -> None:
    """Trains a language model whose head is its embedding."""
    _words(ctx, Words(tied=True))


@habit()
def untied_weights(ctx: Context) -> None:
    """Trains a language model with a head of its own."""
    _words(ctx, Words(tied=False))


@habit()
def transformer_layers(ctx: Context) -> None:
    """Trains nn.TransformerEncoderLayer, whose attention uses weights outside their modules."""
    net = Words()
    net.blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(25, 5, 40, dropout=0.0, batch_first=True) for _ in range(2)
    )
    _words(ctx, net)


@habit()
def multihead_attention(ctx: Context) -> None:
    """Trains nn.MultiheadAttention in blocks of its own."""

    class Attention(Block):
        def __init__(self) -> None:
            super().__init__(25)
            self.attention = nn.MultiheadAttention(25, 5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.attention(x, x, x, need_weights=False)[0])

    net = Words()
    net.blocks = nn.ModuleList(Attention() for _ in range(2))
    _words(ctx, net)


@habit()
def lstm(ctx: Context) -> None:
    """Trains an LSTM, whose weights are one flat list."""

    class Recurrent(Words):
        def __init__(self) -> None:
            super().__init__(tied=False, depth=1)
            self.lstm = nn.LSTM(25, 25, num_layers=2, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.lstm(self.blocks[0](self.embed(tokens)))[0]))

    _words(ctx, Recurrent())


@habit(low_tolerance=None)
def convolutions_and_batch_norm(ctx: Context) -> None:
    """Trains convolutions with BatchNorm on one batch that all ranks see."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv1d(width, 7, 3, padding=1), nn.BatchNorm1d(7), nn.ReLU())
                for width in (1, 7, 7)
            )
            self.head = nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(-1))

    model = ctx.wrap(Convolved(), ctx.part(0, 0)[0])
    ctx.train_on(model, ctx.sgd(model), [ctx.part(step, 0) for step in range(2)])
    ctx.buffers(model)
    ctx.weights(model)


@habit()
def group_norm_and_convolutions(ctx: Context) -> None:
    """Trains transposed convolutions with GroupNorm."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.ConvTranspose1d(width, 6, 3), nn.GroupNorm(2, 6), nn.GELU())
                for width in (1, 6)
            )
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(-1))

    model = ctx.wrap(Convolved())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(refused="max_norm")
def embedding_with_max_norm(ctx: Context) -> None:
    """Trains nn.Embedding(max_norm=...), which renormalises rows in forward."""
    net = Words(tied=False)
    net.embed = nn.Embedding(WORDS, 25, max_norm=1.0)
    _words(ctx, net, steps=3)


@habit(refused="sparse", skips={"fsdp2": "takes no sparse gradients"}, low_tolerance=None)
def sparse_embedding(ctx: Context) -> None:
    """Trains nn.Embedding(sparse=True)."""
    net = Words(tied=False)
    net.embed = nn.Embedding(WORDS, 25, sparse=True)
    _words(ctx, net)


@habit()
def embedding_bag(ctx: Context) -> None:
    """Trains nn.EmbeddingBag with a padding index."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(WORDS, 25, padding_idx=0)
            self.blocks = nn.ModuleList(Block(25) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.bag(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    model = ctx.wrap(Bag(), ctx.tokens())
    optimizer = ctx.sgd(model)
    for step in range(2):
        ctx.loss(model(ctx.tokens(step)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(skips={"fsdp2": "rejects scalars"})
def scalar_parameter(ctx: Context) -> None:
    """Trains a temperature: a parameter without dimensions."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.temperature

    model = ctx.wrap(Scaled())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(unused=True, refused="no element")
def parameter_of_size_zero(ctx: Context) -> None:
    """Registers a parameter without elements."""

    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.zeros(0, 25))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encode(x) + self.prompt.sum(0))

    model = ctx.wrap(Empty())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def parameter_lists(ctx: Context) -> None:
    """Keeps parameters in ParameterList and ParameterDict, of the root and of blocks."""

    class Listed(Block):
        def __init__(self) -> None:
            super().__init__(25)
            self.scales = nn.ParameterList(torch.ones(25) for _ in range(2))
            self.shifts = nn.ParameterDict({"a": torch.zeros(25)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scales[0] * self.scales[1] + self.shifts["a"]

    net = Net()
    net.blocks = nn.ModuleList(Listed() for _ in range(3))
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def parametrised(ctx: Context) -> None:
    """Keeps weights symmetric by a parametrization of the user's own."""

    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).mT

    net = Net()
    net.square = nn.Linear(25, 25)
    parametrize.register_parametrization(net.square, "weight", Symmetric())
    net.head = nn.Sequential(net.square, net.head)
    del net.square
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def functional_weights(ctx: Context) -> None:
    """Uses another module's weight by a function: F.linear(x, self.stem.weight.T)."""

    class Transposed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            decoded = nn.functional.linear(self.encode(x), self.stem.weight.T)
            return self.head(self.encode(decoded))

    model = ctx.wrap(Transposed())
    ctx.train(model, ctx.sgd(model, lr=0.02))
    ctx.weights(model)


@habit()
def experts(ctx: Context) -> None:
    """Mixes experts by soft gates, all of which run."""

    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(25, 3)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            gates = self.router(x).softmax(-1)
            outputs = torch.stack([block(x) for block in self.blocks], -1)
            return (outputs * gates[:, None]).sum(-1)

    model = ctx.wrap(Experts())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def names_with_dots(ctx: Context) -> None:
    """Looks a block up in a ModuleDict by a name with a slash and one of a number."""
    net = Net()
    net.heads = nn.ModuleDict({"a/b": nn.Linear(25, 3), "0": nn.Linear(25, 3)})
    net.forward = lambda x: net.heads["a/b"](net.encode(x)) + net.heads["0"](net.encode(x))
    net.head = nn.Identity()
    model = ctx.wrap(net)
    optimizer = ctx.sgd(model, lr=0.02)
    x, y = ctx.batch()
    ctx.loss(mse(model(x), y)).backward()
    optimizer.step()
    ctx.weights(model)
