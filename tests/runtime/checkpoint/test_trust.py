"""A checkpoint that was altered is refused before anything changes, and what it says is never run."""

import errno
import io
import logging
import os
import pickle
import random
import shutil
import time
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from osdp import OSDP
from osdp.errors import AlteredCheckpointError
from osdp.runtime import checkpoint
from osdp.runtime.checkpoint.manifest import SummedFile
from osdp.runtime.checkpoint.restricted import read_metadata
from osdp.torch_private.saving import in_one_process
from tests.helpers.distributed import run
from tests.helpers.nets import loss_of, tokens
from tests.runtime.checkpoint.test_folder import make, same, trained, values


def save_all(path: str) -> None:
    model, optimizer = trained(2)
    schedule = StepLR(optimizer, 1)
    checkpoint.save(path, model, optimizer, scheduler=schedule, step=2, rng=True, extra={"a": [1]})


def loaded_plain(path: Path) -> None:
    """Load into a plain model in this process."""
    torch.manual_seed(3)
    from tests.helpers.nets import Net

    net = Net(gated=False, depth=2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    try:
        checkpoint.load(path, net, optimizer)
    except Exception:
        assert not optimizer.state
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        raise


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "whole"
    run(2, save_all, str(path))
    return path


def test_no_changed_bit_and_no_lost_byte_goes_unnoticed(saved: Path, tmp_path: Path) -> None:
    loaded_plain(saved)
    checkpoint.verify(saved)
    draw = random.Random(0)
    files = sorted(file for file in saved.iterdir())
    assert len(files) == 5
    for file in files:
        for kind in ("bit",) * 6 + ("cut",) * 2:
            path = shutil.copytree(saved, tmp_path / "hurt", dirs_exist_ok=True)
            content = bytearray(file.read_bytes())
            at = draw.randrange(len(content))
            if kind == "bit":
                content[at] ^= 1 << draw.randrange(8)
            (path / file.name).write_bytes(content if kind == "bit" else content[:at])
            with pytest.raises(AlteredCheckpointError, match="hurt"):
                loaded_plain(path)
            with pytest.raises(AlteredCheckpointError, match="hurt"):
                checkpoint.verify(path)
    for file in files:
        path = shutil.copytree(saved, tmp_path / "hurt", dirs_exist_ok=True)
        (path / file.name).unlink()
        with pytest.raises(
            ValueError, match=r"is missing|is not a complete checkpoint|has lost its manifest"
        ):
            loaded_plain(path)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_a_checkpoint_says_is_not_run(saved: Path, tmp_path: Path) -> None:
    # torch.distributed.checkpoint unpickles .metadata, and each entry that is no tensor, whatever they say.
    ran = tmp_path / "ran"
    path = shutil.copytree(saved, tmp_path / "metadata")
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(ran)))
    for manifest in path.glob("*.manifest"):
        manifest.unlink()
    with pytest.raises(ValueError, match=r"it names posix\.mkdir, which no metadata consists of"):
        loaded_plain(path)

    path = tmp_path / "entry"
    torch.manual_seed(3)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = checkpoint.train_state(model, optimizer)
    name = next(name for name in state["optimizer"] if name.endswith(".lr"))
    state["optimizer"][name] = Hostile(ran)
    with in_one_process():
        state_dict_saver.save(state, checkpoint_id=path)
    with pytest.raises(RuntimeError, match=rf"{name} is not plain data: it names posix.mkdir"):
        checkpoint.load(path, model, optimizer)
    assert not ran.exists()
    with pytest.raises(ValueError, match="has no manifest: it was not saved by"):
        checkpoint.verify(path)


def test_members_of_enums_are_read_as_any_python_pickles_them() -> None:
    # Python 3.11.0 to 3.11.4, which Debian 12 has, pickle the memory format of every tensor as getattr(...).
    found = TensorProperties(dtype=torch.float32)
    whole = Metadata({"a": BytesStorageMetadata(), "b": found})  # type: ignore[dict-item]

    class Older(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

    older = io.BytesIO()
    Older(older).dump(whole)
    assert b"getattr" in older.getvalue()
    assert read_metadata(older.getvalue()) == read_metadata(pickle.dumps(whole)) == whole
    # (getattr, (Path, "unlink")), then the same of a class of metadata.
    for named in (b"cpathlib\nPath\n", b"ctorch.distributed.checkpoint.metadata\nMetadata\n"):
        reached = b"\x80\x02cbuiltins\ngetattr\n" + named + b"X\x06\0\0\0unlink\x86R."
        with pytest.raises(ValueError, match="it names the attribute 'unlink', which no metadata"):
            read_metadata(reached)


def test_what_a_checkpoint_names_is_not_changed(tmp_path: Path) -> None:
    # A pickle may set attributes of the classes it names, which are those of this process.
    sets = b"N}X\x06\0\0\0existsccollections\nOrderedDict\ns\x86b."  # (None, {"exists": OrderedDict}), BUILD
    before = Path.exists
    with pytest.raises(ValueError, match=r"it sets Path\.exists, which no metadata does"):
        read_metadata(b"\x80\x02cpathlib\nPath\n" + sets)
    assert Path.exists is before


# -- what is kept beside the model --------------------------------------------------------------------------


def kept_and_restored(path: str) -> None:
    model, optimizer = make()
    schedule = StepLR(optimizer, 1, gamma=0.5)
    step_of(model, optimizer, 0)
    schedule.step()
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    np.random.normal()  # the second of a pair is kept
    checkpoint.save(path, model, optimizer, scheduler=schedule, step=7, rng=True, extra={"best": 0.5})
    drawn = torch.rand(3), random.random(), np.random.normal(size=3)

    model, optimizer = make()
    again = StepLR(optimizer, 1, gamma=0.5)
    kept = checkpoint.load(path, model, optimizer, scheduler=again)
    assert (kept.step, kept.extra) == (7, {"best": 0.5})
    assert again.state_dict() == schedule.state_dict()
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    assert (np.random.normal(size=3) == drawn[2]).all()

    with pytest.raises(ValueError, match=r"extra is more than numbers, words, lists, dicts and tensors"):
        checkpoint.save(path, model, optimizer, extra=Path("x"))
    checkpoint.save(path, model, optimizer)
    with pytest.raises(ValueError, match="was saved without a scheduler"):
        checkpoint.load(path, model, optimizer, scheduler=again)
    # Schedulers take over the states of others without a word.
    checkpoint.save(path, model, optimizer, scheduler=again)
    with pytest.raises(ValueError, match=r"with a scheduler StepLR, and this is a CosineAnnealingLR: leave"):
        checkpoint.load(path, model, optimizer, scheduler=CosineAnnealingLR(optimizer, 10))
    # A rank's shards are not the whole, which is what rank 0's extra would be taken for.
    with pytest.raises(ValueError, match=r"extra has DTensors, of which other ranks have parts"):
        checkpoint.save(path, model, optimizer, extra={"average": [model.state_dict()]})
    # The model alone, without its optimizer.
    other, _ = make()
    checkpoint.load(path, other)
    both = [model.state_dict(), other.state_dict()]
    assert all(torch.equal(both[0][name].full_tensor(), both[1][name].full_tensor()) for name in both[0])


def test_scheduler_step_and_random_numbers_go_on(tmp_path: Path) -> None:
    run(2, kept_and_restored, str(tmp_path / "kept"))


def several_kept(path: str) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match="keep_last=2 keeps checkpoints by step: pass step="):
        checkpoint.save(path, model, optimizer, keep_last=2)
    for step in (1, 2, 10):
        checkpoint.save(path, model, optimizer, step=step, keep_last=2)
    dist.barrier()
    assert sorted(os.listdir(path)) == ["step-00000002", "step-00000010"]
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path, "step-00000011").mkdir()  # as of a save that was interrupted
    dist.barrier()
    assert checkpoint.load(path, model, optimizer).step == 10


def test_the_latest_complete_of_several_steps_is_loaded(tmp_path: Path) -> None:
    run(2, several_kept, str(tmp_path / "several"))


def gone_back(path: str) -> None:
    model, optimizer = make()
    checkpoint.save(path, model, optimizer, step=10, keep_last=1)
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(ValueError, match="has step-00000010, which is later than step 3: a training"):
            save(path, model, optimizer, step=3, keep_last=1)
    checkpoint.save(path, model, optimizer, step=10, keep_last=1)
    assert checkpoint.load(path, model, optimizer).step == 10


def test_a_training_that_goes_back_does_not_lose_what_it_saves(tmp_path: Path) -> None:
    # A save was removed at once as the older one, and load() went on with the later steps.
    run(2, gone_back, str(tmp_path / "several"))


def test_steps_are_not_saved_into_a_checkpoint(tmp_path: Path) -> None:
    # load() went on to read the checkpoint that was there first.
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(ValueError, match="is a checkpoint itself, saved without keep_last, which load"):
        checkpoint.save(tmp_path, model, step=2, keep_last=1)
    assert checkpoint.load(tmp_path, model).step == 1
    with pytest.raises(ValueError, match="a whole number from 0, got -1, and keep 1"):
        checkpoint.save(tmp_path / "steps", model, step=-1, keep_last=1)


def test_what_a_link_leads_to_is_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "archive", model, step=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "archive")
    for step in (2, 3):
        checkpoint.save(tmp_path / "run", model, step=step, keep_last=1)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000001", "step-00000003"]
    assert checkpoint.load(tmp_path / "archive", model).step == 1


def test_gradients_do_not_keep_a_new_optimizer_from_loading(tmp_path: Path) -> None:
    # Torch does not look for the states of an optimizer then, and the checkpoint was one of another.
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, model, optimizer)
    other, loaded = made()
    other(torch.ones(1, 2)).sum().backward()
    checkpoint.load(tmp_path, other, loaded)
    assert all(parameter.grad is not None for parameter in other.parameters())
    states = [[state["exp_avg"] for state in each.state.values()] for each in (optimizer, loaded)]
    assert len(states[0]) == 2 and all(map(torch.equal, *states))


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    # Torch only warns that it copies nothing.
    checkpoint.save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"are on meta, where nothing can be loaded: model\.to_empty"):
        checkpoint.load(tmp_path, nn.Linear(2, 2, device="meta"))


# -- while training goes on ---------------------------------------------------------------------------------


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model(tokens(seed, 2, 6)), tokens(seed, 2, 6)).backward()
    optimizer.step()


def saved_in_the_background(path: str) -> None:
    model, optimizer = trained(2)
    wanted = values(model, optimizer)
    saving = checkpoint.save_async(path, model, optimizer, step=2)
    for seed in range(3):
        step_of(model, optimizer, seed)
    second = checkpoint.save_async(f"{path}-2", model, optimizer, step=5)
    saving.wait()
    second.wait()
    assert saving.is_done
    later = values(model, optimizer)
    for folder, expected, steps in ((path, wanted, 2), (f"{path}-2", later, 5)):
        model, optimizer = make()
        assert checkpoint.load(folder, model, optimizer).step == steps
        assert same(values(model, optimizer), expected)
    assert not same(wanted, later)


def test_what_is_saved_in_the_background_is_what_it_was_when_it_was_asked_for(tmp_path: Path) -> None:
    run(2, saved_in_the_background, str(tmp_path / "async"))


def saved_again_at_once(path: str) -> None:
    model, optimizer = trained(2)
    extra = {"losses": [1.0], "average": torch.zeros(3)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SummedFile, "flush", slow_flush)
        first = checkpoint.save_async(path, model, optimizer, step=1, extra=extra)
        extra["losses"].append(2.0)
        extra["average"].fill_(1)
        second = checkpoint.save_async(path, model, optimizer, step=2)
        assert first.is_done
        first.wait()
        checkpoint.save(f"{path}-2", model, optimizer, step=3)
        assert second.is_done
        third = checkpoint.save_async(f"{path}-3", model, optimizer, step=4, extra=extra)
        extra["losses"].append(3.0)
        extra["average"].fill_(2)
        assert checkpoint.load(path, model, optimizer).step == 2
        assert third.is_done
    kept = checkpoint.load(f"{path}-3", model, optimizer).extra
    assert kept["losses"] == [1.0, 2.0] and torch.equal(kept["average"], torch.ones(3))


def slow_flush(file: SummedFile) -> None:
    time.sleep(0.002)
    super(SummedFile, file).flush()


def test_a_save_waits_for_the_one_before_and_has_what_there_was_then(tmp_path: Path) -> None:
    # A second save into the folder took the files of the first for what a killed one had left. What was
    # given as extra was written as it was later.
    run(2, saved_again_at_once, str(tmp_path / "again"))


def test_a_save_in_the_background_goes_where_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(SummedFile, "flush", slow_flush)
        saving = checkpoint.save_async("run", model, step=1, keep_last=1)
        monkeypatch.chdir(tmp_path / "other")
        saving.wait()
    assert checkpoint.load(tmp_path / "run", model).step == 1
    assert not os.listdir(tmp_path / "other")


def failed_in_the_background(path: str) -> None:
    model, optimizer = make()
    records: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("osdp").addHandler(listener)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SummedFile, "write", _full_disk)
        saving = checkpoint.save_async(path, model, optimizer)
        while not saving.is_done:
            time.sleep(0.01)
    checkpoint.save_async(f"{path}-2", model, optimizer).wait()  # after which the first has told
    said = [record.getMessage() for record in records if record.levelno == logging.ERROR]
    assert len(said) == (dist.get_rank() == 0)
    assert all("was not saved in the background" in words and "No space left" in words for words in said)


def _full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_in_the_background_is_logged_where_nobody_waits(tmp_path: Path) -> None:
    # Trainings that save every so often need not wait, and a full disk was not noticed before the end.
    run(2, failed_in_the_background, str(tmp_path / "full"))


def too_large_a_copy(path: str) -> None:
    from dataclasses import replace

    from tests.helpers.nets import Net
    from tests.helpers.plans import plan_by_hand
    from tests.runtime.checkpoint.test_folder import MODES

    net = Net(gated=False, depth=2)
    plan = replace(plan_by_hand(net, MODES, dist.get_world_size()), memory_limit=100)
    model = OSDP(net, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"a copy of this rank's shards takes .* and the limit is 100 B"):
        checkpoint.save_async(path, model, optimizer)
    assert not optimizer.state and not Path(path).exists()


def test_a_copy_that_exceeds_the_limit_is_refused(tmp_path: Path) -> None:
    run(2, too_large_a_copy, str(tmp_path / "large"))


def test_a_disk_that_fails_while_the_file_is_still_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system tells of such an error once: a sync at the end would succeed.
    calls = []

    def fails_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr("osdp.runtime.checkpoint.manifest.os.fsync", fails_once)
    with pytest.raises(OSError, match="the disk is broken"), SummedFile(tmp_path / "file") as file:
        for _ in range(5):
            file.write(bytes(2**22))
        file.flush()
        os.fsync(file.fileno())
    assert len(calls) == 2
