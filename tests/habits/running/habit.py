"""A habit, and where all of them are found."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.habits.running.context import Context


@dataclass(frozen=True, slots=True)
class Habit:
    """Something that users do.

    Attributes:
        function: Does it in a context, and records what must be equal.
        optimizer: ``torch.optim`` class that OSDP's plans are made for; SGD is planned with momentum, since
            all replicated would otherwise fit halfway to all sharded.
        unused: Whether DDP must be told that parameters may go unused.
        skips: Frameworks in which it cannot be said, and why.
        tolerance: Largest relative difference in float64.
        low_tolerance: The same with bfloat16 parameters; ``None``: it says nothing there.
        refused: Part of the sentence with which OSDP may refuse it; empty: it may not.
        seconds: How long it may take.
        training: Further fields of the training that plans are made for.
    """

    function: "Callable[[Context], None]"
    optimizer: str = "SGD"
    unused: bool = False
    skips: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-9
    low_tolerance: float | None = 0.1
    refused: str = ""
    seconds: float = 40.0
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Subject and name."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def sentence(self) -> str:
        """What the user does."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


def habit(
    optimizer: str = "SGD",
    *,
    unused: bool = False,
    skips: Mapping[str, str] | None = None,
    tolerance: float = 1e-9,
    low_tolerance: float | None = 0.1,
    refused: str = "",
    seconds: float = 40.0,
    training: Mapping[str, Any] | None = None,
) -> "Callable[[Callable[[Context], None]], Habit]":
    """Make a habit of a function; the arguments are the fields of :class:`Habit`."""

    def decorated(function: "Callable[[Context], None]") -> Habit:
        return Habit(
            function=function,
            optimizer=optimizer,
            unused=unused,
            skips=skips or {},
            tolerance=tolerance,
            low_tolerance=low_tolerance,
            refused=refused,
            seconds=seconds,
            training=training or {},
        )

    return decorated


def all_habits() -> dict[str, Habit]:
    """Every habit by name, in the order of the files and in them."""
    package = importlib.import_module("tests.habits")
    found: dict[str, Habit] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg or module.name.startswith("test_"):
            continue
        subject = importlib.import_module(f"tests.habits.{module.name}")
        found |= {one.name: one for one in vars(subject).values() if isinstance(one, Habit)}
    return found


def habits_named(names: Iterable[str]) -> dict[str, Habit]:
    """Habits by name; one that is no user's is ``module:function``."""
    known = all_habits()
    found = {}
    for name in names:
        module, _, function = name.partition(":")
        found[name] = getattr(importlib.import_module(module), function) if function else known[name]
    return found
