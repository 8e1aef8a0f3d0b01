"""Models whose code reads values of tensors are planned: the module around that code is described as one."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from osdp import ModelDesc, make_plan
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.profiler.measure import profile_model
from tests.helpers.distributed import run
from tests.helpers.opaque_nets import MODELS, batch_for, build
from tests.helpers.random_plans import device, searched_plan
from tests.helpers.training import differences


def described(name: str) -> ModelDesc:
    return ModelDesc.from_module(build(name), batch_for(name, 0))


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_module_around_the_line_is_one_operator(name: str) -> None:
    desc = described(name)
    assert tuple(module.name for module in desc.opaque) == MODELS[name]
    assert all(".py:" in module.place for module in desc.opaque)
    held = {parameter.name: operator for operator in desc.operators for parameter in operator.parameters}
    assert set(held) == {name for name, _ in build(name).named_parameters()}
    for module in desc.opaque:
        inside = [p for p in held if not module.name or p.startswith(f"{module.name}.")]
        assert {held[parameter].name for parameter in inside} == {module.name}
        assert all(held[parameter].cut is None for parameter in inside)
        segments = [s for s in desc.segments if s.operators == (module.name,)]
        assert len(segments) == 1
        assert segments[0].forward.moved_bytes(2) > 0
        assert segments[0].backward.moved_bytes(2) > 0
    assert (len(desc.operators) == 1) == (name == "early exit")


@pytest.mark.parametrize("name", ["experts", "packed"])
def test_plans_say_so(name: str) -> None:
    plan = searched_plan(described(name), 2, 20.0)
    (note,) = [note for note in plan.notes if "the predicted peak is not guaranteed" in note]
    assert f"module {MODELS[name][0]!r} (one of 2) reads values of tensors" in note
    assert "opaque_models.py:" in note


def test_the_measured_memory_of_an_opaque_module_is_that_of_a_run() -> None:
    name = "branch"
    options: dict[str, Any] = {"training": Training(local_batch=2), "strategy": "NO_SHARD"}
    measured = make_plan(build(name), batch_for(name, 0), device(2), **options)
    assert measured.measured_profile
    estimated = make_plan(None, described(name), device(2), **options)
    assert measured.predicted.peak_bytes == pytest.approx(estimated.predicted.peak_bytes, rel=0.1)


class Between(nn.Module):
    """An opaque module between two layers; ``body`` is its forward, after it has read a value."""

    def __init__(self, body: Callable[..., Any], call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(8, 8), Odd(body), nn.Linear(8, 8)
        self.call = call or (lambda odd, x: odd(x))

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.call(self.odd, self.first(x), *others)).square().mean()
        return loss


class Odd(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.drop, self.body = nn.Linear(8, 8), nn.Dropout(0.1), body

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> Any:
        x.detach().sum().item()
        return self.body(self, x, *others, **named)


def add_in_place(odd: Odd, x: torch.Tensor) -> torch.Tensor:
    return x.add_(odd.inner(x.clone()))


def repeat(odd: Odd, x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.tanh(odd.inner(x))
    return x


def pieces(odd: Odd, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([odd.inner(piece) for piece in x.split(lengths.tolist())])


def slices(odd: Odd, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    return torch.cat([odd.inner(x[begin:end]) for begin, end in pairwise(bounds.tolist())])


def test_a_module_that_changes_its_input_passes_gradients_on() -> None:
    desc = ModelDesc.from_module(Between(add_in_place), torch.randn(4, 8))
    (odd,) = (segment for segment in desc.segments if segment.module == "odd")
    assert odd.operators == ("odd",)
    assert odd.backward.moved_bytes(4) > 0


class Masking(nn.Module):
    """Returns a mask beside what it computes."""

    def __init__(self, expands: bool) -> None:
        super().__init__()
        self.expands = expands
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.sum().item() > 1e9:
            return x, x
        mask = torch.ones((), dtype=x.dtype)
        return self.down(torch.relu(self.up(x))), mask.expand(64, *x.shape) if self.expands else mask


class Masked(nn.Module):
    def __init__(self, expands: bool) -> None:
        super().__init__()
        self.inner, self.head = Masking(expands), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.inner(x)
        return self.head(hidden).sum()


def test_an_expanded_output_takes_what_is_stored_of_it() -> None:
    # What the module had saved for backward was taken for the mask.
    kept = []
    for expands in (False, True):
        desc = ModelDesc.from_module(Masked(expands), torch.randn(16, 8))
        (segment,) = [each for each in desc.segments if each.module == "inner"]
        kept.append((segment.forward.live_bytes(16), segment.saved_bytes(16)))
    assert kept[0] == kept[1]
    assert kept[0][0] > 16 * 512 * 4


def test_a_module_that_changes_the_batch_gets_a_copy() -> None:
    class Clears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(x.sum().item())
            loss: torch.Tensor = self.inner(x).mean()
            return loss

    batch = torch.ones(4, 8)
    model, before = Clears(), torch.get_rng_state()
    assert [module.name for module in ModelDesc.from_module(model, batch).opaque] == [""]
    assert batch.eq(1).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_with_other_arguments_are_recorded_apart() -> None:
    model = Between(repeat, lambda odd, x: odd(odd(x, 1), 5))
    first, second = (s for s in ModelDesc.from_module(model, torch.randn(4, 8)).segments if s.module == "odd")
    assert second.forward.flops(4) == pytest.approx(5 * first.forward.flops(4))


def test_modes_are_those_of_training() -> None:
    seen = []

    def body(odd: Odd, x: torch.Tensor) -> torch.Tensor:
        seen.append((odd.training, odd.drop.training))
        return odd.drop(odd.inner(x))

    model = Between(body)
    model.odd.drop.eval()
    ModelDesc.from_module(model, torch.randn(4, 8))
    ModelDesc.from_module(model.eval(), torch.randn(4, 8))
    assert set(seen[: len(seen) // 2]) == {(True, False)}
    assert set(seen[len(seen) // 2 :]) == {(True, True)}


@pytest.mark.parametrize(
    ("body", "call"),
    [
        (pieces, lambda odd, x, bounds: odd(x, bounds.diff())),  # zeros are no lengths of pieces of x
        (slices, lambda odd, x, bounds: x + odd(x, bounds + 0)),  # zeros are bounds of no rows at all
    ],
)
def test_integers_made_from_the_batch_make_the_module_opaque_that_makes_them(body: Any, call: Any) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.top = nn.Linear(8, 8), Between(body, call)

        def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.top(self.first(x), bounds)
            return loss

    desc = ModelDesc.from_module(Whole(), (torch.randn(12, 8), torch.tensor([0, 3, 7, 12])))
    assert [module.name for module in desc.opaque] == ["top"]


def test_an_object_with_tensors_makes_the_module_opaque_that_passes_it_on() -> None:
    def body(odd: Odd, x: torch.Tensor, seen: set[torch.Tensor]) -> torch.Tensor:
        return torch.stack([odd.inner(x), *seen]).sum(0)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.top = nn.Linear(8, 8), Between(body, lambda odd, x: odd(x, {x * 2}))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.top(self.first(x))
            return loss

    assert [module.name for module in ModelDesc.from_module(Whole(), torch.randn(4, 8)).opaque] == ["top"]


def test_hooks_and_backward_may_read_values() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * grads[0].sum().item()

    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Reads.apply(x)  # type: ignore[no-untyped-call]
            return y

    model = nn.Sequential(nn.Linear(8, 8), Scales(), nn.LayerNorm(8), nn.Linear(8, 8))
    model[2].register_forward_hook(lambda _module, _args, out: out if out.sum().item() else None)
    desc = ModelDesc.from_module(model, torch.randn(4, 8))
    assert {module.name for module in desc.opaque} == {"1", "2"}


def test_one_hook_that_reads_values_makes_one_module_opaque() -> None:
    """All modules of its class were, each of which then ran alone and could not be sliced."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[1].register_forward_hook(lambda _module, _args, out: out if out.sum().item() else None)
    desc = ModelDesc.from_module(model, torch.randn(4, 8))
    assert [module.name for module in desc.opaque] == ["1"]


def test_masks_made_from_the_batch_make_the_module_opaque_that_makes_them() -> None:
    """All of an unknown mask was taken to be set: sequences had no lengths, and the model was refused."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            lengths = (~seen).sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y: torch.Tensor = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]
            return y

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, ids.eq(0))
            return y

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle, self.head = nn.Embedding(9, 8), Middle(), nn.Linear(8, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.middle(self.embed(ids), ids)).square().mean()
            return y

    desc = ModelDesc.from_module(Whole(), torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]))
    assert [module.name for module in desc.opaque] == ["middle"]


def test_dtypes_inside_are_those_of_the_runtime() -> None:
    model = Between(lambda odd, x: odd.inner(x.float()))
    training = Training(local_batch=4, param_dtype="bfloat16")
    assert make_plan(model, torch.randn(4, 8), device(2), training=training).notes


def test_other_batches_are_planned() -> None:
    assert described("packed").batch_is_free
    assert described("early exit").batch_is_free


def test_what_fails_on_random_inputs_as_well_is_an_error() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.sum().isnan().item():
                raise RuntimeError("only NaN, please")
            return self.inner(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.odd = nn.Linear(4, 4), Picky()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.odd(self.first(x))
            return y

    with pytest.raises(ValueError, match=r"module 'odd' reads values.*fails on random inputs.*only NaN"):
        ModelDesc.from_module(Whole(), torch.randn(2, 4))


def test_how_long_an_opaque_module_takes_is_measured_on_the_batch_itself() -> None:
    """On zeros no row is masked and every length is 0: it crashed, or took no time."""
    with pytest.raises(ValueError, match=r"depends on the values of the batch.*Pass the batch itself"):
        profile_model(build("packed"), described("packed"))


def test_what_fails_on_random_activations_makes_the_module_opaque_that_computes_them() -> None:
    """A scale is positive, and random numbers alone are not."""

    class Sampler(nn.Module):
        def forward(self, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.distributions.Normal(mean, scale, validate_args=True).rsample()
            return found

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.scale, self.sampler = nn.Linear(4, 2), nn.Linear(4, 2), Sampler()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.sampler(self.mean(x), nn.functional.softplus(self.scale(x)))
            return found

    desc = ModelDesc.from_module(nn.Sequential(Encoder(), nn.Linear(2, 4)), torch.randn(3, 4))
    assert [module.name for module in desc.opaque] == ["0"]


def test_a_loss_that_reads_values_is_an_error() -> None:
    model = nn.Linear(4, 4)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.sum() if out.sum().item() > 0 else -out.sum()

    with pytest.raises(ValueError, match="depends on values of tensors"):
        ModelDesc.from_module(model, torch.randn(2, 4), loss_fn=loss)


def train(cases: list[tuple[str, str, Plan]]) -> list[str]:
    """What differs from a single process under each plan."""
    found = []
    for name, kind, plan in cases:

        def loss_of(model: nn.Module, step: int, rank: int, name: str = name) -> torch.Tensor:
            loss: torch.Tensor = model(**batch_for(name, 10 * step + rank))
            return loss

        found += [f"{name}, {kind}: {text}" for text in differences(partial(build, name), loss_of, plan)]
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("experts", "branch", "masked rows", "strongest"),
        ("rounds", "numpy", "packed", "counted", "early exit"),
    ],
)
def test_they_train_as_in_a_single_process(names: tuple[str, ...]) -> None:
    cases: list[tuple[str, str, Plan]] = []
    for name in names:
        desc = described(name)
        for mode in (Mode.NO_SHARD, Mode.FULL_SHARD, Mode.SHARD_OPTIMIZER):
            cases.append((name, str(mode), make_plan(None, desc, device(2), strategy=str(mode))))
        cases.append((name, "searched", searched_plan(desc, 2, 20.0 if name == "early exit" else 8.0)))
    assert run(2, train, cases, timeout=150.0) == [[], []]


def test_atoms_inside_of_an_opaque_module_are_part_of_it() -> None:
    """A wrap policy that names experts was refused: their forward does not run on fake tensors."""
    model = Between(lambda odd, x: odd.inner(x))
    desc = ModelDesc.from_module(model, torch.randn(4, 8), atoms=["first", "odd.inner"])
    assert [operator.name for operator in desc.operators] == ["first", "odd", "last"]
