"""A checkpoint's folder has the old checkpoint or the new one, wholly, wherever a save was stopped.

Ranks are killed at each point of a save over an existing name; fresh processes load what is left.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from osdp import OSDP
from osdp.plan.sharding import Mode
from osdp.runtime import checkpoint
from osdp.runtime.checkpoint import folder as checkpoint_folder
from osdp.runtime.checkpoint.contents import read_verified
from tests.helpers.distributed import RankError, run
from tests.helpers.nets import Net, loss_of, tokens
from tests.helpers.plans import plan_by_hand

MODES = {"": Mode.FULL_SHARD, "blocks.0": Mode.NO_SHARD, "frozen": Mode.NO_SHARD}


def make(depth: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    net = Net(gated=False, depth=depth)
    model = OSDP(net, plan=plan_by_hand(net, MODES, dist.get_world_size()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(tokens(step, 2, 6)), tokens(step, 2, 6)).backward()
        optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All of them, states of the optimizer too."""
    state = checkpoint.train_state(model, optimizer)
    found = {f"{part}.{name}": value for part, mine in state.items() for name, value in mine.items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: getattr(value, "full_tensor", value.clone)().clone() for name, value in tensors.items()}


def save(path: str, steps: int) -> None:
    checkpoint.save(path, *trained(steps))


def loaded(path: str) -> dict[str, torch.Tensor]:
    model, optimizer = make()
    checkpoint.load(path, model, optimizer)
    return values(model, optimizer)


def die(*_: Any, **__: Any) -> None:
    os._exit(1)


def die_before(owner: Any, name: str) -> None:
    setattr(owner, name, die)


def die_after(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def last(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        die()

    setattr(owner, name, last)


def tear(writer: FileSystemWriter, *_: Any) -> None:
    """What a rank that is killed while it writes leaves."""
    folder = Path(writer.path)
    token = next(entry.name for entry in folder.iterdir() if entry.name.startswith(".saving-"))[8:]
    (folder / f"__{token}_{dist.get_rank()}_0.distcp").write_bytes(b"half")
    die()


#: Where a rank is killed: which rank, how, and whether the new checkpoint is there then.
POINTS: dict[str, tuple[int, Callable[[], None], bool]] = {
    "rank 1 before it writes": (1, lambda: die_before(FileSystemWriter, "write_data"), False),
    "rank 0 before it writes": (0, lambda: die_before(FileSystemWriter, "write_data"), False),
    "rank 1 while it writes": (1, lambda: setattr(FileSystemWriter, "write_data", tear), False),
    "rank 1 after it has written": (1, lambda: die_after(FileSystemWriter, "write_data"), False),
    "rank 0 before the metadata": (0, lambda: die_before(FileSystemWriter, "finish"), False),
    "rank 0 before the rename": (0, lambda: die_before(os, "replace"), False),
    "rank 0 after the rename": (0, lambda: die_after(os, "replace"), True),
    "rank 0 while it cleans up": (0, lambda: die_before(checkpoint_folder.NewCheckpoint, "remove_old"), True),
}


def save_and_die(path: str, steps: int, point: str) -> None:
    rank, arm, _ = POINTS[point]
    model, optimizer = trained(steps)
    if dist.get_rank() == rank:
        arm()
    checkpoint.save(path, model, optimizer)


def loaded_and_saved_again(path: str) -> tuple[Any, Any]:
    """What loads now, and after another save."""
    first = loaded(path)
    save(path, 5)
    return first, loaded(path)


def refused_and_saved_again(path: str) -> None:
    refusal = r"first is not a complete checkpoint: it has no \.metadata, which is written last; its save was"
    with pytest.raises(ValueError, match=refusal):
        loaded(path)
    save(path, 1)
    assert loaded(path)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def save_two(folder: str) -> tuple[Any, Any]:
    save(f"{folder}/three", 3)
    save(f"{folder}/five", 5)
    return loaded(f"{folder}/three"), loaded(f"{folder}/five")


@pytest.fixture(scope="module")
def three_and_five(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with step 3, and the values of step 3 and of step 5."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "three", *run(2, save_two, str(folder))[0]


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_is_killed_while_an_existing_checkpoint_is_replaced(
    tmp_path: Path, three_and_five: tuple[Path, Any, Any], point: str
) -> None:
    # A rank killed before its write left 7 tensors of the old step and 15 of the new, which loaded.
    old, old_values, new_values = three_and_five
    assert not same(old_values, new_values)
    path = tmp_path / "latest"
    shutil.copytree(old, path)
    (path / "config.json").write_text("{}")
    with pytest.raises(RankError):
        run(2, save_and_die, str(path), 5, point)
    left, saved_again = run(2, loaded_and_saved_again, str(path))[0]
    is_published = POINTS[point][2]
    assert same(left, new_values if is_published else old_values)
    # The next save works, and leaves nothing of the killed one.
    assert same(saved_again, new_values)
    files = sorted(entry.name for entry in path.iterdir())
    kinds = sorted(name.rpartition(".")[2] for name in files)
    assert kinds == ["distcp", "distcp", "json", "manifest", "metadata", "pt"], files


@pytest.mark.parametrize("point", ["rank 1 while it writes", "rank 0 before the rename"])
def test_what_a_killed_first_save_leaves_is_refused(tmp_path: Path, point: str) -> None:
    path = str(tmp_path / "first")
    with pytest.raises(RankError):
        run(2, save_and_die, path, 1, point)
    run(2, refused_and_saved_again, path)


# -- faults that ranks survive ------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def save_on_a_full_disk(path: str) -> None:
    for rank, owner, name in (
        (1, FileSystemWriter, "write_data"),
        (0, FileSystemWriter, "write_data"),
        (0, FileSystemWriter, "finish"),
        (0, os, "replace"),
    ):
        model, optimizer = trained(5)
        original = getattr(owner, name)
        if dist.get_rank() == rank:
            setattr(owner, name, full)
        with pytest.raises(RuntimeError, match="which has what it had before: ") as caught:
            checkpoint.save(path, model, optimizer)
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in str(caught.value)
        setattr(owner, name, original)
    dist.barrier()
    assert len(list(Path(path).iterdir())) == 5  # what was written in vain is gone


def test_a_full_disk_is_said_on_all_ranks_and_the_old_checkpoint_stays(
    tmp_path: Path, three_and_five: tuple[Path, Any, Any]
) -> None:
    old, old_values, _ = three_and_five
    path = shutil.copytree(old, tmp_path / "latest")
    run(2, save_on_a_full_disk, str(path))
    assert same(run(2, loaded, str(path))[0], old_values)


def refusals(folder: str) -> None:
    model, optimizer = make()
    file = Path(folder, "file")
    if dist.get_rank() == 0:
        file.touch()
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"no checkpoint was saved at .*rank 0: FileExistsError"):
        checkpoint.save(file, model, optimizer)
    with pytest.raises(ValueError, match="is not a folder, so no checkpoint"):
        checkpoint.load(file, model, optimizer)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nowhere"):
        checkpoint.load(Path(folder, "nowhere"), model, optimizer)
    with pytest.raises(ValueError, match=r"s3://bucket/x is not a folder: for other storages call torch\."):
        checkpoint.save("s3://bucket/x", model, optimizer)
    own = f"{folder}/own-{dist.get_rank()}"  # as on machines with disks of their own
    with pytest.raises(
        RuntimeError, match=r"rank 1: .* does not see what rank 0 writes to .*own-1: name one f"
    ):
        checkpoint.save(own, model, optimizer)
    for name in ("own-0", "own-1"):
        checkpoint.save(f"{folder}/{name}", model, optimizer)
    with pytest.raises(ValueError, match=r"rank 1: .*own-1 on .* is not the checkpoint that rank 0 loads"):
        checkpoint.load(own, model, optimizer)


def test_folders_that_cannot_be_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run(2, refusals, str(tmp_path))


def save_plain(path: str, steps: int) -> None:
    state_dict_saver.save(checkpoint.train_state(*trained(steps)), checkpoint_id=path)


def test_what_plain_dcp_wrote_loads_and_is_replaced(
    tmp_path: Path, three_and_five: tuple[Path, Any, Any]
) -> None:
    path = tmp_path / "plain"
    run(2, save_plain, str(path), 3)
    first, second = run(2, loaded_and_saved_again, str(path))[0]
    assert same(first, three_and_five[1])
    assert same(second, three_and_five[2])
    assert not list(path.glob("__[0-9]_*"))


def test_missing_cut_and_broken_files_are_named(
    tmp_path: Path, three_and_five: tuple[Path, Any, Any]
) -> None:
    path = shutil.copytree(three_and_five[0], tmp_path / "hurt")
    first, second = sorted(path.glob("*.distcp"))
    content = second.read_bytes()
    second.write_bytes(content[:-500])
    cut = rf"{second.name} has {len(content) - 500} of {len(content)} bytes"
    with pytest.raises(ValueError, match=rf"hurt is not a complete checkpoint as it was saved: {cut}\. Not"):
        read_verified(path)
    first.unlink()
    with pytest.raises(ValueError, match=rf"{first.name} is missing, {cut}"):
        read_verified(path)
    for broken in (b"", b"\x80\x04", b"no pickle", pickle.dumps({"other": 1})):
        (path / ".metadata").write_bytes(broken)
        with pytest.raises(ValueError, match=r"\.metadata is not what was saved, or its manifest is missing"):
            read_verified(path)
        # Without a manifest it may be another program's.
        for manifest in path.glob("*.manifest"):
            manifest.rename(manifest.with_suffix(".hidden"))
        with pytest.raises(ValueError, match=r"\.metadata cannot be read: "):
            read_verified(path)
        for hidden in path.glob("*.hidden"):
            hidden.rename(hidden.with_suffix(".manifest"))


FINISH = FileSystemWriter.finish


def finish_and_fail(*args: Any) -> None:
    FINISH(*args)
    raise OSError(5, "Input/output error")


def test_what_is_published_stays_when_something_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that was killed while rank 0 published cost both: the new files were removed as written in vain.
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model)
    with torch.no_grad():
        model.weight.fill_(3)
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "finish", finish_and_fail)
        with pytest.raises(RuntimeError, match="Input/output error"):
            checkpoint.save(tmp_path, model)
    other = nn.Linear(2, 2)
    checkpoint.load(tmp_path, other)
    assert torch.equal(other.weight, model.weight)
    checkpoint.save(tmp_path, model)
    assert len(list(tmp_path.iterdir())) == 4


def test_all_is_on_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch syncs .metadata while most of it is in a buffer: after a power failure it was cut short.
    synced: dict[str, int] = {}
    sync, rename = os.fsync, os.replace

    def noting(descriptor: int) -> None:
        sync(descriptor)
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size

    def checked(old: Path, new: Path) -> None:
        files = [file for file in tmp_path.iterdir() if not file.name.startswith(".saving-")]
        sizes = {file.name: file.stat().st_size for file in files}
        assert sizes == {name: synced.get(name) for name in sizes}
        assert len(sizes) == 4 and tmp_path.name in synced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", checked)
    checkpoint.save(tmp_path, nn.Linear(20, 20))


def test_a_checkpoint_that_cannot_be_read_here_stays_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its files, of a later version perhaps, were removed before anything else was there.
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model)
    manifest = next(tmp_path.glob("*.manifest"))
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-9])
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(RuntimeError, match="No space left"):
            checkpoint.save(tmp_path, model)
    manifest.write_bytes(content)
    checkpoint.load(tmp_path, model)


# -- other models ------------------------------------------------------------------------------------------


def load_into_others(path: str) -> None:
    for depth, words in ((1, "only it has model.blocks.1.down.bias, "), (3, "it lacks model.blocks.2.norm.")):
        model, optimizer = make(depth)
        before = {name: value.detach().clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="another model or optimizer; nothing was loaded: ") as caught:
            checkpoint.load(path, model, optimizer)
        assert words in str(caught.value)
        assert not optimizer.state
        after = model.state_dict()
        assert all(torch.equal(after[name].full_tensor(), before[name].full_tensor()) for name in before)
    model, _ = make()
    with pytest.raises(
        ValueError, match=r"only it has optimizer\.state\.blocks\.0\.down\.bias\.exp_avg_sq, "
    ):
        checkpoint.load(path, model, torch.optim.Adamax(model.parameters()))
    torch.manual_seed(0)
    wider = Net(gated=False)
    wider.blocks[0].up = nn.Linear(5, 8)
    wider.blocks[0].down = nn.Linear(8, 5)
    model = OSDP(wider, plan=plan_by_hand(wider, MODES, 2))
    with pytest.raises(ValueError, match=r"up\.weight has the shape \(7, 5\) there and \(8, 5\) here"):
        checkpoint.load(path, model, torch.optim.AdamW(model.parameters()))
    # Their learning rates cannot be those of one group.
    model, _ = make()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    checkpoint.save(f"{path}-groups", model, optimizer)
    alone = torch.optim.AdamW([*model.blocks.parameters(), *model.head.parameters()])
    with pytest.raises(ValueError, match=r"blocks\.0\..* and .* are in one group here, and their lr differs"):
        checkpoint.load(f"{path}-groups", model, alone)
    assert not alone.state
    # Some parameters stay as they are from here on: their states may stay unread.
    model, _ = make()
    optimizer = torch.optim.AdamW(model.head.parameters())
    checkpoint.load(path, model, optimizer)


def test_a_checkpoint_of_another_model_changes_nothing(three_and_five: tuple[Path, Any, Any]) -> None:
    # Twelve layers loaded into six without a word.
    run(2, load_into_others, str(three_and_five[0]))


def save_before_training(path: str) -> None:
    nets = [trained(0), trained(0)]
    checkpoint.save(path, *nets[0])
    for model, optimizer in nets:
        loss_of(model(tokens(0, 2, 6)), tokens(0, 2, 6)).backward()
        optimizer.step()
    left, right = (values(model, optimizer) for model, optimizer in nets)
    assert same(left, right)


def test_a_save_before_the_first_step_counts_as_no_step(tmp_path: Path) -> None:
    # Torch runs a step of the optimizer to see its states: Adam's corrections began with the second one.
    run(2, save_before_training, str(tmp_path / "zero"))


def test_the_folder_of_a_step_is_on_disk_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a power failure the folder that was kept might have no name, and the older ones were gone.
    synced: set[str] = set()
    sync = os.fsync

    def noting(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noting)
    checkpoint.save(tmp_path / "run", nn.Linear(2, 2), step=1, keep_last=1)
    folder = tmp_path.resolve()
    assert {str(folder), str(folder / "run"), str(folder / "run" / "step-00000001")} <= synced
