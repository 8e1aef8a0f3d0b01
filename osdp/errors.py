"""Exceptions that carry the data a caller needs to act on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from osdp.text import format_bytes


class PlanMismatchError(ValueError):
    """Raised when a plan was made for another model, world size or training setup.

    Attributes:
        differences: Every difference found, one sentence each.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        lines = "\n".join(f"  - {difference}" for difference in self.differences)
        super().__init__(f"the plan does not fit what it is applied to:\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.differences,)


class AlteredCheckpointError(ValueError):
    """Raised when a checkpoint, or a file of it, is not what was saved."""


@dataclass(frozen=True, slots=True)
class LargeOperator:
    """An operator named in an :class:`InfeasibleError`, with its unsharded parameter bytes."""

    name: str
    nbytes: int


class InfeasibleError(ValueError):
    """Raised when no plan in the decision space fits the memory limit.

    Attributes:
        limit: The memory limit, in bytes per device.
        best_peak: The lowest predicted peak of any plan that the search found, in bytes per device.
        largest: The largest operators, largest first.
        suggestions: Changes that would help, one sentence each.
        lowest: The :class:`~osdp.Plan` with that peak, to be looked at: ``error.lowest.report("plan.html")``;
            ``None`` where the model is cut into stages.
    """

    def __init__(
        self,
        *,
        limit: int,
        best_peak: int,
        largest: Sequence[LargeOperator],
        suggestions: Sequence[str],
        lowest: Any = None,
    ) -> None:
        self.limit = limit
        self.best_peak = best_peak
        self.largest = tuple(largest)
        self.suggestions = tuple(suggestions)
        self.lowest = lowest
        names = ", ".join(f"{op.name} ({format_bytes(op.nbytes)})" for op in self.largest)
        helps = "".join(f"\n  - {suggestion}" for suggestion in self.suggestions)
        super().__init__(
            f"nothing fits the memory limit of {format_bytes(limit)}: the lowest peak found is "
            f"{format_bytes(best_peak)}, {format_bytes(self.shortfall)} too much.\n"
            f"largest operators: {names}\nwhat would help:{helps}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Rank 0 plans and sends the exception to the other ranks if it fails: it must be picklable.
        facts = {
            name: getattr(self, name) for name in ("limit", "best_peak", "largest", "suggestions", "lowest")
        }
        return partial(type(self), **facts), ()

    @property
    def shortfall(self) -> int:
        """Bytes by which ``best_peak`` exceeds the limit."""
        return self.best_peak - self.limit


class NoGradientError(RuntimeError):
    """The model ran with gradients, and none arrives in a parameter that an optimizer steps on."""

    def __init__(self) -> None:
        super().__init__(
            "the model ran with gradients, but none has arrived in any parameter before the optimizer step. "
            "Call loss.backward() before it, and without inputs=: each forward computes with what is "
            "gathered from parameters, which backward(inputs=...) does not reach, and torch.autograd.grad "
            "accumulates nothing"
        )
