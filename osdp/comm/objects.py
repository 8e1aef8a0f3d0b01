"""Python objects between ranks; each function works alone where there is no process group."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def has_process_group() -> bool:
    """Whether ``torch.distributed`` is initialised."""
    return dist.is_available() and dist.is_initialized()


def is_first(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is the first rank of ``group``, or of all ranks if it is ``None``."""
    return not has_process_group() or dist.get_rank(group) == 0


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The objects of all ranks of ``group``, or of all ranks if it is ``None``, in their order."""
    if not has_process_group():
        return [mine]
    everyone: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def broadcast_object(mine: T, group: dist.ProcessGroup | None = None, source: int = 0) -> T:
    """The object of the first rank of ``group``, or of rank ``source`` in it, on all of its ranks.

    ``None`` is the group of all ranks.
    """
    if not has_process_group():
        return mine
    box = [mine]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def on_first_rank(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``make`` returns or raises on the first rank of ``group``, or of all ranks, on all of them."""
    if not has_process_group():
        return make()
    made: tuple[T | None, Exception | None] = (None, None)
    if is_first(group):
        try:
            made = make(), None
        except Exception as error:  # whatever it is, the other ranks wait for it
            made = None, error
    answer, failure = broadcast_object(made, group)
    if failure is not None:
        raise failure
    return cast(T, answer)
