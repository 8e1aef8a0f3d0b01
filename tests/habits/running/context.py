"""What a habit is run in: its part of the batch, its wrapper, and what it records."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from osdp import OSDP, ModelDesc, Training
from osdp.comm.objects import on_first_rank
from tests.habits.running.habit import Habit
from tests.habits.running.nets import CLASSES, FEATURES, WORDS, mse
from tests.habits.running.plans import PLANS, plan_of

#: One process with all ranks' batches: what is right by definition.
ALONE = "alone"
#: The frameworks whose users OSDP's must not envy.
BASELINES = ("ddp", "fsdp2")
FRAMEWORKS = (*BASELINES, *PLANS)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Record:
    """Values that must be equal in every framework.

    Attributes:
        name: What they are.
        values: Whole tensors by name.
        starts: What they were before training, where that is known: differences of parameters are taken
            relative to how far these have moved in low precision.
        own: Whether each rank records its own part of what one process has.
    """

    name: str
    values: dict[str, torch.Tensor | None]
    starts: dict[str, torch.Tensor]
    own: bool = False


class Context:
    """One run of a habit.

    Attributes:
        framework: ``"alone"``, one of :data:`BASELINES` or the name of a plan.
        world_size: Ranks, also of those that the one process stands for.
        ranks: Those whose batches are computed here.
        records: What was recorded.
        modes: Modes that the plans of its models have together.

    Args:
        habit: What is run.
        framework: As the attribute.
        world_size: As the attribute.
        rank: Of this process.
        param_dtype: Dtype that frameworks compute parameters in.
        descriptions: Those of the models that the habit wraps, in order, as far as an earlier run described
            them; grows.
    """

    def __init__(
        self,
        habit: Habit,
        framework: str,
        world_size: int,
        rank: int,
        param_dtype: torch.dtype | None,
        descriptions: list[ModelDesc] | None = None,
    ) -> None:
        self.framework = framework
        self.world_size = world_size
        self.ranks = range(world_size) if framework == ALONE else range(rank, rank + 1)
        self.records: list[Record] = []
        self.modes: set[str] = set()
        self._habit = habit
        self._rank = rank
        self._param_dtype = param_dtype
        self._starts: dict[str, torch.Tensor] = {}
        self._descriptions = [] if descriptions is None else descriptions
        self._wrapped = 0

    # Where it runs

    @property
    def alone(self) -> bool:
        """Whether one process stands for all ranks."""
        return self.framework == ALONE

    @property
    def osdp(self) -> bool:
        """Whether OSDP runs it."""
        return self.framework in PLANS

    @property
    def ddp(self) -> bool:
        """Whether DDP runs it."""
        return self.framework == "ddp"

    @property
    def units(self) -> bool:
        """Whether the model's units have FSDP2's setters."""
        return self.osdp or self.framework == "fsdp2"

    @property
    def low(self) -> bool:
        """Whether parameters are computed in bfloat16 where the framework can."""
        return self._param_dtype is not None

    # What it trains on

    def batch(self, step: int = 0, rows: int = 4) -> Batch:
        """Features and targets of this step: all rows in one process, this rank's on ranks."""
        parts = self.parts(step, rows)
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def parts(self, step: int = 0, rows: int = 4) -> list[Batch]:
        """The same by rank, of the ranks that are computed here."""
        return [self.part(step, rank, rows) for rank in self.ranks]

    def part(self, step: int, rank: int, rows: int = 4) -> Batch:
        """The part of one rank."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64)
        dtype = torch.get_default_dtype()
        return x.to(dtype), y.to(dtype)

    def tokens(self, step: int = 0, rows: int = 2, length: int = 6, words: int = WORDS) -> torch.Tensor:
        """Tokens of this step, as :meth:`batch`."""
        drawn = [
            torch.randint(
                0, words, (rows, length), generator=torch.Generator().manual_seed(1000 * step + rank)
            )
            for rank in self.ranks
        ]
        return torch.cat(drawn)

    # How it is wrapped

    def wrap(self, model: nn.Module, *sample: Any, loss_fn: Any = None, **options: Any) -> Any:
        """``model`` as this framework trains it.

        Args:
            model: The plain model.
            sample: What its forward takes, for a description; features if there is none.
            loss_fn: How a loss is made of its output, for the description.
            options: Of ``OSDP``.
        """
        self._starts = {name: p.detach().clone() for name, p in model.named_parameters()}
        if self.alone:
            return model
        if self.ddp:
            return DistributedDataParallel(model, find_unused_parameters=self._habit.unused)
        if self.framework == "fsdp2":
            return self._fsdp2(model)
        return OSDP(model, plan=self.plan(model, *sample, loss_fn=loss_fn), **options)

    def plan(self, model: nn.Module, *sample: Any, loss_fn: Any = None) -> Any:
        """The plan that OSDP runs the plain ``model`` under."""
        desc = self._described(model, sample or (self.batch()[0],), loss_fn)
        training = Training(
            optimizer=self._habit.optimizer,
            momentum=self._habit.optimizer == "SGD",
            param_dtype="bfloat16" if self.low else None,
            reduce_dtype="float32" if self.low else None,
            **self._habit.training,
        )
        plan = plan_of(self.framework, desc, training, self.world_size)
        self.modes |= {mode.value for mode in plan.modes.values()}
        return plan

    def _described(self, model: nn.Module, inputs: Sequence[Any], loss_fn: Any) -> ModelDesc:
        self._wrapped += 1
        if self._wrapped > len(self._descriptions):
            with torch.random.fork_rng(devices=[]):
                batch = inputs if len(inputs) > 1 else inputs[0]
                desc = on_first_rank(partial(ModelDesc.from_module, model, batch, loss_fn=loss_fn))
            self._descriptions.append(desc)
        return self._descriptions[self._wrapped - 1]

    def _fsdp2(self, model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(
            param_dtype=self._param_dtype, reduce_dtype=torch.float32 if self.low else None
        )
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def inner(self, model: nn.Module) -> Any:
        """The user's own module: DDP hides its methods and attributes."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> Any:
        """The framework's way not to reduce gradients in the backwards inside."""
        if self.alone:
            return nullcontext()
        return _by_setter(model) if self.framework == "fsdp2" else model.no_sync()

    def clip(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The framework's way to clip gradients; the norm before, whole."""
        if self.osdp:
            return whole(model.clip_grad_norm_(max_norm, norm_type))
        return whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))

    # How it is trained

    def sgd(self, model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
        """SGD with momentum over all that is trained."""
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0
    ) -> None:
        """The plain loop over features and targets; the losses are recorded."""
        self.train_on(model, optimizer, [self.batch(step) for step in range(first, first + steps)])

    def train_on(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        """The same over these batches."""
        for x, y in batches:
            optimizer.zero_grad()
            self.loss(mse(model(x), y)).backward()
            optimizer.step()

    # What must be equal

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Record the mean of ``value`` over ranks; ``value`` again."""
        self.value("loss", self.mean(value.detach()))
        return value

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks."""
        if self.alone:
            return value
        value = whole(value).detach().to(torch.float64).clone()
        dist.all_reduce(value)
        return value / self.world_size

    def value(self, name: str, value: Any) -> None:
        """Record a tensor or number that every rank has alike."""
        tensor = None if value is None else whole(torch.as_tensor(value)).detach().clone()
        self.records.append(Record(name, {"": tensor}, {}))

    def rows(self, name: str, value: torch.Tensor) -> None:
        """Record what all ranks have together, each the rows of its part of the batch."""
        value = whole(value).detach().to(torch.float64).contiguous()
        if not self.alone:
            parts = [torch.empty_like(value) for _ in range(self.world_size)]
            dist.all_gather(parts, value)
            value = torch.cat(parts)
        self.value(name, value)

    def own(self, name: str, values: Sequence[torch.Tensor]) -> None:
        """Record one tensor for each rank that is computed here, without a word to the others."""
        parts = {
            f"rank {rank}": whole(v).detach().clone() for rank, v in zip(self.ranks, values, strict=True)
        }
        self.records.append(Record(name, dict(parts), {}, own=True))

    def weights(self, model: nn.Module, name: str = "weights") -> None:
        """Record all parameters of ``model``, whole."""
        values = {key: whole(p).detach().clone() for key, p in named(model)}
        self.records.append(Record(name, dict(values), self._starts))

    def gradients(self, model: nn.Module, name: str = "gradients") -> None:
        """Record all gradients, whole, and which there are not."""
        values = {key: None if p.grad is None else whole(p.grad).clone() for key, p in named(model)}
        self.records.append(Record(name, values, {}))

    def buffers(self, model: nn.Module, name: str = "buffers") -> None:
        """Record all buffers, which must be alike on all ranks."""
        values = {_plain(key): whole(b).detach().clone() for key, b in model.named_buffers()}
        self.records.append(Record(name, dict(values), {}))


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the plain model's names."""
    for name, parameter in model.named_parameters():
        yield _plain(name), parameter


def _plain(name: str) -> str:
    for part in ("module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.removeprefix(part) if part == "module." else name.replace(part, "")
    return name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that FSDP2's users wrap: the entries of the outermost module lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return [module for module in dict.fromkeys(found) if any(True for _ in module.parameters())]


@contextmanager
def _by_setter(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
