"""Checks that all ranks agree before a plan is applied: valid arguments, the same plan, the same model."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from torch import nn

from osdp.errors import PlanMismatchError
from osdp.plan.plan import Plan
from osdp.runtime.ranks.control import Control

#: Number of differences that a message lists.
_SHOWN = 5


def check_together(
    control: Control | None, check: Callable[[], object], what: str = "what the ranks were given"
) -> None:
    """Run ``check`` on every rank; if it raises on one, all raise together.

    Args:
        control: The ranks; ``None`` if there is one.
        check: Checks the arguments of this rank.
        what: What all ranks do, for messages if some do something else.

    Raises:
        ValueError: ``check`` raised on some ranks; lists these with their errors. Where all ranks found the
            same, the error that ``check`` raised.
        LockstepError: Other ranks do something else.
    """
    if control is None:
        check()
        return
    error: Exception | None = None
    try:
        check()
    except (ValueError, TypeError, RuntimeError) as found:
        error = found
    if not any(control.meet(what, error is not None)):
        return
    texts = control.gather(None if error is None else f"{type(error).__name__}: {error}", "what is wrong")
    if error is not None and len(set(texts)) == 1:
        raise error
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    raise ValueError(
        f"some of {control.size} ranks were given what cannot be applied, so none applies it; give all "
        f"of them the same plan and model:\n{lines}"
    ) from error


def first_rank_has_values(control: Control | None, on_meta: bool) -> bool:
    """Whether the model of rank 0 has values, which those on ``meta`` of other ranks then receive.

    Args:
        control: The ranks; ``None`` if there is one.
        on_meta: Whether this rank's model is on ``meta``.

    Raises:
        ValueError: Only the models of other ranks have some.
    """
    if control is None or control.agree(on_meta, "whether the models of the other ranks are on meta"):
        return not on_meta
    found = control.gather(on_meta, "whether the models of the other ranks are on meta")
    if found[0]:
        others = ", ".join(str(rank) for rank, empty in enumerate(found) if not empty)
        raise ValueError(
            f"the model of rank 0 is on meta, and those of ranks {others} have values: all ranks start from "
            "rank 0's, so build it there, or on meta everywhere"
        )
    return True


def check_alike(control: Control | None, model: nn.Module, plan: Plan, stage: int, **options: object) -> None:
    """Raise on all ranks unless all have the same plan, parameters and options.

    Costs one small exchange if they agree; the full texts are exchanged only if they do not.

    Args:
        control: The ranks; ``None`` if there is one.
        model: The plain model.
        plan: The plan.
        stage: Index of the stage that the model is.
        **options: Other options that must be the same.

    Raises:
        PlanMismatchError: Some ranks differ from rank 0; lists these ranks and their differences.
    """
    if control is None:
        return
    mine = (_plan_lines(plan, stage), _parameters_of(model), [f"{k}={v}" for k, v in sorted(options.items())])
    if control.agree(mine, "the plans and models of the other ranks"):
        return
    found = control.gather(mine, "the plans and models of the other ranks")
    differences = [
        f"rank {rank} differs from rank 0: {difference}"
        for rank, theirs in enumerate(found)
        for ours, its in zip(found[0], theirs, strict=True)
        for difference in _differences(ours, its)
    ]
    raise PlanMismatchError(
        [*differences, "all ranks must apply the same plan file to the same model, built the same way"]
    )


def _plan_lines(plan: Plan, stage: int) -> list[str]:
    """A line for each operator, unit and setting of a stage that affects execution; reasons are left out."""
    sharding = plan.stages[stage].sharding
    decisions = [f"operator {d.operator!r}: {replace(d, reason='')}" for d in sharding.decisions]
    units = [f"unit of {unit.operators[0]!r}: {unit}" for unit in sharding.units]
    rest = [f"dp: {plan.dp}", f"training: {plan.training!r}", f"recomputed: {sharding.recomputed!r}"]
    return [*decisions, *units, *rest]


def _parameters_of(model: nn.Module) -> list[str]:
    return [
        f"parameter {name!r}: {tuple(p.shape)}, {p.dtype}, "
        f"{'trainable' if p.requires_grad else 'frozen'} (requires_grad={p.requires_grad})"
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def _differences(ours: list[str], theirs: list[str]) -> list[str]:
    pairs = [(a, b) for a, b in zip_longest(ours, theirs, fillvalue="nothing") if a != b]
    shown = [f"it has {b}, rank 0 has {a}" for a, b in pairs[:_SHOWN]]
    return shown + ([f"and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else [])
