"""Checkpoints: saved under one plan, loaded under another or into the plain model, training goes on alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from osdp import OSDP
from osdp.runtime import checkpoint
from osdp.torch_private.saving import in_one_process
from tests.helpers.distributed import run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import plan_by_hand, split
from tests.test_parity import LAYOUTS, difference, whole

#: Layouts of plans, some of them with operators in slices.
SAVED = [*LAYOUTS, "shard apart in 2", "shard apart in 5", "shard apart in 4, 3 kept"]


def make(layout: str | None, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: nn.Module = Net(gated=False)
    if layout is not None:
        name, _, slicing = layout.partition(" in ")
        slices, _, kept = slicing.removesuffix(" kept").partition(", ")
        modes, groups = LAYOUTS[name]
        plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
        net = OSDP(net, plan=split(plan, net, int(slices or 1), int(kept or 0)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        # Every rank has the same batch, so that the plain model trains on the same gradients.
        loss_of(net(tokens(step, 2, 6)), tokens(step, 2, 6)).backward()
        optimizer.step()


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in net.named_parameters()}


def save_all(folder: str) -> dict[str, torch.Tensor]:
    want: dict[str, torch.Tensor] = {}
    for layout in SAVED:
        net, optimizer = make(layout, seed=7)
        train(net, optimizer, range(3))
        checkpoint.save(f"{folder}/{layout}", net, optimizer)
        state = checkpoint.train_state(net, optimizer)
        assert list(state["model"]) == list(Net(gated=False).state_dict())
        assert not any(key.startswith("state.head.weight") for key in state["optimizer"])
        assert state["optimizer"]["state.embed.weight.exp_avg"].shape == (13, 5)
        train(net, optimizer, range(3, 4))
        want = weights(net)
    return want


def load_all(folder: str, want: dict[str, torch.Tensor]) -> None:
    layouts: list[str | None] = [*SAVED, None]
    for saved in SAVED:
        for index, layout in enumerate(layouts):
            if (index + SAVED.index(saved)) % 6 != dist.get_world_size():
                continue  # a sixth of the pairs, another one at another world size
            net, optimizer = make(layout, seed=99)
            checkpoint.load(f"{folder}/{saved}", net, optimizer)
            # A step takes the weights, the states of the optimizer and their number of steps.
            train(net, optimizer, range(3, 4))
            for name, got in weights(net).items():
                assert difference(got, want[name]) < 1e-5, (saved, layout, name)


def whole_states() -> dict[str, Any]:
    net, optimizer = make("mixed leaves", seed=7)
    train(net, optimizer, range(2))
    expected = weights(net)
    state = checkpoint.whole_state_dict(net)
    if dist.get_rank():
        assert state == {}
        return {}
    plain = Net(gated=False)
    plain.load_state_dict(state)
    assert all(torch.equal(p, expected[name]) for name, p in plain.named_parameters())
    return state


def wrapper_loads_its_own_state() -> None:
    for layout in SAVED:
        net, optimizer = make(layout, seed=7)
        train(net, optimizer, range(1))
        state = {name: value.clone() for name, value in net.state_dict().items()}
        want = weights(net)
        train(net, optimizer, range(1, 2))
        result = net.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        with torch.no_grad():
            net(tokens(0, 2, 6))
        for name, got in weights(net).items():
            assert torch.equal(got, want[name]), (layout, name)
        with pytest.raises(ValueError, match="assign"):
            net.load_state_dict(state, assign=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A folder with a checkpoint of each layout, and the weights after another step."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run(2, save_all, folder, timeout=100)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_saved_under_one_plan_loaded_under_another(
    ranks: int, saved: tuple[str, dict[str, torch.Tensor]]
) -> None:
    run(ranks, load_all, *saved, timeout=150)


def test_whole_state_dict_is_the_plain_models() -> None:
    state = run(2, whole_states)[0]
    assert list(state) == list(Net(gated=False).state_dict())


def test_state_dicts_of_the_wrapper() -> None:
    run(2, wrapper_loads_its_own_state)


def save_two_groups(folder: str) -> None:
    net, _ = make("mixed leaves", seed=7)
    optimizer = torch.optim.AdamW(two_groups(net))
    train(net, optimizer, range(2))
    checkpoint.save(folder, net, optimizer)


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": decayed, "lr": 0.05},
        {"params": [p for p in net.parameters() if p.ndim < 2], "lr": 0.01},
    ]


def test_options_are_stored_by_group_as_torch_stores_them(tmp_path: Path) -> None:
    # An entry for each parameter and option made checkpoints of small parameters twice as slow as torch's.
    run(2, save_two_groups, str(tmp_path))
    entries = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert sum(".params" in name for name in entries) == 2
    assert sum(name.startswith("optimizer.param_groups.") for name in entries) < 40

    net, _ = make(None, seed=99)
    optimizer = torch.optim.AdamW(two_groups(net))
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    of_model, of_optimizer = get_state_dict(net, optimizer)
    with in_one_process():
        state_dict_loader.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    set_state_dict(net, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    by_torch = weights(net)

    net, _ = make(None, seed=98)
    optimizer = torch.optim.AdamW(two_groups(net), lr=1.0)
    checkpoint.load(tmp_path, net, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    assert all(torch.equal(value, by_torch[name]) for name, value in weights(net).items())


def test_tensors_that_are_described_alike_are_read_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Finding one's way in an archive for each tensor takes longer than reading it.
    def made() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    net, other = made(), made()
    net[2].weight = nn.Parameter(torch.randn(4, 4).t())  # as many bytes, in another order
    checkpoint.save(tmp_path, net)
    unpickled = []
    load = torch.load

    def noting(*args: Any, **kwargs: Any) -> Any:
        unpickled.append(args[0])
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", noting)
    checkpoint.load(tmp_path, other)
    assert len(unpickled) == 4  # what is kept, a weight, the weight in another order, a bias
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("saved", [0.05, torch.tensor(0.05)])
def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path, saved: Any) -> None:
    # Graphs that were captured read it where it lies.
    net, _ = make(None, seed=7)
    optimizer = torch.optim.AdamW(net.parameters(), lr=saved, foreach=False)
    train(net, optimizer, range(1))
    checkpoint.save(tmp_path, net, optimizer)

    net, _ = make(None, seed=99)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1.0), foreach=False)
    checkpoint.load(tmp_path, net, optimizer)
    found = optimizer.param_groups[0]["lr"]
    assert isinstance(found, torch.Tensor)
    assert found.item() == pytest.approx(0.05)
