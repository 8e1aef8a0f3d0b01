"""Pipeline schedules as values: the simulator prices them, the runtime executes them.

The order of the actions on each rank is made in :mod:`osdp.plan.schedules`; this module checks schedules and
makes them by name. ``1f1b`` on 3 ranks with 4 microbatches, one forward (F) or backward (B) per word, written
``<stage>.<microbatch>``::

    rank 0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    rank 1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    rank 2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from osdp.plan.schedules import SCHEDULE_KINDS, Action, ActionKind, Size

__all__ = [
    "AHEAD",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Schedule",
    "default_stages_per_rank",
    "generation_schedule",
    "make_schedule",
    "split_backward_refused",
]

#: The names that :func:`make_schedule` accepts.
SCHEDULES: tuple[str, ...] = tuple(SCHEDULE_KINDS)

#: Number of actions after the current one whose receives a rank has posted already.
AHEAD = 2

#: A result that other actions wait for: (whether it is an output, else an input gradient; stage; microbatch).
_Result = tuple[bool, int, int]


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule: the actions of each rank, in order.

    Attributes:
        name: The name it was made by.
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        placement: The rank of each stage, in model order.
        orders: The actions of each rank, in order.
        num_slices: Token slices of each sequence, which go through the stages one after the other (TeraPipe,
            Li et al., ICML 2021; in the order of ``1f1b``, Seq1F1B, Sun et al., 2024). On a stage, a slice's
            forward runs after that of the slice before it, its backward after that of the slice after it.

    Raises:
        ValueError: An action is missing, duplicated or on another rank than its stage, or ranks would
            deadlock; all faults are listed.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    num_slices: int = 1

    def __post_init__(self) -> None:
        faults = [*self._wrong_sizes()] or [*self._wrong_actions()] or self._execution[1]
        if faults:
            lines = "\n".join(f"  - {fault}" for fault in faults)
            raise ValueError(f"schedule {self.name!r} cannot be executed:\n{lines}")

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders)
        )

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.placement)

    @property
    def num_units(self) -> int:
        """Number of items that go through the stages: token slices of microbatches, or whole microbatches."""
        return self.num_microbatches * self.num_slices

    @property
    def trains(self) -> bool:
        """Whether it has backwards."""
        return any(action.kind is not ActionKind.FORWARD for order in self.orders for action in order)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input gradient and weight gradient."""
        return any(action.kind is ActionKind.BACKWARD_INPUT for order in self.orders for action in order)

    @property
    def sequence(self) -> tuple[Action, ...]:
        """All actions in an order in which a single process can execute them."""
        return self._execution[0]

    @cached_property
    def places(self) -> dict[tuple[bool, int, int], int]:
        """Where in its rank's order an action is, by whether it is a forward, stage and microbatch.

        Of a backward in two parts the first counts: it takes and sends what goes to other stages.
        """
        return {
            (action.kind is ActionKind.FORWARD, action.stage, action.microbatch): place
            for order in self.orders
            for place, action in enumerate(order)
            if action.kind is not ActionKind.BACKWARD_WEIGHT
        }

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def in_flight(self, stage: int, *, until_weights: bool = False) -> int:
        """Maximum number of microbatches (or token slices) in flight on a stage: forward done, backward not.

        Args:
            stage: The stage.
            until_weights: Whether a split backward ends with its second part, the gradient of the weights,
                instead of its first, the gradient of the input.

        Returns:
            Their number; 1 without backwards, where no activations are kept.
        """
        last = ActionKind.BACKWARD_WEIGHT if until_weights else ActionKind.BACKWARD_INPUT
        ends = (ActionKind.BACKWARD, last) if self.trains else ()
        count = most = 0
        for action in self.orders[self.placement[stage]]:
            if action.stage == stage and action.kind is ActionKind.FORWARD:
                count = count + 1 if ends else 1
                most = max(most, count)
            elif action.stage == stage and action.kind in ends:
                count -= 1
        return most

    def forward_only(self) -> "Schedule":
        """The same stages and order without backwards, for evaluation and inference."""
        orders = tuple(tuple(a for a in order if a.kind is ActionKind.FORWARD) for order in self.orders)
        return replace(self, name=f"{self.name} forward", orders=orders)

    def _wrong_sizes(self) -> Iterator[str]:
        if min(self.num_ranks, self.num_microbatches, self.num_stages, self.num_slices) < 1:
            yield (
                f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches and "
                f"{self.num_slices} token slices: at least one of each is needed"
            )
        if len(self.orders) != self.num_ranks:
            yield f"{self.num_ranks} ranks have {len(self.orders)} orders; each rank needs exactly one"
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                yield f"stage {stage} is on rank {rank}; there are ranks 0 to {self.num_ranks - 1}"

    def _wrong_actions(self) -> Iterator[str]:
        known: dict[tuple[int, int], list[ActionKind]] = {
            (stage, microbatch): []
            for stage in range(self.num_stages)
            for microbatch in range(self.num_units)
        }
        for rank, order in enumerate(self.orders):
            for action in order:
                kinds = known.get((action.stage, action.microbatch))
                if kinds is None:
                    yield (
                        f"{action} is out of range: there are {self.num_stages} stages and {self.num_units} "
                        "microbatches"
                    )
                elif self.placement[action.stage] != rank:
                    yield f"{action} is on rank {rank}, its stage on rank {self.placement[action.stage]}"
                else:
                    kinds.append(action.kind)
        wanted = [["F", "B"], ["F", "I", "W"]] if self.trains else [["F"]]
        for (stage, microbatch), kinds in known.items():
            if sorted(kinds, key="FBIW".index) not in wanted:
                yield (
                    f"stage {stage} has {' '.join(kinds) or 'nothing'} for microbatch {microbatch}; "
                    f"it needs {' or '.join(' '.join(way) for way in wanted)}"
                )

    @cached_property
    def _execution(self) -> tuple[tuple[Action, ...], list[str]]:
        """Actions in an order in which they can run, and what deadlocked ranks wait for.

        Each rank runs its actions until one misses a result; it is woken when that result is there.
        """
        done: set[_Result] = set()
        sequence: list[Action] = []
        position = [0] * self.num_ranks
        waiting: dict[_Result, list[int]] = {}
        ready = deque(range(self.num_ranks))
        while ready:
            rank = ready.popleft()
            order = self.orders[rank]
            while position[rank] < len(order):
                action = order[position[rank]]
                wanted = _needs(action, self.num_stages, self.num_slices)
                missing = [result for result in wanted if result not in done]
                if missing:
                    waiting.setdefault(missing[0], []).append(rank)
                    break
                sequence.append(action)
                position[rank] += 1
                if action.kind is not ActionKind.BACKWARD_WEIGHT:  # no action waits for weight gradients
                    result = (action.kind is ActionKind.FORWARD, action.stage, action.microbatch)
                    done.add(result)
                    ready.extend(waiting.pop(result, ()))
        faults = [
            f"rank {rank} waits forever at {self.orders[rank][position[rank]]} for the "
            f"{'output' if forward else 'input gradient'} of stage {stage} on microbatch {microbatch}"
            for (forward, stage, microbatch), ranks in waiting.items()
            for rank in ranks
        ]
        return tuple(sequence), faults


def _needs(action: Action, num_stages: int, num_slices: int) -> list[_Result]:
    """Results that must exist before an action can start."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        context = [(True, stage, microbatch - 1)] if microbatch % num_slices else []
        return [(True, stage - 1, microbatch), *context] if stage else context
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [(False, stage, microbatch)]
    after = [(False, stage + 1, microbatch)] if stage + 1 < num_stages else []
    behind = [(False, stage, microbatch + 1)] if (microbatch + 1) % num_slices else []
    return [(True, stage, microbatch), *after, *behind]


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int | None = None,
    num_slices: int = 1,
) -> Schedule:
    """Make a pipeline schedule by its name.

    Args:
        name: One of :data:`SCHEDULES`.
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Microbatches of a step, any number from 1.
        stages_per_rank: Stages on each rank; by default the schedule's usual number.
        num_slices: Token slices of each sequence, any number from 1.

    Raises:
        ValueError: The name is unknown, a number is not positive, or the schedule does not support this
            number of stages per rank or token slices.

    >>> print(make_schedule("1f1b", 2, 3))
    rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2

    The backwards of a sequence's slices run in reverse order:

    >>> print(make_schedule("1f1b", 2, 2, num_slices=2))
    rank 0: F0.0 F0.1 F0.2 B0.1 F0.3 B0.0 B0.3 B0.2
    rank 1: F1.0 F1.1 B1.1 F1.2 B1.0 F1.3 B1.3 B1.2
    """
    usual = default_stages_per_rank(name)
    kind = SCHEDULE_KINDS[name]
    per_rank = usual if stages_per_rank is None else stages_per_rank
    if min(num_ranks, num_microbatches, num_slices) < 1:
        raise ValueError(
            f"{num_ranks} ranks, {num_microbatches} microbatches and {num_slices} token slices: at least one "
            "of each is needed"
        )
    if num_slices > 1 and not kind.slices:
        able = " or ".join(repr(other) for other, known in SCHEDULE_KINDS.items() if known.slices)
        raise ValueError(
            f"schedule {name!r} does not support token slices ({num_slices} requested); plan with "
            f"schedule={able}, with one stage per rank"
        )
    if per_rank != usual and (not kind.more_stages or per_rank < usual):
        least = "at least " if kind.more_stages else ""
        able = ", ".join(
            f"{other!r} takes any number from {known.stages_per_rank}"
            for other, known in SCHEDULE_KINDS.items()
            if known.more_stages
        )
        raise ValueError(
            f"schedule {name!r} has {least}{usual} stage{'s' * (usual > 1)} per rank, not {per_rank}; {able}"
        )
    placement, orders = kind.build(Size(num_ranks, num_microbatches, per_rank, num_slices))
    return Schedule(
        name, num_ranks, num_microbatches, tuple(placement), tuple(map(tuple, orders)), num_slices
    )


def generation_schedule(placement: Sequence[int], num_groups: int, num_tokens: int) -> Schedule:
    """Make the forward-only schedule of token generation: one token of each group of prompts in turn.

    Tokens of a group are scheduled like the token slices of a sequence.

    >>> print(generation_schedule((0, 1), 2, 3))
    rank 0: F0.0 F0.3 F0.1 F0.4 F0.2 F0.5
    rank 1: F1.0 F1.3 F1.1 F1.4 F1.2 F1.5
    """
    num_ranks = max(placement) + 1
    orders = tuple(
        tuple(
            Action(ActionKind.FORWARD, stage, group * num_tokens + token)
            for token in range(num_tokens)
            for group in range(num_groups)
            for stage, holder in enumerate(placement)
            if holder == rank
        )
        for rank in range(num_ranks)
    )
    return Schedule("generation", num_ranks, num_groups, tuple(placement), orders, num_tokens)


def default_stages_per_rank(name: str) -> int:
    """Default number of stages per rank of a schedule.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in SCHEDULE_KINDS:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULE_KINDS[name].stages_per_rank


def split_backward_refused(name: str, dp: int, tp: int) -> ValueError:
    """The error for a schedule with split backwards that cannot be used with ``dp`` and ``tp``."""
    return ValueError(
        f"schedule {name!r} computes weight gradients in a separate pass, where they cannot be reduced: it "
        f"needs dp=1 (here {dp}), tp=1 (here {tp}) and no param_dtype or reduce_dtype; use '1f1b' or "
        "'interleaved'"
    )
