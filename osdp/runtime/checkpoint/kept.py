"""What trains beside model and optimizer: scheduler, step, random numbers, data, and the user's own."""

import io
import logging
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from osdp.comm.objects import has_process_group, is_first
from osdp.runtime.checkpoint.contents import CheckpointContents
from osdp.runtime.ranks.shared_faults import gather_or_raise, raise_together

logger = logging.getLogger(__name__)

_FILE = "_kept.pt"


@dataclass(frozen=True)
class Kept:
    """What a checkpoint had beside model and optimizer.

    Attributes:
        step: The number of steps that were made; ``None`` if it was not given.
        extra: The user's own, as it was saved.
    """

    step: int | None = None
    extra: Any = None


@dataclass(frozen=True)
class KeptState:
    """The same as it is saved.

    Attributes:
        plain: Numbers, words, lists, dicts and tensors alone. Of random numbers and data there is an entry
            for each rank.
    """

    plain: dict[str, Any]

    @classmethod
    def of(cls, scheduler: Any, step: int | None, rng: bool, data: Any, extra: Any) -> Self:
        """What is to be saved, with that of all ranks; every rank calls it.

        Raises:
            ValueError: Some of it could not be read back; names what.
            RuntimeError: A state could not be asked for; raised on all ranks.
        """
        mine: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        fault: Exception | None = None
        try:
            mine = {
                "rng": _random_states() if rng else None,
                "data": None if data is None else data.state_dict(),
            }
            shared = {
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "scheduler_class": None if scheduler is None else type(scheduler).__name__,
                "step": step,
                "extra": extra,
            }
            named = {**mine, **shared}.items()
            if faults := [f"{name} {words}" for name, value in named if (words := _fault(value))]:
                fault = ValueError("; ".join(faults))
        except Exception as error:  # of the user's own; the other ranks wait
            fault = error
        return cls({**shared, "ranks": gather_or_raise(fault, mine, "nothing was saved")})

    def packed(self) -> bytes:
        """As it is written to a file, by rank 0: what changes afterwards is not in it; of others nothing."""
        file = io.BytesIO()
        if is_first():
            torch.save(self.plain, file)
        return file.getvalue()

    @classmethod
    def read(cls, folder: Path, contents: CheckpointContents) -> Self:
        """What was saved with the checkpoint ``contents``; nothing with one of other programs.

        Raises:
            ValueError: It cannot be read.
        """
        names = [name for name in contents.files or () if name.endswith(_FILE)]
        if not names:
            return cls({"ranks": []})
        fault: Exception | None = None
        plain: dict[str, Any] = {}
        try:
            plain = torch.load(folder / names[0], map_location="cpu", weights_only=True)
        except (OSError, pickle.UnpicklingError, RuntimeError) as error:
            fault = ValueError(f"{folder / names[0]} cannot be read: {error}")
        raise_together(fault)
        return cls(plain)

    def check(self, scheduler: Any, path: str) -> None:
        """Refuse a checkpoint without a state of ``scheduler``, if there is one, or with one of another.

        Raises:
            ValueError: It has none, or that of another class.
        """
        if scheduler is not None and self.plain.get("scheduler") is None:
            raise ValueError(
                f"{path} was saved without a scheduler: leave scheduler= out; nothing was loaded"
            )
        saved = self.plain.get("scheduler_class")  # not in checkpoints of earlier versions
        if scheduler is not None and saved not in (None, type(scheduler).__name__):
            # Schedulers take over whatever they are given.
            raise ValueError(
                f"{path} was saved with a scheduler {saved}, and this is a {type(scheduler).__name__}: leave "
                "scheduler= out, or pass one of that class; nothing was loaded"
            )

    def restore(self, scheduler: Any, data: Any) -> Kept:
        """Set what belongs to this rank; returns the rest."""
        if scheduler is not None:
            scheduler.load_state_dict(self.plain["scheduler"])
        rank, size = (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)
        ranks: Sequence[dict[str, Any]] = self.plain["ranks"]
        if len(ranks) == size:
            mine = ranks[rank]
            if mine["rng"] is not None:
                _set_random_states(mine["rng"])
            if data is not None and mine["data"] is not None:
                data.load_state_dict(mine["data"])
        elif any(mine["rng"] is not None or mine["data"] is not None for mine in ranks) and is_first():
            logger.warning(
                "the checkpoint is of %d ranks, these are %d: random numbers and data loaders, which it has "
                "for each rank, start anew",
                len(ranks),
                size,
            )
        return Kept(self.plain.get("step"), self.plain.get("extra"))


def _fault(value: Any) -> str:
    """Why ``value`` could not be read back; empty if it can."""
    if value is None or type(value) in (bool, int, float, str):
        return ""
    if _has_dtensor(value):
        return "has DTensors, of which other ranks have parts: keep whole tensors (full_tensor())"
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        return (
            f"is more than numbers, words, lists, dicts and tensors, which is all that is read back: {reason}"
        )
    return ""


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_dtensor, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, (list, tuple)) and any(map(_has_dtensor, value)))


def _random_states() -> dict[str, Any]:
    version, state, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": [version, list(state), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "cpu": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        found["accelerator"] = torch.get_device_module().get_rng_state()
    return found


def _set_random_states(states: dict[str, Any]) -> None:
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    if "numpy" in states:  # not in checkpoints of earlier versions
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if "accelerator" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["accelerator"])
