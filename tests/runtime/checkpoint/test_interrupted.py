"""What users do around a save or a load: end the process group, press Ctrl-C, keep other files beside it."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from osdp.errors import AlteredCheckpointError
from osdp.runtime import checkpoint
from osdp.runtime.checkpoint import pretrained, save_load
from osdp.runtime.checkpoint.folder import CheckpointWriter
from osdp.runtime.checkpoint.safetensors_files import INDEX
from osdp.torch_private.saving import in_one_process
from tests.helpers.distributed import run
from tests.runtime.checkpoint.test_folder import trained


def group_ended(path: str) -> str:
    model, optimizer = trained(1)
    checkpoint.save(path, model, optimizer, step=1)
    started, write = Event(), save_load.map_local

    def later(*arguments: Any) -> Any:
        assert started.wait(30)
        return write(*arguments)

    save_load.map_local = later  # in a process of its own
    saving = checkpoint.save_async(path, model, optimizer, step=2)
    dist.barrier()
    dist.destroy_process_group()
    started.set()
    with pytest.raises(RuntimeError) as raised:
        saving.wait()
    return str(raised.value)


def loaded_step(path: str) -> int | None:
    return checkpoint.load(path, *trained(0)).step


def test_a_group_that_ends_before_a_save_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """Each rank took itself for the only one, and a part of the model took the checkpoint's place."""
    path = str(tmp_path / "run")
    for words in run(2, group_ended, path, fresh=True):
        assert "1 of 2 ranks take part: the process group was destroyed" in words
    assert run(2, loaded_step, path) == [1, 1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """torch makes a failure of it, which a loop that goes on after failed saves swallowed."""
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, model, step=1)

    def interrupted(*_: Any) -> None:
        raise kind

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "write_data", interrupted)
        with pytest.raises(kind):
            checkpoint.save(tmp_path, model, step=2)
    with monkeypatch.context() as patched:
        patched.setattr(save_load.RestrictedReader, "read_data", interrupted)
        with pytest.raises(kind):
            checkpoint.load(tmp_path, model)
    assert checkpoint.load(tmp_path, model).step == 1


def test_folders_that_are_no_checkpoints_are_kept(tmp_path: Path) -> None:
    """Folders of samples by step, beside the checkpoints, were removed with the older ones."""
    samples = tmp_path / "step-100"
    samples.mkdir()
    (samples / "sample.png").touch()
    (tmp_path / "step-200").touch()
    for step in (300, 400):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=step, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000400", "step-100", "step-200"]
    assert os.listdir(samples) == ["sample.png"]


def test_a_folder_whose_first_save_was_killed_has_no_checkpoint(tmp_path: Path) -> None:
    """A job that is started again looks for the folder, which is there, and `load` ended it each time."""
    assert not checkpoint.exists(tmp_path / "run")
    (tmp_path / "run" / "step-00000010").mkdir(parents=True)
    assert not checkpoint.exists(tmp_path / "run")
    checkpoint.save(tmp_path / "run", nn.Linear(2, 2), step=20, keep_last=1)
    assert checkpoint.exists(tmp_path / "run")
    checkpoint.save(tmp_path / "itself", nn.Linear(2, 2))
    assert checkpoint.exists(tmp_path / "itself")
    with pytest.raises(ValueError, match="is not a folder"):
        checkpoint.exists("s3://bucket/run")


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_steps_are_whole_numbers(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="pass step=, a whole number from 0"):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=step, keep_last=1)


def with_manifest(folder: Path, body: str) -> None:
    (manifest,) = folder.glob("__*.manifest")
    manifest.write_text(f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


def saved_over(path: str) -> None:
    checkpoint.save(path, nn.Linear(2, 2), step=2)


BODIES = ("[]", "{}", '{"version": 1}', '{"version": 1, "chunk": 1, "files": {"a": 1}}', "[" * 100_000)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_manifests_of_anything_are_refused_and_replaced(tmp_path: Path, body: str) -> None:
    """Rank 0 raised alone, and the others waited for it."""
    model, path = nn.Linear(2, 2), tmp_path / "run"
    checkpoint.save(path, model, step=1)
    with_manifest(path, body)
    with pytest.raises(AlteredCheckpointError):
        checkpoint.load(path, model)
    if body == BODIES[1]:
        run(2, saved_over, str(path))
    else:
        saved_over(str(path))
    assert checkpoint.load(path, model).step == 2


def test_files_outside_the_folder_are_not_looked_at(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "run", model)
    (manifest,) = (tmp_path / "run").glob("__*.manifest")
    found = json.loads(manifest.read_bytes().split(b"\n")[0])
    found["files"]["../other"] = {"bytes": 1, "crc32": [0]}
    with_manifest(tmp_path / "run", json.dumps(found))
    with pytest.raises(AlteredCheckpointError, match=r"'\.\./other', which is not in its folder"):
        checkpoint.verify(tmp_path / "run")


def test_an_export_waits_for_the_save_before(tmp_path: Path) -> None:
    """It wrote the weights of the step before, or found files that were just removed."""
    model = nn.Linear(2, 2)
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoint.save_async(tmp_path / "run", model, step=step, keep_last=1)
        checkpoint.export(tmp_path / "run", tmp_path / f"{step}.pt")
        assert checkpoint.summarize(tmp_path / "run").step == step
        assert torch.load(tmp_path / f"{step}.pt")["weight"].unique().tolist() == [step]


# -- folders of Hugging Face --------------------------------------------------------------------------------


@pytest.fixture
def in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pretrained, "_FILE_BYTES", 100)
    folder = tmp_path / "exported"
    checkpoint.save_pretrained(constant(1.0), folder)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


def constant(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def test_other_files_beside_the_weights_are_not_read(in_two_files: Path) -> None:
    """Copies in another dtype were loaded instead, or not, as the folder listed them; and others refused."""
    wrong = {name: value + 100 for name, value in constant(1.0).state_dict().items()}
    save_file(wrong, in_two_files / "model.fp16.safetensors")
    save_file({"other.name": torch.zeros(1)}, in_two_files / "consolidated.safetensors")
    save_file(wrong, in_two_files / "model-00001-of-00009.safetensors")
    model = constant(0.0)
    checkpoint.load_pretrained(model, in_two_files)
    assert all(parameter.unique().tolist() == [1.0] for parameter in model.parameters())


def test_a_killed_save_is_never_read_as_a_mix(in_two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file was the new one, the other the old one, and nothing told."""
    replace, done = os.replace, []

    def killed(source: Any, target: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(replace(source, target))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save_pretrained(constant(2.0), in_two_files)
    files = [load_file(file) for file in sorted(in_two_files.glob("*.safetensors"))]
    assert {value.unique().item() for file in files for value in file.values()} == {1.0, 2.0}
    model = constant(0.0)
    with pytest.raises(ValueError, match=f"no {INDEX}: a save into it was interrupted"):
        checkpoint.load_pretrained(model, in_two_files)
    checkpoint.save_pretrained(constant(3.0), in_two_files)
    checkpoint.load_pretrained(model, in_two_files)
    assert all(parameter.unique().tolist() == [3.0] for parameter in model.parameters())


def test_what_a_killed_save_left_is_removed_by_the_next(in_two_files: Path) -> None:
    (in_two_files / ".saving-0123").mkdir()
    shutil.copy(in_two_files / INDEX, in_two_files / ".saving-0123" / INDEX)
    checkpoint.save_pretrained(constant(2.0), in_two_files)
    assert not list(in_two_files.glob(".saving-*"))


def test_one_file_is_read_where_an_index_is_of_those_that_it_replaced(in_two_files: Path) -> None:
    """As ``save_pretrained`` of transformers leaves it."""
    for file in in_two_files.glob("*.safetensors"):
        file.unlink()
    save_file(constant(4.0).state_dict(), in_two_files / "model.safetensors")
    model = constant(0.0)
    checkpoint.load_pretrained(model, in_two_files)
    assert all(parameter.unique().tolist() == [4.0] for parameter in model.parameters())


def test_a_file_that_the_index_names_is_missed(in_two_files: Path) -> None:
    (in_two_files / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00002\.safetensors, which"):
        checkpoint.load_pretrained(constant(0.0), in_two_files)


def test_a_plain_model_without_memory_is_refused(in_two_files: Path) -> None:
    with pytest.raises(ValueError, match="are on meta, where nothing can be loaded"):
        checkpoint.load_pretrained(nn.Sequential(nn.Linear(4, 4, device="meta")), in_two_files)


def test_checkpoints_of_other_programs_are_kept(tmp_path: Path) -> None:
    """torchtitan calls its folders alike: they were removed with the older ones."""
    model = nn.Linear(2, 2)
    with in_one_process():
        state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-100")
    for step in (200, 300):
        checkpoint.save(tmp_path, model, step=step, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000300", "step-100"]
    checkpoint.load(tmp_path / "step-100", model)


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    """It was refused where several are kept, as no whole number."""
    checkpoint.save(tmp_path, nn.Linear(2, 2), step=np.int64(7), keep_last=1)  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path, nn.Linear(2, 2)).step == 7
