"""Habits that are right in one process, in stages: against a single process, whatever the schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from osdp import OSDP, DeviceInfo, Link, ModelDesc, Training
from osdp.comm.objects import on_first_rank
from osdp.hardware.device_info import PointToPointLink
from osdp.model.dataflow import transfers
from osdp.profiler.roofline import estimate
from osdp.runtime.pipeline.output_shapes import twins_of
from osdp.runtime.pipeline.stage import build_stage
from osdp.tracing.dataflow import trace_flow
from tests.helpers import distributed

WIDTH, SAMPLES, PARTS = 8, 8, 2


class Layers(nn.Module):
    """Blocks one after the other; ``kinds`` of them change how they compute."""

    def __init__(self, block: Callable[[], nn.Module], around: str = "", first: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() if first or index else linear() for index in range(4))
        self.around, self.gain, self.calls = around, 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width)."""
        self.calls += 1
        total = torch.zeros_like(x)
        for block in self.blocks:
            if self.around.endswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant checkpoint")
            elif self.around == "total":
                x = block(x, total)
            elif self.around == "pair":
                found = block(x)
                x = found[0] if isinstance(found, tuple) else found
            else:
                x = block(x)
        return (self.gain * (x + total)).real


class Coupling(nn.Module):
    """Fills its output by halves, as coupling layers of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width)."""
        left, right = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        out[..., : WIDTH // 2] = left + self.first(right)
        out[..., WIDTH // 2 :] = right + self.second(left)
        return out


class InPlace(nn.Linear):
    """Begins with an activation in place, as blocks of ResNets do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width)."""
        return super().forward(nn.functional.leaky_relu(input, 0.3, inplace=True))


class Adding(nn.Linear):
    """Adds to a tensor that the code around it has made."""

    def forward(self, input: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Both of shape (samples, width)."""
        made = torch.tanh(super().forward(input))
        total += made
        return made


class Spectral(nn.Module):
    """Returns complex numbers to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width)."""
        return torch.fft.fft(x.real) * self.weight


class Sum(nn.Module):
    """Two weights of which the sum is used."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width)."""
        return torch.tanh(x @ (self.base + self.delta))


class Pair(nn.Linear):
    """Returns something beside its output while it is trained."""

    def forward(self, input: torch.Tensor) -> Any:
        """Shape (samples, width)."""
        made = torch.tanh(super().forward(input))
        return (made, made.mean()) if self.training else made


def test_nothing_is_cut_after_a_block_that_writes_into_what_every_stage_makes() -> None:
    """A later stage added to zeros of its own."""
    model = Layers(partial(Adding, WIDTH, WIDTH), "total").double()
    assert trace_flow(model, (data()[0],)).cuts == ()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "coupling": partial(Layers, Coupling),
    "in place": partial(Layers, partial(InPlace, WIDTH, WIDTH), first=False),
    "spectral": partial(Layers, Spectral),
    "sum": partial(Layers, Sum),
    "checkpoint": partial(Layers, linear, "checkpoint"),
    "pair": partial(Layers, partial(Pair, WIDTH, WIDTH), "pair"),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).abs().square().sum(), len(target)


def wrapped(model: nn.Module, **options: Any) -> OSDP:
    training = Training(local_batch=SAMPLES // PARTS, microbatches=PARTS)
    sample = (data()[0][: SAMPLES // PARTS],)
    model_desc = on_first_rank(partial(ModelDesc.from_module, model, sample))
    device = DeviceInfo(
        memory_limit=2**30, devices_per_node=1, flops=1e9, memory_bandwidth=1e9,
        links=tuple(Link(n, "world", 1, 1e-4, 1e8) for n in ("all_gather", "reduce_scatter", "all_reduce")),
        stage_link=PointToPointLink(1e-4, 1e8),
    )  # fmt: skip
    return OSDP(
        model, model_desc, device, training=training, profile=estimate(model_desc, device, training),
        pp=dist.get_world_size(), **options,
    )  # fmt: skip


def train_alone(model: nn.Module) -> float:
    x, target = data()
    total, count = loss_fn(model(x), target)
    (total / count).backward()
    return float(total.detach()) / count


def same_as_one_process() -> None:
    for name in MODELS:
        for schedule in ("1f1b", "zb-h1"):
            reference, model = made(name), wrapped(made(name), schedule=schedule)
            want = train_alone(reference)
            got = model.train_step(*data(), loss_fn)
            assert abs(float(got) - want) < 1e-5 * want, (name, schedule, float(got), want)
            gradients = dict(reference.named_parameters())
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(
                    parameter.grad, gradients[key].grad, msg=f"{name} {schedule} {key}"
                )
            model.eval()
            reference.eval()
            evaluated = model.eval_step(*data(), loss_fn)
            total, count = loss_fn(reference(data()[0]), data()[1])
            wanted = float(total.detach()) / count
            assert abs(float(evaluated) - wanted) < 1e-5 * wanted, (name, schedule)


def test_odd_models_train_as_in_one_process() -> None:
    distributed.run(2, same_as_one_process)


def what_is_set_later() -> None:
    reference, model = made("sum"), wrapped(made("sum"), schedule="1f1b")
    seen: list[int] = []
    for each in (reference, model.module):
        each.gain *= 0.5
    handle = model.module.register_forward_hook(lambda *_: seen.append(1))
    model.gain = model.gain * 1.0
    want = train_alone(reference)
    assert abs(float(model.train_step(*data(), loss_fn)) - want) < 1e-5 * want
    assert len(seen) == PARTS
    assert model.module.calls == model.calls == PARTS, model.calls
    handle.remove()
    model.eval_step(*data(), loss_fn)
    assert len(seen) == PARTS


def counted_once() -> None:
    for schedule in ("interleaved", "zb-v"):
        model = wrapped(made("sum"), schedule=schedule)
        for step in (1, 2):
            model.train_step(*data(), loss_fn)
            model.zero_grad()
            assert model.calls == step * PARTS, (schedule, model.calls)
        model.calls = 100  # what a user sets all stages of a rank go on from
        model.eval_step(*data(), loss_fn)
        assert model.calls == 100 + PARTS, (schedule, model.calls)


def test_two_stages_of_a_rank_count_a_forward_once() -> None:
    """The second went on from what the first had counted."""
    distributed.run(2, counted_once)


def test_containers_see_what_is_set_or_hooked_after_wrapping() -> None:
    distributed.run(2, what_is_set_later)


def scaled_between_backward_and_step(scale: Callable[[OSDP], object], is_refused: bool) -> None:
    model = wrapped(made("sum"), schedule="1f1b")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train_step(*data(), loss_fn)
    scale(model)
    optimizer.step()
    optimizer.zero_grad()
    if is_refused:
        with pytest.raises(RuntimeError, match=r"Call model\.clip_grad_norm_\(max_norm\)"):
            model.train_step(*data(), loss_fn)
    else:
        model.train_step(*data(), loss_fn)


def _of_some(model: OSDP) -> None:
    """Gradients of one kind of weights alone, and of the first stage's another."""
    for name, parameter in model.named_parameters():
        if "delta" in name and parameter.grad is not None:
            parameter.grad.mul_(0.1 + 0.2 * dist.get_rank())


SCALES: dict[str, tuple[Callable[[OSDP], object], bool]] = {
    "by torch's clipping": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1), True),
    "by the model's clipping": (lambda m: m.clip_grad_norm_(0.1), False),
    "by torch's clipping below its limit": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e9), False),
    "alike": (lambda m: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None], False),
    "in part": (_of_some, False),
}


def scaled_in_all_ways() -> None:
    for name, (scale, is_refused) in SCALES.items():
        try:
            scaled_between_backward_and_step(scale, is_refused)
        except BaseException as error:
            raise AssertionError(name) from error


def test_stages_that_clip_each_by_its_own_norm_are_seen() -> None:
    """torch.nn.utils.clip_grad_norm_ sees the parameters of one rank, and trained in silence."""
    distributed.run(2, scaled_in_all_ways)


def frozen_stages() -> None:
    reference, model = made("sum"), wrapped(made("sum"), schedule="1f1b")
    for each in (reference, model.module):
        for index, block in enumerate(each.blocks):
            block.requires_grad_(index == 3)
    for _ in range(2):
        want = train_alone(reference)
        assert abs(float(model.train_step(*data(), loss_fn)) - want) < 1e-5 * want
        gradients = dict(reference.named_parameters())
        for key, parameter in model.named_parameters():
            if parameter.grad is not None or gradients[key].grad is not None:
                torch.testing.assert_close(parameter.grad, gradients[key].grad)
        # Stages that are frozen have none to set to zero.
        reference.zero_grad()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    if dist.get_rank():
        next(iter(model.parameters())).grad = None
        list(model.parameters())[-1].grad = torch.ones_like(list(model.parameters())[-1])
    with pytest.raises(RuntimeError, match="gradients of an earlier step"):
        model.train_step(*data(), loss_fn)


def test_a_frozen_stage_takes_part_where_ranks_agree() -> None:
    """It went on by itself, and all waited."""
    distributed.run(2, frozen_stages)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused() -> None:
    """The gradient of what another stage had computed was lost without a word."""
    x = data()[0]
    flow = trace_flow(Layers(linear).double(), (x,))
    model = Layers(linear, "reentrant checkpoint").double()
    modules = tuple(step.module for step in flow.steps)
    moves, twins, kept = transfers(flow, (0, 2, 4)), twins_of(model, modules), modules[2:]
    stage = build_stage(model, 1, kept, (), twins, moves, is_last=True, device=torch.device("cpu"))
    stage.watch(kept)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        stage.forward([x.clone().requires_grad_()], (x,), {})
