"""Optimizers that have not stepped everything, or anything, and what schedulers and users add to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from osdp.runtime import checkpoint
from tests.helpers.distributed import run
from tests.helpers.nets import loss_of, tokens
from tests.runtime.checkpoint.test_folder import make, trained, values

Make = Callable[[nn.Module], Optimizer]


class WithUnused(nn.Module):
    """The second layer never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def model_and(make_optimizer: Make, steps: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = WithUnused()
    optimizer = make_optimizer(model)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.1, weight_decay=0.1)


def same(one: Optimizer, other: Optimizer) -> bool:
    states = [
        [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (one, other)
    ]
    return repr(states[0]) == repr(states[1])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path, steps: int) -> None:
    """A layer without gradients made a checkpoint of the same training one of another optimizer; and before
    the first step, what was saved were the states of a step that had not been made."""
    model, optimizer = model_and(adam, steps)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(adam, 0)
    with torch.no_grad():
        other.used.weight.zero_()
    checkpoint.load(tmp_path / "run", other, fresh)
    assert same(optimizer, fresh)
    step(model, optimizer)
    step(other, fresh)
    assert same(optimizer, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_save_before_the_first_step_but_after_its_backward(tmp_path: Path) -> None:
    """torch finds a gradient, and saved no states, which ``load`` then asked for."""
    model, optimizer = model_and(adam, 0)
    model(torch.ones(3, 2)).square().sum().backward()
    gradient = model.used.weight.grad
    checkpoint.save_async(tmp_path / "run", model, optimizer).wait()
    assert model.used.weight.grad is gradient and model.unused.weight.grad is None and not optimizer.state
    other, fresh = model_and(adam, 0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert not fresh.state


def test_states_of_an_optimizer_that_went_further_are_given_up(tmp_path: Path) -> None:
    model, optimizer = model_and(adam, 0)
    checkpoint.save(tmp_path / "run", model, optimizer)
    step(model, optimizer)
    checkpoint.save(tmp_path / "later", model, optimizer)
    later = repr(dict(optimizer.state))
    checkpoint.load(tmp_path / "run", model, optimizer)
    assert not optimizer.state
    checkpoint.load(tmp_path / "later", model, optimizer)
    assert repr(dict(optimizer.state)) == later


@pytest.mark.parametrize(
    ("momentum", "lacks"), [(0.9, r"state\.used\.weight\.step"), (0.0, r"param_groups\.used\.weight\.betas")]
)
def test_another_optimizer_is_refused(tmp_path: Path, momentum: float, lacks: str) -> None:
    model, optimizer = model_and(lambda m: SGD(m.parameters(), lr=0.1, momentum=momentum), 2)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(adam, 0)
    before = other.used.weight.clone()
    with pytest.raises(ValueError, match=rf"it lacks optimizer\.{lacks}"):
        checkpoint.load(tmp_path / "run", other, fresh)
    assert torch.equal(other.used.weight, before) and not fresh.state


def test_groups_without_parameters(tmp_path: Path) -> None:
    """The model was overwritten, and then an index was out of range."""

    def grouped(model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        return AdamW([{"params": []}, {"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])

    model, optimizer = model_and(grouped, 2)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(grouped, 0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert same(optimizer, fresh)
    for one in (optimizer, fresh):
        assert [len(group["params"]) for group in one.param_groups] == [0, 2, 2]
        assert [group["lr"] for group in one.param_groups] == [1e-3, 1e-3, 0.5]


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: Path) -> None:
    """A checkpoint with a learning rate computed by NumPy was saved and verified, and never loaded."""
    model, optimizer = model_and(lambda m: AdamW(m.parameters(), lr=np.float64(0.25)), 1)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(lambda m: AdamW(m.parameters()), 0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.25 and type(fresh.param_groups[0]["lr"]) is float


def test_a_step_back_needs_no_second_set_of_states(tmp_path: Path) -> None:
    """Of a layer without gradients new states were made, and of all others, too."""
    model, optimizer = model_and(adam, 2)
    checkpoint.save(tmp_path / "run", model, optimizer)
    want = repr(dict(optimizer.state))
    step(model, optimizer)
    gradient = model.used.weight.grad
    made: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: made.append(len(optimizer.state)))
    checkpoint.load(tmp_path / "run", model, optimizer)
    handle.remove()
    assert made == [2]  # of the two parameters that have never had a gradient
    assert repr(dict(optimizer.state)) == want and model.used.weight.grad is gradient


class Mine:
    """What is no plain data."""


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async])
def test_what_cannot_be_read_back_is_refused_when_it_is_saved(tmp_path: Path, save: Any) -> None:
    model, optimizer = model_and(adam, 1)
    optimizer.param_groups[0]["mine"] = Mine()
    with pytest.raises(ValueError, match=r"nothing was saved: param_groups\..*\.mine is more than numbers"):
        save(tmp_path / "run", model, optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("schedule", [lambda o: LambdaLR(o, lambda _: 1.0), lambda o: OneCycleLR(o, 0.5, 9)])
def test_a_schedule_may_begin_after_a_checkpoint_without_one(tmp_path: Path, schedule: Any) -> None:
    """It was told to leave ``scheduler=`` out, and then that ``initial_lr`` was missing."""
    model, optimizer = model_and(adam, 1)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(adam, 0)
    schedule(fresh)
    options = {name: value for name, value in fresh.param_groups[0].items() if name not in fresh.defaults}
    assert "initial_lr" in options
    checkpoint.load(tmp_path / "run", other, fresh)
    assert fresh.param_groups[0].items() >= {k: v for k, v in options.items() if k != "params"}.items()
    assert fresh.param_groups[0]["lr"] == 0.1 and same(optimizer, fresh)


def test_parameters_outside_the_model_are_named(tmp_path: Path) -> None:
    model, optimizer = model_and(adam, 0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"steps 1 parameters that are not the model's.* \(3,\): register"):
        checkpoint.save(tmp_path / "run", model, optimizer)


def wrapped_before_and_after(folder: str, steps: int) -> None:
    model, optimizer = trained(steps)
    checkpoint.save(folder, model, optimizer)
    assert bool(optimizer.state) == (steps > 0)
    other, fresh = make()
    checkpoint.load(folder, other, fresh)
    assert bool(fresh.state) == (steps > 0)
    one, two = values(model, optimizer), values(other, fresh)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_same_of_a_wrapped_model(tmp_path: Path, steps: int) -> None:
    run(2, wrapped_before_and_after, str(tmp_path / "run"), steps)


@pytest.mark.parametrize("in_a_new_process", [False, True])
def test_states_of_what_is_frozen_meanwhile_are_read(tmp_path: Path, in_a_new_process: bool) -> None:
    """torch drops them without a word, or took them for those of another model."""
    model, optimizer = model_and(adam, 2)
    checkpoint.save(tmp_path / "run", model, optimizer)
    want = optimizer.state[model.used.weight]["exp_avg"].clone()
    if in_a_new_process:
        model, optimizer = model_and(adam, 0)
    model.used.requires_grad_(False)
    checkpoint.load(tmp_path / "run", model, optimizer)
    assert not model.used.weight.requires_grad
    assert torch.equal(optimizer.state[model.used.weight]["exp_avg"], want)


def test_no_states_are_made_of_what_was_always_frozen(tmp_path: Path) -> None:
    """Those of a model under LoRA are many times what is trained."""
    made: list[nn.Parameter] = []

    def frozen() -> tuple[nn.Module, Optimizer]:
        model, optimizer = model_and(adam, 0)
        model.unused.requires_grad_(False)
        return model, optimizer

    model, optimizer = frozen()
    step(model, optimizer)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = frozen()
    fresh.register_step_post_hook(lambda each, *_: made.extend(each.state))
    checkpoint.load(tmp_path / "run", other, fresh)
    assert made and not any(p is q for p in made for q in other.unused.parameters())
    assert set(fresh.state) == set(other.used.parameters())


@pytest.mark.parametrize(("first", "second"), [(torch.tensor(0.1), 0.3), (0.1, torch.tensor(0.3))])
def test_a_rate_may_be_a_tensor_here_and_a_number_there(tmp_path: Path, first: Any, second: Any) -> None:
    """It was refused as metadata of another kind."""
    model, optimizer = model_and(lambda model: Adam(model.parameters(), lr=first, foreach=False), 1)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = model_and(lambda model: Adam(model.parameters(), lr=second, foreach=False), 0)
    checkpoint.load(tmp_path / "run", other, fresh)
    rate = fresh.param_groups[0]["lr"]
    assert type(rate) is type(second) and float(rate) == pytest.approx(0.1)


def test_a_scheduler_that_is_made_after_loading_finds_its_first_rate(tmp_path: Path) -> None:
    model, optimizer = model_and(adam, 1)
    # NumPy's numbers were refused by the first save.
    schedule = LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    checkpoint.save(tmp_path / "run", model, optimizer, scheduler=schedule, step=np.int64(2))
    other, fresh = model_and(adam, 0)
    assert checkpoint.load(tmp_path / "run", other, fresh).step == 2
    again = LambdaLR(fresh, lambda step: 0.5**step, last_epoch=1)
    assert again.base_lrs == [0.1] and fresh.param_groups[0]["lr"] == schedule.get_last_lr()[0]


def test_names_of_wrapped_modules_are_those_of_the_state_dict(tmp_path: Path) -> None:
    """States of what was not stepped were missed, as their names were others."""

    def compiled() -> tuple[nn.Module, Optimizer]:
        model, _ = model_and(adam, 0)
        model.used = torch.compile(model.used, backend="eager")  # type: ignore[assignment]
        return model, adam(model)

    model, optimizer = compiled()
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = compiled()
    checkpoint.load(tmp_path / "run", other, fresh)
    assert not fresh.state


class WithStatistics(nn.Module):
    """Two buffers that belong together, and other ones on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name in ("mean", "variance", "count"):
            self.register_buffer(name, torch.full((1 + len(name),), float(dist.get_rank())))


def saves_statistics(folder: str) -> None:
    model = WithStatistics()
    checkpoint.save(f"{folder}/run", model)
    checkpoint.save_async(f"{folder}/later", model).wait()
    checkpoint.save_pretrained(model, f"{folder}/weights")
    for name in ("run", "later"):
        other = WithStatistics()
        checkpoint.load(f"{folder}/{name}", other)
        assert not any(buffer.any() for buffer in other.buffers())
    other = WithStatistics()
    checkpoint.load_pretrained(other, f"{folder}/weights")
    assert not any(buffer.any() for buffer in other.buffers())


def test_statistics_that_differ_between_ranks_are_those_of_one(tmp_path: Path) -> None:
    """The mean was one rank's, and the variance another's."""
    run(2, saves_statistics, str(tmp_path))


def test_an_output_layer_that_is_tied_no_more_is_saved(tmp_path: Path) -> None:
    """What the configuration ties was left out, and became the embedding when it was loaded."""
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    checkpoint.save_pretrained(model, tmp_path / "weights")
    want = model.lm_head.weight.detach().clone()
    nn.init.zeros_(model.lm_head.weight)
    checkpoint.load_pretrained(model, tmp_path / "weights")
    assert torch.equal(model.lm_head.weight, want)


@pytest.mark.parametrize("is_default", [False, True])
def test_options_that_are_dicts_come_back(tmp_path: Path, is_default: bool) -> None:
    """They were saved, and loads were told that the checkpoint lacked them; an empty one was a KeyError."""

    def made(warmup: int) -> tuple[nn.Module, Optimizer]:
        model, optimizer = model_and(adam, 0)
        for name, value in (("tuning", {"warmup": warmup, "by_dim": {1: [0.5]}}), ("more", {})):
            optimizer.param_groups[0][name] = value
            if is_default:
                optimizer.defaults[name] = value
        return model, optimizer

    model, optimizer = made(3)
    step(model, optimizer)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = made(0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert fresh.param_groups[0]["tuning"] == {"warmup": 3, "by_dim": {1: [0.5]}}
    assert fresh.param_groups[0]["more"] == {} and same(optimizer, fresh)
    other, fresh = model_and(adam, 0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert fresh.param_groups[0]["tuning"]["warmup"] == 3


class WithMasters(Optimizer):
    """Weights in float32 beside those in bfloat16, and numbers by dim."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
                state["count"] = torch.zeros(2, dtype=torch.int64)
                state["norms"] = {0: torch.zeros(1), 1: torch.zeros(1)}
            state["count"] += 257  # bfloat16 has 256 and 258
            state["norms"][1] += 1 / 3
            state["master"].sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"] / 7)
            parameter.copy_(state["master"])


@pytest.mark.parametrize("kind", [WithMasters, torch.optim.NAdam])
def test_states_keep_the_dtypes_and_keys_that_they_were_made_with(tmp_path: Path, kind: Any) -> None:
    """torch rounds them to their parameter's: masters in float32 were bfloat16 after each restart."""

    def made(steps: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(3)
        model = WithUnused().bfloat16()
        optimizer: Optimizer = kind(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 2, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(3)
    checkpoint.save(tmp_path / "run", model, optimizer)
    other, fresh = made(0)
    checkpoint.load(tmp_path / "run", other, fresh)
    assert same(optimizer, fresh)


class OnParts(Optimizer):
    """Steps local tensors, and keeps plain ones."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            own, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(own))
            own.sub_(mean.lerp_(grad, 0.1), alpha=0.1)


def steps_parts(folder: str) -> None:
    model, _ = make()
    optimizer = OnParts(model.parameters())
    loss_of(model(tokens(0, 2, 6)), tokens(0, 2, 6)).backward()
    optimizer.step()
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(
            ValueError, match=r"mean of \S+, which OnParts keeps, is a plain tensor of this ra"
        ):
            save(folder, model, optimizer)
    assert not Path(folder).exists()


def test_plain_states_of_parts_are_refused(tmp_path: Path) -> None:
    """One rank's were kept, and all ranks went on with these."""
    run(2, steps_parts, str(tmp_path / "run"))


@pytest.mark.parametrize(("key", "words"), [("a", "'a', which is none of its"), (None, "keeps, is a tuple")])
def test_states_without_a_place_are_named(tmp_path: Path, key: Any, words: str) -> None:
    """It was a KeyError, or what torch's functions say inside."""
    model, optimizer = model_and(adam, 1)
    state: Any = optimizer.state
    state[key or model.used.weight]["more"] = (1, 2)
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path / "run", model, optimizer)
