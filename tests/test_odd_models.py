"""Models that are odd, and wrappers in and around them: right under every plan, or refused by one line.

A replicated OSDP inside a bigger model was not noticed, and trained with gradients reduced twice; a sharded
one was refused. What happened to parameters without elements depended on the plan, too.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from osdp import OSDP, make_plan
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import apply
from osdp.runtime.module.plain import check_plain
from osdp.runtime.sharding.sliced import slice_faults
from osdp.tracing.trace import describe
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand, split
from tests.helpers.random_plans import random_plan
from tests.helpers.training import differences

MODES = (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)
WIDTH = 4


def _linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return nn.Linear(inputs, outputs, dtype=torch.float64)


class Two(nn.Module):
    """A net of two layers, which is its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(), _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


class Elementless(Two):
    """Parameters without elements: of the model, of a module alone, and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.from_none, self.to_none = _linear(inputs=0), _linear(outputs=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, self.to_none(x)], -1) + self.from_none(x[:, :0])
        return super().forward(x) + self.none.sum()


class Scaled(Two):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ParameterDict({"of": nn.Parameter(torch.tensor(1.5, dtype=torch.float64))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale["of"])


class Parametrized(Two):
    """Weights that are computed of parameters of modules with names of several parts."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)
        nn.utils.parametrizations.orthogonal(self.second)


class PartlyScripted(Two):
    """TorchScript inside, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.act = torch.jit.script(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.act(x))


class Compiled(Two):
    """A part that is compiled, which is a module around that part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(self.first, backend="eager")


class Cut(Two):
    """A weight that is a part of a larger tensor, and buffers with gaps, and with one element for all."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        wide = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.first.weight = nn.Parameter(wide[:, :WIDTH])
        self.register_buffer("scale", wide[:, WIDTH])
        self.register_buffer("shift", torch.randn(1, dtype=torch.float64).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale + self.shift)


MODELS = {kind.__name__: kind for kind in (Elementless, Scaled, Parametrized, PartlyScripted, Compiled, Cut)}


def _built(name: str) -> nn.Module:
    torch.manual_seed(2)
    return MODELS[name]()


def _batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(_batch(step, rank))


def _plans(name: str) -> dict[str, Plan]:
    desc = describe(_built(name), _batch(0, 0))
    plans = {f"seed {seed}": random_plan(desc, 2, seed) for seed in range(2)}
    if name == "Scaled":
        return plans  # what has no dimension cannot be sharded, which no search decides
    return plans | {mode.value: plan_by_hand(_built(name), mode, 2) for mode in MODES}


def _train(cases: list[tuple[str, str, Plan]]) -> list[str]:
    found = []
    for name, where, plan in cases:
        apart = differences(partial(_built, name), _loss, plan)
        found += [f"{name}, {where}: {difference}" for difference in apart]
    return found


def test_odd_models_train_as_a_single_process_does() -> None:
    cases = [(name, where, plan) for name in MODELS for where, plan in _plans(name).items()]
    assert run(2, _train, cases) == [[], []]


def _train_elementless() -> None:
    wrapped = OSDP(_built("Elementless"), plan=plan_by_hand(_built("Elementless"), Mode.FULL_SHARD, 2))
    optimizer = torch.optim.AdamW(wrapped.parameters(), foreach=True)
    before = {name: value.full_tensor() for name, value in wrapped.state_dict().items()}
    for _ in range(2):
        wrapped(_batch(0, dist.get_rank())).backward()
        assert wrapped.clip_grad_norm_(1.0) > 0
        optimizer.step()
        optimizer.zero_grad()
    wrapped.load_state_dict(wrapped.state_dict())
    after = wrapped.state_dict()
    assert after["none"].shape == (0, 3) and after["to_none.weight"].shape == (0, WIDTH)
    assert not torch.equal(after["first.weight"].full_tensor(), before["first.weight"])


def test_parameters_without_elements_go_through_optimizer_clipping_and_state_dict() -> None:
    run(2, _train_elementless)


# What is refused


class Later(Two):
    def forward(self, x: torch.Tensor) -> object:
        yield super().forward(x)


class Coroutine(Two):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Around(nn.Module):
    """A model of which another one is a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.last(x))


def _dotted_module() -> nn.Module:
    model = Around(nn.ModuleDict())
    model.inner._modules["a.b"] = _linear()
    return model


def _dotted_parameter() -> nn.Module:
    model = Two()
    model._parameters["a.b"] = nn.Parameter(torch.ones(2))
    return model


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Around(torch.jit.script(nn.Linear(2, 2)))


def _in_one_memory() -> nn.Module:
    model = Two()
    model.second.weight.data = model.first.weight.data
    return model


#: How to make a model that is refused, and the words that say why.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dotted module": (_dotted_module, "inner registers 'a.b', and a dot separates"),
    "dotted parameter": (_dotted_parameter, "the root registers 'a.b', and a dot separates"),
    "TorchScript": (_scripted, "inner is a TorchScript module"),
    "generator": (lambda: Around(Later()), "the forward of inner, of type Later, is a generator"),
    "coroutine": (Coroutine, "the forward of the root, of type Coroutine, is a generator or coroutine"),
    "DataParallel": (lambda: Around(DataParallel(Two())), "inner is a DataParallel"),
    "one memory": (_in_one_memory, "first.weight and second.weight are two parameters in one memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_wrapped_is_refused_before_it_is_planned(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        make_plan(make(), _batch(0, 0), "1GiB")
    with pytest.raises(ValueError, match=words):
        check_plain(make())


def _osdp(mode: Mode) -> nn.Module:
    return OSDP(Two(), plan=plan_by_hand(Two(), mode, dist.get_world_size()))


def _applied(mode: Mode) -> nn.Module:
    model = Two()
    apply(model, plan_by_hand(model, mode, dist.get_world_size()))
    return model


def _wrap_again(inner: nn.Module, mode: Mode) -> None:
    # The plan is made for a plain model, as a description of it would be.
    OSDP(Around(inner), plan=plan_by_hand(Around(Two()), mode, dist.get_world_size()))


def _in_ddp(model: nn.Module) -> None:
    DistributedDataParallel(model)(_batch(0, 0))


#: What is done with a model of a mode, and the error and words it meets.
WRAPPED: dict[str, tuple[Callable[[Mode], object], str]] = {
    "OSDP in OSDP": (lambda mode: _wrap_again(_osdp(mode), mode), "inner is an OSDP"),
    "apply in OSDP": (lambda mode: _wrap_again(_applied(mode), mode), "inner is a Two"),
    "DDP in OSDP": (lambda mode: _wrap_again(DistributedDataParallel(Two()), mode), "a DistributedData"),
    "FSDP2 in OSDP": (lambda mode: _wrap_again(fully_shard(Two()), mode), "inner is a FSDPTwo"),
    "FSDP1 in OSDP": (
        lambda mode: _wrap_again(FullyShardedDataParallel(Two(), device_id=torch.device("cpu")), mode),
        "inner is a FullyShardedDataParallel",
    ),
    "OSDP in DDP": (lambda mode: _in_ddp(_osdp(mode)), "was given to DistributedDataParallel"),
    "OSDP in fully_shard": (lambda mode: fully_shard(_osdp(mode)), "was given to fully_shard"),
    "OSDP in a model in fully_shard": (
        lambda mode: fully_shard(Around(_osdp(mode))),
        "was given to fully_shard",
    ),
    "OSDP on several devices": (
        lambda mode: _osdp(mode)._replicate_for_data_parallel(),
        "was given to DataParallel",
    ),
}


def _refusals(names: list[str], modes: tuple[Mode, ...]) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    found = []
    for name in names:
        do, words = WRAPPED[name]
        for mode in modes:
            try:
                do(mode)
            except (RuntimeError, ValueError) as error:
                found += [] if words in str(error) else [f"{name}, {mode}: {error}"]
            else:
                found.append(f"{name}, {mode}: not refused")
    return found


def test_wrappers_in_and_around_are_refused_under_every_plan() -> None:
    assert run(2, _refusals, list(WRAPPED), MODES) == [[], []]


def _in_a_model_in_ddp() -> None:
    with pytest.raises(RuntimeError, match="was given to DistributedDataParallel"):
        _in_ddp(Around(_osdp(Mode.NO_SHARD)))
    # Beside a model in DDP, as a frozen teacher is, it runs.
    teacher = _osdp(Mode.NO_SHARD)

    class Student(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + teacher(x).detach()

    _in_ddp(Student())


def test_a_model_with_an_osdp_inside_is_refused_by_its_first_forward_in_ddp() -> None:
    run(1, _in_a_model_in_ddp)


def test_a_compiled_module_is_not_sliced() -> None:
    """It would go on to run the module that it compiled, whose weight is in shards then."""
    desc = describe(Compiled(), _batch(0, 0))
    assert [operator.cut is not None for operator in desc.operators] == [False, True]
    plan = split(plan_by_hand(Compiled(), Mode.FULL_SHARD, 2), Compiled(), 2)
    faults = list(slice_faults(Compiled(), plan.sharding))
    assert len(faults) == 1 and "'first' was made by torch.compile" in faults[0]


def _with_forward() -> nn.Module:
    model = Two()
    model.first.forward = MethodType(nn.Linear.forward, model.first)
    return model


def _compiled_in_place() -> nn.Module:
    model = Two()
    model.first.compile(backend="eager")
    return model


@pytest.mark.parametrize("make", [_with_forward, _compiled_in_place])
def test_a_module_that_runs_something_of_its_own_is_not_sliced(make: Callable[[], nn.Module]) -> None:
    """The search cut it where memory was short, and its plan was refused, or failed in the first step."""
    desc = describe(make(), _batch(0, 0))
    assert [operator.cut is not None for operator in desc.operators] == [False, True]
    plan = split(plan_by_hand(Two(), Mode.FULL_SHARD, 2), Two(), 2)
    faults = list(slice_faults(make(), plan.sharding))
    assert len(faults) == 1 and "module 'first'" in faults[0]
