"""Folders with a checkpoint for each of the latest steps."""

import logging
import re
import shutil
from pathlib import Path

from osdp.comm.objects import broadcast_object, is_first
from osdp.runtime.ranks.shared_faults import raise_together

logger = logging.getLogger(__name__)

#: The folder of a step; ``.metadata`` in it says that it is complete.
_STEP = re.compile(r"step-(\d+)")


def step_folder(path: str | Path, step: int | None, keep_last: int | None) -> Path:
    """Where the checkpoint of ``step`` belongs: ``path`` itself unless several are kept.

    Raises:
        ValueError: ``path`` is no folder in a file system; or several are to be kept, and there is no step,
            or fewer than one are, or ``path`` has a later one.
    """
    _require_folder(path)
    if keep_last is None:
        return Path(path)
    if keep_last < 1 or step is None:
        raise ValueError(f"keep_last={keep_last} keeps checkpoints by step: pass step=, and keep 1 or more")
    folder = Path(path) / f"step-{step:08}"
    later = [each.name for each in _complete_steps(Path(path)) if _number(each) > step] if is_first() else []
    fault = None
    if later:
        # It would be removed at once as the older one, and load() would read the later one.
        fault = ValueError(
            f"{path} has {later[-1]}, which is later than step {step}: a training that goes back, or starts "
            "anew, saves to another folder, or later steps are removed first"
        )
    raise_together(fault, "nothing was saved")
    return folder


def latest_step(path: str | Path) -> Path:
    """The latest complete checkpoint of several in ``path``; ``path`` if it has none; alike on all ranks.

    Raises:
        ValueError: ``path`` is no folder in a file system.
    """
    _require_folder(path)
    folder = Path(path)
    steps = _complete_steps(folder) if is_first() and not (folder / ".metadata").exists() else []
    name = broadcast_object(steps[-1].name if steps else "")
    return folder / name if name else folder


def remove_older_steps(path: str | Path, keep_last: int | None) -> None:
    """Remove all but the latest complete checkpoints in ``path``, and incomplete ones before these."""
    if keep_last is None or not is_first():
        return
    kept = _complete_steps(Path(path))[-keep_last:]
    for folder in _steps(Path(path)):
        if kept and _number(folder) < _number(kept[0]):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning("cannot remove %s, which is not kept any more: %s", folder, error)


def _require_folder(path: str | Path) -> None:
    is_url = "://" in str(path)
    fault = ValueError(
        f"{path} is not a folder: for other storages call torch.distributed.checkpoint.save and load "
        "with osdp.runtime.checkpoint.train_state(model, optimizer)"
    )
    raise_together(fault if is_url else None)


def _steps(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted((entry for entry in path.iterdir() if _STEP.fullmatch(entry.name)), key=_number)


def _complete_steps(path: Path) -> list[Path]:
    return [folder for folder in _steps(path) if (folder / ".metadata").exists()]


def _number(folder: Path) -> int:
    found = _STEP.fullmatch(folder.name)
    assert found is not None  # only such folders are asked for
    return int(found[1])
