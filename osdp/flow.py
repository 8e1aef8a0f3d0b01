"""Flow: which values go from where to where in one forward, so that it can be cut into stages.

A *step* is one call of a module that is kept or removed as a whole; what happens between two steps is code
of the modules around them, which every stage runs for itself. A *value* is a tensor that a step made, or that
was made of such a one or of parameters: it exists only in its stage, or where it was sent to. Everything else
(masks, positions) each stage makes again.

Cutting before step ``c`` gives the steps from ``c`` on, and what comes between them, to a later stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from osdp.model_desc import DTYPE_BYTES, Affine


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that steps use and that not every stage can make for itself.

    Attributes:
        step: The step in which, or after which, it is made; -1 before the first.
        dtype: Its dtype.
        numel: Its elements, by local batch.
        differentiable: Whether a gradient flows back into it.
    """

    step: int
    dtype: str
    numel: Affine
    differentiable: bool

    def nbytes(self, local_batch: int) -> int:
        """Its bytes at ``local_batch`` samples."""
        return round(self.numel(local_batch)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A value among the arguments of a step.

    Attributes:
        value: Which.
        leaf: Its place among the leaves of the step's arguments.
    """

    value: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a module.

    Attributes:
        module: Its FQN.
        call: Which call of it, from 0.
        arrivals: The values among its arguments.
    """

    module: str
    call: int
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """Cuts that are not possible.

    Attributes:
        after: The first step before which nothing can be cut.
        until: The last such step.
        reason: Why.
    """

    after: int
    until: int
    reason: str


_NONE = Affine(0.0, 0.0)


@dataclass(frozen=True)
class Flow:
    """The steps of a forward and the values between them.

    Attributes:
        steps: All steps, in order.
        values: All values.
        bars: Cuts that are not possible.
        idle: FQNs of modules that are kept or removed as a whole and were not called.
        loose: Parameters that the code around the steps uses, each with the step it follows (-1: none).
        remade: Bytes of what every stage makes for its steps itself, such as masks, by local batch.
    """

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    bars: tuple[Bar, ...] = ()
    idle: tuple[str, ...] = ()
    loose: tuple[tuple[str, int], ...] = ()
    remade: Affine = _NONE

    @property
    def cuts(self) -> tuple[int, ...]:
        """Steps that a stage can begin with, the first excluded."""
        return tuple(
            cut
            for cut in range(1, len(self.steps))
            if not any(bar.after <= cut <= bar.until for bar in self.bars)
        )

    def check(self, bounds: Sequence[int]) -> None:
        """Raise unless the steps can be cut at ``bounds``.

        Args:
            bounds: First step of each stage, and the number of steps.

        Raises:
            ValueError: A stage is empty, or a cut is not possible; says why.
        """
        faults = [
            f"stage {index} would have no step: bounds {tuple(bounds)}"
            for index, (start, stop) in enumerate(pairwise(bounds))
            if start >= stop
        ]
        if bounds[0] != 0 or bounds[-1] != len(self.steps):
            faults.append(f"bounds {tuple(bounds)} must go from 0 to the {len(self.steps)} steps there are")
        faults += [
            f"nothing can be cut before {self.steps[cut].module!r}: {bar.reason}"
            for cut in bounds[1:-1]
            for bar in self.bars
            if 0 < cut < len(self.steps) and bar.after <= cut <= bar.until
        ]
        if faults:
            raise ValueError("; ".join(faults))

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Values made before step ``cut`` that it or a later one uses."""
        found = {
            arrival.value
            for step in self.steps[cut:]
            for arrival in step.arrivals
            if self.values[arrival.value].step < cut
        }
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of the arguments of a step."""

    module: str
    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one stage to another.

    Attributes:
        source: The stage that makes it.
        target: The stage that uses it.
        taken: Where the source finds it: an argument of the first later step that is not its own.
        places: Where the target needs it.
        differentiable: Whether a gradient comes back.
        value: Which it is in the flow.
    """

    source: int
    target: int
    taken: Place
    places: tuple[Place, ...]
    differentiable: bool
    value: int


def transfers(flow: Flow, bounds: Sequence[int]) -> tuple[Transfer, ...]:
    """What goes between stages; each value once to each stage that uses it, directly.

    Args:
        flow: The flow.
        bounds: First step of each stage, and the number of steps.

    Raises:
        ValueError: The steps cannot be cut there.
    """
    flow.check(bounds)
    stage_of = [stage for stage, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
    taken: dict[int, Place] = {}
    places: dict[tuple[int, int], list[Place]] = {}
    for stage, step in zip(stage_of, flow.steps, strict=True):
        for arrival in step.arrivals:
            if stage_of[max(flow.values[arrival.value].step, 0)] == stage:
                continue
            place = Place(step.module, step.call, arrival.leaf)
            taken.setdefault(arrival.value, place)
            places.setdefault((arrival.value, stage), []).append(place)
    return tuple(
        Transfer(
            stage_of[max(flow.values[value].step, 0)],
            target,
            taken[value],
            tuple(found),
            flow.values[value].differentiable,
            value,
        )
        for (value, target), found in sorted(places.items(), key=lambda item: (item[0][1], item[0][0]))
    )
