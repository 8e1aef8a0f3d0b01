"""Folders with a checkpoint for each of the latest steps."""

import logging
import re
import shutil
from functools import partial
from pathlib import Path

from osdp.comm.objects import is_first, on_first_rank
from osdp.runtime.checkpoint.contents import METADATA, OWN_FILE
from osdp.runtime.checkpoint.optimizers import plain_option
from osdp.runtime.ranks.shared_faults import raise_together

logger = logging.getLogger(__name__)

#: The folder of a step; ``.metadata`` in it says that it is complete.
_STEP = re.compile(r"step-(\d+)")


def step_folder(path: str | Path, step: int | None, keep_last: int | None) -> Path:
    """Where the checkpoint of ``step`` belongs: ``path`` itself unless several are kept.

    Raises:
        ValueError: Several are to be kept, and there is no step, or fewer than one are, or ``path`` has a
            later one, or is a checkpoint itself.
        OSError: ``path`` cannot be looked into; raised on all ranks.
    """
    if keep_last is None:
        return Path(path)
    step = plain_option(step)
    if keep_last < 1 or not isinstance(step, int) or step < 0:
        raise ValueError(
            f"keep_last={keep_last} keeps checkpoints by step: pass step=, a whole number from 0, got {step}"
            ", and keep 1 or more"
        )
    refusal = on_first_rank(partial(_why_not, Path(path), step))
    if refusal:
        raise ValueError(f"nothing was saved: {refusal}")
    return Path(path) / f"step-{step:08}"


def _why_not(path: Path, step: int) -> str:
    """Why ``load`` would not find a checkpoint of ``step`` in ``path``; empty if it will."""
    if is_checkpoint(path):
        return (
            f"{path} is a checkpoint itself, saved without keep_last, which load() would go on to read: save "
            "steps to another folder"
        )
    later = [each.name for each in _complete_steps(path) if _number(each) > step]
    # It would be removed at once as the older one, and load() would read the later one.
    return (
        f"{path} has {later[-1]}, which is later than step {step}: a training that goes back, or starts "
        "anew, saves to another folder, or later steps are removed first"
        if later
        else ""
    )


def latest_step(path: str | Path) -> Path:
    """The latest complete checkpoint of several in ``path``; ``path`` if it has none; alike on all ranks.

    Raises:
        ValueError: ``path`` is no folder in a file system.
        OSError: ``path`` cannot be looked into; raised on all ranks.
    """
    raise_together(url_fault(path))
    folder = Path(path)
    steps = on_first_rank(lambda: [] if is_checkpoint(folder) else _complete_steps(folder))
    return folder / steps[-1].name if steps else folder


def exists(path: str | Path) -> bool:
    """Whether ``path`` has a complete checkpoint, of a step or itself; alike on all ranks, which all call it.

    A job that is started again loads if it has: a folder whose first save was interrupted is there, but
    empty.

    Raises:
        ValueError: ``path`` is no folder in a file system.
        OSError: ``path`` cannot be looked into; raised on all ranks.
    """
    return on_first_rank(partial(is_checkpoint, latest_step(path)))


def remove_older_steps(path: str | Path, keep_last: int | None) -> None:
    """Remove all but the latest complete checkpoints in ``path``, and incomplete ones before these."""
    if keep_last is None or not is_first():
        return
    try:
        kept = _complete_steps(Path(path))[-keep_last:]
        older = [each for each in _steps(Path(path)) if kept and _number(each) < _number(kept[0])]
        older = [each for each in older if _is_own(each)]
    except OSError as error:
        logger.warning("cannot look for older checkpoints in %s: %s", path, error)
        return
    for folder in older:
        try:
            # First of all: whenever the process is killed, what is left is not taken for a checkpoint.
            (folder / METADATA).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("cannot remove %s, which is not kept any more: %s", folder, error)


def _is_own(folder: Path) -> bool:
    """Whether a folder is, or was to be, a checkpoint that ``save`` wrote.

    Other programs call theirs alike (torchtitan: ``step-100``); what a link leads to is somebody's own.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    return any(OWN_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (folder / METADATA).exists()


def url_fault(path: str | Path) -> ValueError | None:
    """What is wrong with ``path`` if it is no folder in a file system."""
    if "://" not in str(path):
        return None
    return ValueError(
        f"{path} is not a folder: for other storages call torch.distributed.checkpoint.save and load "
        "with osdp.runtime.checkpoint.train_state(model, optimizer)"
    )


def _steps(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted((entry for entry in path.iterdir() if _STEP.fullmatch(entry.name)), key=_number)


def _complete_steps(path: Path) -> list[Path]:
    return list(filter(is_checkpoint, _steps(path)))


def _number(folder: Path) -> int:
    found = _STEP.fullmatch(folder.name)
    assert found is not None  # only such folders are asked for
    return int(found[1])
