"""Errors of some ranks raised on all of them, with the numbers of the ranks."""

from typing import TypeVar, cast

import torch.distributed as dist

from osdp.comm.objects import gather_objects
from osdp.errors import AlteredCheckpointError

T = TypeVar("T")

#: Exception types that are kept; every other one becomes a RuntimeError.
_KINDS = (FileNotFoundError, AlteredCheckpointError, ValueError, TypeError)


def raise_together(
    fault: BaseException | None, what: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Raise the errors of all ranks on every rank; a collective call, with ``None`` where all went well.

    Args:
        fault: The error of this rank, if any.
        what: Prefix of the message: the operation and its outcome.
        group: The ranks; all of them if it is ``None``.

    Raises:
        FileNotFoundError: All errors are of this type; likewise the others that are kept.
        RuntimeError: There are errors of other types, or of several.
    """
    gather_or_raise(fault, None, what, group)


def gather_or_raise(
    fault: BaseException | None, mine: T, what: str = "", group: dist.ProcessGroup | None = None
) -> list[T]:
    """The objects of all ranks, or the errors of some raised on every rank, in one exchange.

    Args:
        fault: As for :func:`raise_together`, as are the others.
        mine: The object of this rank; not sent where there is a fault.
        what: Prefix of the message.
        group: The ranks.

    Returns:
        The objects, in the order of the ranks.

    Raises:
        RuntimeError: And others, as for :func:`raise_together`.
    """
    # What is wrong with an object may be that it cannot be sent.
    sent = (mine, None) if fault is None else (None, (_kind_of(fault), _sentence(fault)))
    everyone = gather_objects(sent, group)
    faults = {rank: met for rank, (_, met) in enumerate(everyone) if met is not None}
    if not faults:
        return [cast(T, theirs) for theirs, _ in everyone]
    kinds = {kind for kind, _ in faults.values()}
    kind = kinds.pop() if len(kinds) == 1 else RuntimeError
    sentences = by_ranks({rank: sentence for rank, (_, sentence) in faults.items()}, len(everyone))
    raise kind(f"{what}: {sentences}" if what else sentences) from fault


def by_ranks(sentences: dict[int, str], world_size: int) -> str:
    """The messages of ranks joined, each once, with the ranks that gave it unless these are all."""
    ranks: dict[str, list[int]] = {}
    for rank, sentence in sentences.items():
        ranks.setdefault(sentence, []).append(rank)
    return "; ".join(
        sentence if len(who) == world_size else f"{_named(who)}: {sentence}"
        for sentence, who in ranks.items()
    )


def _named(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{more}"


def _kind_of(fault: BaseException) -> type[Exception]:
    return next((kind for kind in _KINDS if isinstance(fault, kind)), RuntimeError)


def _sentence(fault: BaseException) -> str:
    return str(fault) if isinstance(fault, (*_KINDS, RuntimeError)) else f"{type(fault).__name__}: {fault}"
