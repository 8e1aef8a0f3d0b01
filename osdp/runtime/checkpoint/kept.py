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
from osdp.runtime.checkpoint.optimizers import plain_option
from osdp.runtime.ranks.shared_faults import gather_or_raise, raise_together

logger = logging.getLogger(__name__)

_FILE = "_kept.pt"

#: What is wrong with what has DTensors, where one rank's is kept.
ONE_PART_ALONE = "has DTensors, of which other ranks have parts: keep whole tensors (full_tensor())"


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
    def of(
        cls, layout: list[int], scheduler: Any, step: int | None, rng: bool, data: Any, extra: Any
    ) -> Self:
        """What is to be saved, with that of all ranks; every rank calls it.

        Args:
            layout: The number of ranks of each kind. Where it is another one, rank 1, say, is not the same:
                ranks of one tensor group have the same data and random numbers.
            scheduler: As for :func:`osdp.runtime.checkpoint.save`, as are the others.
            step: As there.
            rng: As there.
            data: As there.
            extra: As there.

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
                "data": None if data is None else plain_option(data.state_dict()),
            }
            shared = {
                "scheduler": None if scheduler is None else plain_option(scheduler.state_dict()),
                "scheduler_class": None if scheduler is None else type(scheduler).__name__,
                "step": plain_option(step),
                "extra": plain_option(extra),
                "layout": layout,
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

    def restore(self, layout: list[int], scheduler: Any, data: Any) -> Kept:
        """Set what belongs to this rank; returns the rest."""
        if scheduler is not None:
            scheduler.load_state_dict(self.plain["scheduler"])
        rank, size = (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)
        ranks: Sequence[dict[str, Any]] = self.plain["ranks"]
        saved = self.plain.get("layout", layout)  # not in checkpoints of earlier versions
        if len(ranks) == size and saved == layout:
            mine = ranks[rank]
            if mine["rng"] is not None:
                _set_random_states(mine["rng"])
            if data is not None and mine["data"] is not None:
                data.load_state_dict(mine["data"])
        elif any(mine["rng"] is not None or mine["data"] is not None for mine in ranks) and is_first():
            logger.warning(
                "the checkpoint is of %s, these are %s: random numbers and data loaders, which it has for "
                "each rank, start anew",
                _layout_text(len(ranks), saved),
                _layout_text(size, layout),
            )
        return Kept(self.plain.get("step"), self.plain.get("extra"))


def _layout_text(ranks: int, layout: list[int]) -> str:
    return f"{ranks} ranks (dp={layout[0]}, tp={layout[1]}, pp={layout[2]})"


def unreadable(state: dict[str, dict[str, Any]]) -> ValueError | None:
    """What is wrong with values beside the tensors of a state dict that could not be read back."""
    # Parameters of a group share its options.
    distinct = {
        id(value): (name, value)
        for values in state.values()
        for name, value in values.items()
        if not isinstance(value, torch.Tensor)
    }
    faults = [
        f"{name} {words}" for name, value in distinct.values() if (words := _fault(_without_entries(value)))
    ]
    return ValueError("; ".join(faults)) if faults else None


def _without_entries(value: Any) -> Any:
    """``value`` without the tensors in dicts and lists, which are entries of their own in a checkpoint."""
    if isinstance(value, dict):
        return {name: _without_entries(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_entries(inner) for inner in value]
    return None if isinstance(value, torch.Tensor) else value


def _fault(value: Any) -> str:
    """Why ``value`` could not be read back; empty if it can."""
    if value is None or type(value) in (bool, int, float, str):
        return ""
    if has_dtensor(value):
        return ONE_PART_ALONE
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # of the user's own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"is more than numbers, words, lists, dicts and tensors, which is all that is read back: {reason}"
        )
    return ""


def has_dtensor(value: Any) -> bool:
    """Whether there are DTensors in containers, such as an average of a sharded model's weights."""
    if isinstance(value, dict):
        return any(map(has_dtensor, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, (list, tuple)) and any(map(has_dtensor, value)))


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
