"""Precision: autocast, mixed dtypes, integers."""

import torch

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Block, Net, mse


@habit(tolerance=0.05, low_tolerance=None)
def autocast(ctx: Context) -> None:
    """Trains in float32 under autocast to bfloat16."""
    model = ctx.wrap(Net().float(), ctx.batch()[0].float())
    optimizer = ctx.sgd(model, lr=0.02)
    for step in range(2):
        x, y = (part.float() for part in ctx.batch(step))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        ctx.loss(mse(output, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=1e-5, low_tolerance=None)
def float32(ctx: Context) -> None:
    """Trains in float32."""
    model = ctx.wrap(Net().float(), ctx.batch()[0].float())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = (part.float() for part in ctx.batch(step))
        ctx.loss(mse(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit(tolerance=0.1, low_tolerance=None)
def all_in_bfloat16(ctx: Context) -> None:
    """Trains a model whose parameters are bfloat16."""
    model = ctx.wrap(Net().bfloat16(), ctx.batch()[0].bfloat16())
    optimizer = ctx.sgd(model, lr=0.02)
    x, y = (part.bfloat16() for part in ctx.batch())
    ctx.loss(mse(model(x).float(), y.float())).backward()
    ctx.gradients(model)
    optimizer.step()


@habit(tolerance=1e-5, low_tolerance=None, skips={"fsdp2": "takes one dtype for each unit"})
def head_in_another_dtype(ctx: Context) -> None:
    """Keeps the head and the norms in float32 beside float64."""

    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encode(x).float())

    net = Mixed()
    net.head.float()
    model = ctx.wrap(net)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def positions_in_full_precision(ctx: Context) -> None:
    """Gives each block positions in the dtype of the inputs, and scales by such a number inside."""

    class Placed(Block):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return super().forward(x + places) * places.new_full((), 0.5)

    class PlacedNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Placed(25) for _ in range(3))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.linspace(0, 1, 25, dtype=torch.get_default_dtype())
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, places)
            return x

    model = ctx.wrap(PlacedNet())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def buffers_of_integers(ctx: Context) -> None:
    """Keeps integers, booleans and non-persistent buffers beside parameters."""

    class Indexed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("order", torch.arange(25).flip(0))
            self.register_buffer("mask", torch.arange(25) % 2 == 0, persistent=False)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return (super().encode(x)[:, self.order]) * self.mask

    model = ctx.wrap(Indexed())
    ctx.train(model, ctx.sgd(model))
    ctx.buffers(model)
    ctx.weights(model)


@habit()
def large_norms(ctx: Context) -> None:
    """Clips gradients whose squares a float32 cannot hold."""
    model = ctx.wrap(Net())
    x, y = ctx.batch()
    scale = 1.0 if ctx.low or torch.get_default_dtype() == torch.float32 else 1e25
    (mse(model(x), y) * scale).backward()
    ctx.value("norm", ctx.clip(model, 1.0))
    ctx.gradients(model)


@habit()
def moved_and_cast_in_vain(ctx: Context) -> None:
    """Calls model.to(device) and the cast to the dtype that it has already."""
    model = ctx.wrap(Net())
    model = model.to("cpu").to(torch.get_default_dtype())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(low_tolerance=None, skips={"fsdp2": "gloo reduces and scatters no complex numbers"})
def complex_weights(ctx: Context) -> None:
    """Trains complex weights beside real ones, as Fourier neural operators have them."""

    class Operator(Net):
        def __init__(self) -> None:
            super().__init__()
            dtype = torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
            self.mixed = torch.nn.Sequential(
                *(torch.nn.Linear(13, 13, dtype=dtype) for _ in range(2)),
            )

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(self.mixed(torch.fft.rfft(super().encode(x))), n=25)

    model = ctx.wrap(Operator())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(low_tolerance=None)
def complex_numbers(ctx: Context) -> None:
    """Filters by a Fourier transform inside the model."""

    class Fourier(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(super().encode(x)) * (0.5 + 0.1j), n=25)

    model = ctx.wrap(Fourier())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)
