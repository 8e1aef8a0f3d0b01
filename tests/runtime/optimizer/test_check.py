"""Every optimizer of torch trains as in a single process, whatever is sharded, or says why it cannot."""

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from osdp import OSDP
from osdp.model.training import OPTIMIZERS, UNSUPPORTED, Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import apply
from tests.helpers.distributed import run
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import difference, whole

STEPS = 3
TOLERANCE = 1e-9
BOOLEANS = ("amsgrad", "centered", "nesterov")

Optimizers = Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]

#: The mode of each operator.
PLANS: dict[str, Any] = {
    "NO_SHARD": Mode.NO_SHARD,
    "FULL_SHARD": Mode.FULL_SHARD,
    "SHARD_GRAD_OP": Mode.SHARD_GRAD_OP,
    "mixed": {
        "": Mode.NO_SHARD,
        "embed": Mode.FULL_SHARD,
        "up": Mode.SHARD_GRAD_OP,
        "norm": Mode.FULL_SHARD,
        "head": Mode.FULL_SHARD,
    },
    "in slices": Mode.FULL_SHARD,
}


class Tiny(nn.Module):
    """Matrices of uneven shapes and vectors, one of them of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(5, 13)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.down(self.norm(torch.tanh(self.up(self.embed(batch)))))
        logits = self.head(x + self.gain(x[..., :1]))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def make() -> Tiny:
    torch.manual_seed(3)
    return Tiny().double()


def plan_of(name: str, model: nn.Module) -> Plan:
    plan = plan_by_hand(model, PLANS[name], dist.get_world_size())
    if name != "in slices":
        return plan
    # One row cannot be cut.
    modes = {"": Mode.FULL_SHARD, "gain": Mode.NO_SHARD}
    return split(plan_by_hand(model, modes, dist.get_world_size()), model, 2)


def wrapped(name: str, model: nn.Module) -> OSDP:
    return OSDP(model, plan=plan_of(name, model))


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 13, (3, 4), generator=generator)


def single_process(optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Weights after some steps on the batches of all ranks."""
    model, ranks = make(), range(dist.get_world_size())
    made = optimizers(list(model.parameters()))
    for step in range(STEPS):
        model.zero_grad()
        (sum(model(batch_of(step, rank)) for rank in ranks) / len(ranks)).backward()
        for optimizer in made:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(model: OSDP, made: Sequence[torch.optim.Optimizer]) -> None:
    for step in range(STEPS):
        for optimizer in made:
            optimizer.zero_grad()
        model(batch_of(step, dist.get_rank())).backward()
        for optimizer in made:
            optimizer.step()


def assert_trained(model: OSDP, want: dict[str, torch.Tensor], *where: Any) -> None:
    assert any(not torch.equal(want[name], start) for name, start in make().named_parameters()), where
    for name, parameter in model.named_parameters():
        off = difference(whole(parameter.detach()), want[name])
        assert off < TOLERANCE, (*where, name, off)


class Lamb(torch.optim.Optimizer):
    """Steps of the length of each parameter, as LAMB and LARS take: they need norms of whole parameters."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                square = self.state[p].setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 0.1)
                update = mean / (square.sqrt() + 1e-6)
                p.add_(update * (p.norm() / update.norm()), alpha=-group["lr"])


def steps_by_a_closure() -> None:
    """The copies that a closure's forward computes in are freed before the update, as a plan counts."""
    for name in ("NO_SHARD", "mixed"):
        net = make().float()
        modes = PLANS[name]
        model = OSDP(net, plan=plan_by_hand(net, modes, dist.get_world_size(), param_dtype="bfloat16"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held: list[nn.Parameter] = []
        sizes: list[list[int]] = []

        def closure(model: OSDP = model, optimizer: Any = optimizer, held: list[Any] = held) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch_of(0, dist.get_rank()))
            held[:] = [p for p in model.module.parameters() if p.dtype is torch.bfloat16]
            loss.backward()
            return loss.detach()

        def at_update(*_: Any, held: list[Any] = held, sizes: list[Any] = sizes) -> None:
            sizes.append([p.untyped_storage().size() for p in held if not isinstance(p, DTensor)])

        optimizer.register_step_post_hook(at_update)
        optimizer.step(closure)
        assert sizes[0] and not any(sizes[0]), (name, sizes)


def test_copies_are_freed_before_the_update_of_a_step_with_a_closure() -> None:
    run(2, steps_by_a_closure)


def all_optimizers() -> dict[str, Optimizers]:
    """Each class that can be planned for, with each of its implementations; and others than torch's."""
    found: dict[str, Optimizers] = {}
    for name, cost in OPTIMIZERS.items():
        kind = functools.partial(getattr(torch.optim, name), lr=0.02)
        options: dict[str, Any] = {option: True for option in cost.options if option in BOOLEANS}
        options |= {option: 0.1 for option in cost.options if option not in BOOLEANS}
        flags: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True, **options}]
        for flag in [*flags, {"fused": True}] if cost.fused else flags:
            found[f"{name} {flag}"] = lambda p, kind=kind, flag=flag: [kind(p, **flag)]  # type: ignore[misc]
    found["Lamb"] = lambda p: [Lamb(p)]
    found["two of them"] = lambda p: [torch.optim.AdamW(p[:3], lr=0.02), torch.optim.SGD(p[3:], lr=0.1)]
    return found


def rotating(plan: str) -> list[str]:
    """Two fifths of the optimizers, so that each is run under two plans."""
    place, count = list(PLANS).index(plan), len(PLANS)
    return [name for index, name in enumerate(all_optimizers()) if (index - place) % count in (0, 2)]


def train_alike(plan: str, chosen: Sequence[str]) -> None:
    logging.disable(logging.WARNING)  # most keep less than was planned for
    optimizers = all_optimizers()
    for name in chosen:
        model = make()
        most = Training(optimizer="RMSprop", momentum=True, centered=True, weight_decay=True, local_batch=1)
        model = OSDP(model, plan=replace(plan_of(plan, model), training=most))
        train(model, optimizers[name](list(model.parameters())))
        assert_trained(model, single_process(optimizers[name]), plan, name)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("plan", PLANS)
def test_optimizers_of_torch_train_alike(plan: str) -> None:
    run(2, train_alike, plan, rotating(plan), timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_optimizer_of_torch_trains_alike(plan: str) -> None:
    run(2, train_alike, plan, list(all_optimizers()), timeout=200)


REFUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
}


def refuses_optimizers() -> None:
    """They failed inside of torch where parameters are sharded, and trained where none is."""
    for name in PLANS:
        for kind, make_optimizer in REFUSED.items():
            model = wrapped(name, make())
            optimizer = make_optimizer(list(model.parameters()))
            before = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
            loss = model(batch_of(0, dist.get_rank()))
            loss.backward()
            reason = UNSUPPORTED[kind]
            with pytest.raises(
                RuntimeError, match=f"cannot be trained by {kind}.*{reason}.*torch.optim.AdamW"
            ):
                optimizer.step(lambda loss=loss: loss)
            for n, parameter in model.named_parameters():
                assert torch.equal(whole(parameter.detach()), before[n]), (name, kind, n)
            torch.optim.AdamW(model.parameters()).step()


def test_optimizers_that_need_whole_parameters_are_refused_under_every_plan() -> None:
    assert set(UNSUPPORTED) == set(REFUSED)
    run(2, refuses_optimizers, timeout=100)


class MuonOfShards(torch.optim.Muon):
    """A class with a step of its own may know better than torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-group["lr"])


def steps_of_subclasses_are_their_own() -> None:
    for name in PLANS:
        model = wrapped(name, make())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        train(model, [MuonOfShards(matrices, lr=0.02)])


def test_a_subclass_with_a_step_of_its_own_is_let_through() -> None:
    run(2, steps_of_subclasses_are_their_own)


def scales_with_an_infinity_of_one_rank() -> dict[str, tuple[float, bool]]:
    """Found by the scaler, and whether it stepped, where one shard of rank 1 has an infinite gradient."""
    found = {}
    for name in PLANS:
        model = wrapped(name, make())
        # Those that are sharded last, as a user's groups may have them.
        parameters = sorted(model.parameters(), key=lambda p: isinstance(p, DTensor) and not is_replicated(p))
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [whole(p.detach()).clone() for p in parameters]
        scaler.scale(model(batch_of(0, dist.get_rank()))).backward()
        if dist.get_rank() == 1 and isinstance(parameters[-1], DTensor):
            parameters[-1].grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        after = [whole(p.detach()) for p in parameters]
        stepped = any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
        found[name] = scaler.get_scale(), stepped
    return found


def is_replicated(parameter: DTensor) -> bool:
    return all(placement.is_replicate() for placement in parameter.placements)


def test_a_scaler_skips_a_step_on_all_ranks_if_one_shard_is_infinite() -> None:
    # Where the first gradient is replicated torch asked no other rank: one skipped its step, the others not.
    for found in run(2, scales_with_an_infinity_of_one_rank):
        assert found.pop("NO_SHARD") == (4.0, True)
        assert set(found.values()) == {(2.0, False)}, found


class Records(logging.Handler):
    """Keeps what is logged inside."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def __enter__(self) -> "Records":
        logging.getLogger("osdp").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("osdp").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def notes_what_was_planned_in_vain() -> list[str]:
    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, lr=0.1)]

    with Records() as records:
        for name in PLANS:
            model = wrapped(name, make())  # planned for AdamW
            train(model, optimizers(model.parameters()))
            assert_trained(model, single_process(optimizers), name)
    return records.messages


def test_an_optimizer_that_keeps_less_than_planned_trains_with_a_note() -> None:
    # It was refused, as one that keeps more is.
    told, silent = run(2, notes_what_was_planned_in_vain)
    noted = [text for text in told if "faster plan" in text]
    assert len(noted) == len(PLANS) and silent == []
    assert "SGD, which keeps 0 bytes" in noted[0] and "made for AdamW, which keeps 2" in noted[0]


class KeepsMore(torch.optim.AdamW):
    """Two more moments than its base, of which nobody knows before it has stepped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                for name in ("third", "fourth"):
                    self.state[p].setdefault(name, torch.zeros_like(p))
        return loss


def weighs_states(kind: type[torch.optim.AdamW]) -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    plan = plan_by_hand(model, {"": Mode.FULL_SHARD}, dist.get_world_size())
    wrapped = OSDP(model, plan=replace(plan, memory_limit=plan.predicted.peak_bytes))
    optimizer = kind(wrapped.parameters(), lr=1e-3)
    with Records() as records:
        for _ in range(2):
            wrapped(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [text for text in records.messages if "of states on this rank" in text]


def test_states_of_a_class_derived_from_one_of_torch_are_weighed_once() -> None:
    told, silent = run(2, weighs_states, KeepsMore)
    assert len(told) == 1 and told[0].startswith("KeepsMore keeps ") and silent == []
    assert run(2, weighs_states, torch.optim.AdamW) == [[], []]


def drops_gradients_in_a_hook() -> None:
    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        made = torch.optim.AdamW(parameters, lr=0.02)
        made.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        return [made]

    for mode in (Mode.SHARD_OPTIMIZER, Mode.FULL_SHARD):
        model = make()
        plan = plan_by_hand(model, {"": mode}, dist.get_world_size())
        wrapped = OSDP(model, plan=plan)
        train(wrapped, optimizers(list(wrapped.parameters())))
        assert_trained(wrapped, single_process(optimizers), mode)


def test_hooks_of_an_optimizer_may_drop_its_gradients() -> None:
    """Which parameters had been stepped, and were to be gathered, was asked after such hooks."""
    run(2, drops_gradients_in_a_hook)


def averages_weights() -> None:
    for name in PLANS:
        model = wrapped(name, make())
        with pytest.raises(RuntimeError, match=r"cannot be copied.*get_ema_multi_avg_fn") as caught:
            AveragedModel(model)
        plain = make()
        line_before, line_after = (line for line in str(caught.value).splitlines() if line.startswith("    "))
        names = {"model": model, "get_ema_multi_avg_fn": get_ema_multi_avg_fn, "decay": 0.9}
        wanted = {**names, "model": plain}
        for scope in (names, wanted):
            exec(line_before.strip(), scope)
            with torch.no_grad():
                for parameter in scope["model"].parameters():
                    parameter.mul_(2)
            exec(line_after.strip(), scope)
        for got, want in zip(names["average"], wanted["average"], strict=True):
            assert difference(whole(got), want) < TOLERANCE, name


def test_averages_of_weights_are_kept_as_the_error_says() -> None:
    run(2, averages_weights)


class Embeddings(nn.Module):
    """Of the two kinds."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6, **options)
        self.bags = nn.EmbeddingBag(13, 6, **options)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.words(batch).mean() + self.bags(batch).square().mean()


def refuses_embeddings() -> None:
    """Where they are replicated they trained, apart on each rank; sharded ones were never renormalised."""
    batch = batch_of(0, dist.get_rank())
    for mode in (Mode.NO_SHARD, Mode.FULL_SHARD, Mode.SHARD_GRAD_OP):
        for options, message in (
            (
                {"max_norm": 1.0},
                r"words is an Embedding\(max_norm=1.0\).*bags is an EmbeddingBag.*without max_norm",
            ),
            (
                {"sparse": True},
                r"words is an Embedding\(sparse=True\).*bags is an Embed.*sparse=False",
            ),
        ):
            plan = plan_by_hand(Embeddings(), mode, 2)
            with pytest.raises(ValueError, match=message):
                OSDP(Embeddings(**options), plan=plan)
            with pytest.raises(ValueError, match=message):
                OSDP(Embeddings(**options), batch, "1GiB")  # before anything is planned
            with pytest.raises(ValueError, match=message):
                apply(Embeddings(**options), plan)
        frozen = Embeddings(sparse=True).requires_grad_(False)
        OSDP(frozen, plan=plan_by_hand(frozen, mode, 2))(batch)


def test_embeddings_that_no_plan_trains_are_refused() -> None:
    run(2, refuses_embeddings)


def compiled_steps() -> None:
    # Dynamo once ran into the hook by which the first step of an optimizer is checked.
    # And AdamW became capturable, as its step found no parameters that are not on a GPU.
    for name, kind in itertools.product(("NO_SHARD", "FULL_SHARD"), (torch.optim.SGD, torch.optim.AdamW)):
        torch._dynamo.reset()
        model = wrapped(name, make())
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
        before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo imports what torch itself has deprecated
            step = torch.compile(optimizer.step, backend="eager")
            for _ in range(2):
                model(batch_of(0, dist.get_rank())).square().mean().backward()
                step()
        assert not optimizer.param_groups[0].get("capturable"), name
        after = [whole(parameter.detach()) for parameter in model.parameters()]
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True)), name


def test_a_step_may_be_compiled() -> None:
    run(2, compiled_steps, timeout=100, fresh=True)
