"""Errors of some ranks raised on all of them, with the numbers of the ranks."""

from typing import TypeVar, cast

from osdp.comm.objects import gather_objects
from osdp.errors import AlteredCheckpointError

T = TypeVar("T")

#: Exception types that are kept; every other one becomes a RuntimeError.
_KINDS = (FileNotFoundError, AlteredCheckpointError, ValueError, TypeError)


def raise_together(fault: Exception | None, what: str = "") -> None:
    """Raise the errors of all ranks on every rank; a collective call, with ``None`` where all went well.

    Args:
        fault: The error of this rank, if any.
        what: Prefix of the message: the operation and its outcome.

    Raises:
        FileNotFoundError: All errors are of this type; likewise the others that are kept.
        RuntimeError: There are errors of other types, or of several.
    """
    gather_unless(fault, None, what)


def gather_unless(fault: Exception | None, mine: T, what: str = "") -> list[T]:
    """The objects of all ranks, unless some have an error: as :func:`raise_together`, in one exchange."""
    # What is wrong with an object may be that it cannot be sent.
    sent = (mine, None) if fault is None else (None, (_kind_of(fault), _sentence(fault)))
    everyone = gather_objects(sent)
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


def _kind_of(fault: Exception) -> type[Exception]:
    return next((kind for kind in _KINDS if isinstance(fault, kind)), RuntimeError)


def _sentence(fault: Exception) -> str:
    return str(fault) if isinstance(fault, (*_KINDS, RuntimeError)) else f"{type(fault).__name__}: {fault}"
