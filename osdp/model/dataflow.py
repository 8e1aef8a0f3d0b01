"""Flow: the dataflow of one forward between its modules, from which pipeline stages are cut.

A *step* is one call of a module that is kept or removed as a whole; the code between two steps belongs to the
modules around them, and every stage runs it for itself. A *value* is a tensor that a step computed, or that
was computed from such a tensor or from parameters: it exists only in its stage, or where it was sent to.
Everything else (masks, positions) is computed by each stage again.

Cutting before step ``c`` gives the steps from ``c`` on, and the code between them, to a later stage::

    steps    0   1   2   3   4   5
    bounds  (0,      2,          5 + 1)
             stage 0 |  stage 1          values of steps 0 and 1 that a later step reads are sent
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from osdp.model.description import DTYPE_BYTES, Affine


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that steps use and that not every stage can compute for itself.

    Attributes:
        step: Index of the step in which, or after which, it is computed; -1 before the first step.
        dtype: Its dtype.
        numel: Number of its elements, by local batch.
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
class StepInput:
    """A value among the arguments of a step.

    Attributes:
        value: Index of the value.
        leaf: Its index among the pytree leaves of the step's arguments.
    """

    value: int
    leaf: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        module: Its FQN.
        call: Index of the call of this module, from 0.
        arrivals: The values among its arguments.
    """

    module: str
    call: int
    arrivals: tuple[StepInput, ...]


@dataclass(frozen=True, slots=True)
class CutBarrier:
    """A range of steps before which the model cannot be cut.

    Attributes:
        after: The first step of the range.
        until: The last step of the range.
        reason: Why these cuts are not possible.
    """

    after: int
    until: int
    reason: str


_NONE = Affine(0.0, 0.0)


@dataclass(frozen=True)
class Dataflow:
    """The steps of a forward and the values between them.

    Attributes:
        steps: All steps, in order.
        values: All values.
        bars: Cuts that are not possible.
        idle: FQNs of modules that are kept or removed as a whole and were not called.
        loose: Parameters that the code around the steps uses, each with the step that precedes the first use
            (-1: none).
        remade: Bytes of the tensors that every stage computes for its steps itself, such as masks, by local
            batch.
    """

    steps: tuple[ModuleCall, ...]
    values: tuple[Value, ...]
    bars: tuple[CutBarrier, ...] = ()
    idle: tuple[str, ...] = ()
    loose: tuple[tuple[str, int], ...] = ()
    remade: Affine = _NONE

    @property
    def cuts(self) -> tuple[int, ...]:
        """Steps before which the model can be cut: where any stage but the first can begin."""
        return tuple(
            cut
            for cut in range(1, len(self.steps))
            if not any(bar.after <= cut <= bar.until for bar in self.bars)
        )

    def check(self, bounds: Sequence[int]) -> None:
        """Check that the steps can be cut at ``bounds``.

        Args:
            bounds: First step of each stage, and the number of steps.

        Raises:
            ValueError: A stage is empty, or a cut is not possible; the message gives the reason.
        """
        faults = [
            f"stage {index} would have no step: bounds {tuple(bounds)} must be strictly increasing"
            for index, (start, stop) in enumerate(pairwise(bounds))
            if start >= stop
        ]
        if bounds[0] != 0 or bounds[-1] != len(self.steps):
            faults.append(f"bounds {tuple(bounds)} must go from 0 to the number of steps, {len(self.steps)}")
        faults += [
            f"the model cannot be cut before {self.steps[cut].module!r}: {bar.reason}"
            for cut in bounds[1:-1]
            for bar in self.bars
            if 0 < cut < len(self.steps) and bar.after <= cut <= bar.until
        ]
        if faults:
            raise ValueError("; ".join(faults))

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Values computed before step ``cut`` that it or a later step uses: what a cut there sends."""
        found = {
            arrival.value
            for step in self.steps[cut:]
            for arrival in step.arrivals
            if self.values[arrival.value].step < cut
        }
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """A pytree leaf of the arguments of a step."""

    module: str
    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that one stage sends to another.

    Attributes:
        source: The stage that computes it.
        target: The stage that uses it.
        taken: Where the source finds it: an argument of the first later step that is in another stage.
        places: Where the target needs it.
        differentiable: Whether a gradient is sent back.
        value: Index of the value in the flow.
    """

    source: int
    target: int
    taken: ArgumentSlot
    places: tuple[ArgumentSlot, ...]
    differentiable: bool
    value: int


def transfers(flow: Dataflow, bounds: Sequence[int]) -> tuple[Transfer, ...]:
    """Values sent between stages: each one once, directly to each stage that uses it.

    Args:
        flow: The flow.
        bounds: First step of each stage, and the number of steps.

    Raises:
        ValueError: The steps cannot be cut there.
    """
    flow.check(bounds)
    # 1. The stage of each step: (num_steps,).
    stage_of = [stage for stage, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
    # 2. Arguments that another stage computed. A value from before the first step (-1) belongs to stage 0.
    taken: dict[int, ArgumentSlot] = {}
    places: dict[tuple[int, int], list[ArgumentSlot]] = {}
    for stage, step in zip(stage_of, flow.steps, strict=True):
        for arrival in step.arrivals:
            if stage_of[max(flow.values[arrival.value].step, 0)] == stage:
                continue
            place = ArgumentSlot(step.module, step.call, arrival.leaf)
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
