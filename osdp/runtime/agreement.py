"""What all ranks must have alike before a plan is applied: no fault in what is given, one plan, one model."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from torch import nn

from osdp.errors import PlanMismatchError
from osdp.plan import Plan
from osdp.runtime.control import Control

#: How many differences are shown.
_SHOWN = 5


def check_together(control: Control | None, check: Callable[[], None]) -> None:
    """Run ``check`` on every rank; if it raises on one, all raise together.

    Args:
        control: The ranks; ``None`` if there is one.
        check: Looks at what this rank was given.

    Raises:
        ValueError: It raised on some ranks; names them and says what each found. Where all found the same,
            the error is what ``check`` raised.
    """
    if control is None:
        check()
        return
    error: Exception | None = None
    try:
        check()
    except (ValueError, TypeError, RuntimeError) as found:
        error = found
    if not any(failed for (failed,) in control.exchange([error is not None], "what the ranks were given")):
        return
    texts = control.gather(None if error is None else f"{type(error).__name__}: {error}", "what is wrong")
    if error is not None and len(set(texts)) == 1:
        raise error
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
    raise ValueError(
        f"some of {control.size} ranks were given what cannot be applied, so that none applies it; give all "
        f"of them the same plan and model:\n{lines}"
    ) from error


def check_alike(control: Control | None, model: nn.Module, plan: Plan, **options: object) -> None:
    """Raise on all ranks unless all have the same plan, parameters and options.

    One small exchange if they have; what differs is exchanged only where something does.

    Args:
        control: The ranks; ``None`` if there is one.
        model: The plain model.
        plan: The plan.
        **options: What else must be the same.

    Raises:
        PlanMismatchError: They have not; says which ranks differ from rank 0, and in what.
    """
    if control is None:
        return
    mine = (_plan_lines(plan), _parameters_of(model), [f"{k}={v}" for k, v in sorted(options.items())])
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


def _plan_lines(plan: Plan) -> list[str]:
    """What is run of a plan, one line for each operator and unit, and for the rest; not why it was chosen."""
    decisions = [f"operator {d.operator!r}: {replace(d, reason='')}" for d in plan.decisions]
    units = [f"unit of {unit.operators[0]!r}: {unit}" for unit in plan.units]
    rest = [f"{name}: {getattr(plan, name)!r}" for name in ("world_size", "training", "recomputed")]
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
