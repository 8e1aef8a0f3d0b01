"""Pipeline schedules as values: the cost model prices them, the runtime executes them.

What each rank does is in :mod:`osdp.orders`; here it is checked and made by name. ``1f1b`` on 3 ranks with 4
microbatches, written down::

    rank 0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    rank 1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    rank 2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from osdp.orders import RECIPES, Action, Kind, Size

__all__ = [
    "AHEAD",
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "default_stages_per_rank",
    "generation_schedule",
    "make_schedule",
    "split_backward_refused",
]

#: The names that :func:`make_schedule` knows.
SCHEDULES: tuple[str, ...] = tuple(RECIPES)

#: Actions after the current one whose messages a rank has posted for already.
AHEAD = 2

#: What other actions wait for: an output (True) or an input gradient (False), of a stage, of a microbatch.
_Result = tuple[bool, int, int]


@dataclass(frozen=True)
class Schedule:
    """What each rank does, and in which order.

    Attributes:
        name: How it was made.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        placement: The rank of each stage, in the order of the model.
        orders: The actions of each rank.
        num_slices: Slices of each sequence, which go through the stages one after the other (TeraPipe, Li et
            al., ICML 2021; in the order of ``1f1b``, Seq1F1B, Sun et al., 2024). A slice goes forward on a
            stage after the one before it, and backward after the one behind it.

    Raises:
        ValueError: An action is missing, twice or on another rank than its stage, or ranks would wait for
            each other forever; all faults are listed.
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
        """Stages of the model."""
        return len(self.placement)

    @property
    def num_units(self) -> int:
        """What goes through the stages one after the other: slices of microbatches, or whole ones."""
        return self.num_microbatches * self.num_slices

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(action.kind is not Kind.FORWARD for order in self.orders for action in order)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward runs in two parts."""
        return any(action.kind is Kind.BACKWARD_INPUT for order in self.orders for action in order)

    @property
    def sequence(self) -> tuple[Action, ...]:
        """All actions in an order in which a single process can execute them."""
        return self._execution[0]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def in_flight(self, stage: int, *, until_weights: bool = False) -> int:
        """Most microbatches, or slices of such, at a time between forward and backward on a stage.

        Args:
            stage: The stage.
            until_weights: Whether a backward in two parts ends with its second, the gradient of the weights,
                instead of its first.

        Returns:
            Their number; 1 without backwards, where nothing is kept.
        """
        last = Kind.BACKWARD_WEIGHT if until_weights else Kind.BACKWARD_INPUT
        ends = (Kind.BACKWARD, last) if self.trains else ()
        count = most = 0
        for action in self.orders[self.placement[stage]]:
            if action.stage == stage and action.kind is Kind.FORWARD:
                count = count + 1 if ends else 1
                most = max(most, count)
            elif action.stage == stage and action.kind in ends:
                count -= 1
        return most

    def forward_only(self) -> "Schedule":
        """The same stages and order without backwards, for evaluation and inference."""
        orders = tuple(tuple(a for a in order if a.kind is Kind.FORWARD) for order in self.orders)
        return replace(self, name=f"{self.name} forward", orders=orders)

    def _wrong_sizes(self) -> Iterator[str]:
        if min(self.num_ranks, self.num_microbatches, self.num_stages, self.num_slices) < 1:
            yield (
                f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches and "
                f"{self.num_slices} token slices: at least one of each is needed"
            )
        if len(self.orders) != self.num_ranks:
            yield f"{self.num_ranks} ranks have {len(self.orders)} orders; one each is needed"
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                yield f"stage {stage} is on rank {rank}; there are ranks 0 to {self.num_ranks - 1}"

    def _wrong_actions(self) -> Iterator[str]:
        known: dict[tuple[int, int], list[Kind]] = {
            (stage, microbatch): []
            for stage in range(self.num_stages)
            for microbatch in range(self.num_units)
        }
        for rank, order in enumerate(self.orders):
            for action in order:
                kinds = known.get((action.stage, action.microbatch))
                if kinds is None:
                    yield f"{action} is beyond {self.num_stages} stages, {self.num_units} microbatches"
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
        """Actions in the order in which they can run, and what the ranks that get stuck wait for."""
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
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    result = (action.kind is Kind.FORWARD, action.stage, action.microbatch)
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
    """What must be there before an action can start."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        context = [(True, stage, microbatch - 1)] if microbatch % num_slices else []
        return [(True, stage - 1, microbatch), *context] if stage else context
    if action.kind is Kind.BACKWARD_WEIGHT:
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
    """A schedule by its name.

    Args:
        name: One of :data:`SCHEDULES`.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step, any number from 1.
        stages_per_rank: Stages that each rank holds; by default what the schedule is made for.
        num_slices: Slices of each sequence, any number from 1.

    Raises:
        ValueError: The name is unknown, a number is not positive, or the schedule has no such form.

    >>> print(make_schedule("1f1b", 2, 3))
    rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2

    Slices go backward against their order:

    >>> print(make_schedule("1f1b", 2, 2, num_slices=2))
    rank 0: F0.0 F0.1 F0.2 B0.1 F0.3 B0.0 B0.3 B0.2
    rank 1: F1.0 F1.1 B1.1 F1.2 B1.0 F1.3 B1.3 B1.2
    """
    usual = default_stages_per_rank(name)
    per_rank = usual if stages_per_rank is None else stages_per_rank
    if min(num_ranks, num_microbatches, num_slices) < 1:
        raise ValueError(
            f"{num_ranks} ranks, {num_microbatches} microbatches and {num_slices} token slices: at least one "
            "of each is needed"
        )
    if num_slices > 1 and not RECIPES[name].slices:
        able = " or ".join(repr(other) for other, recipe in RECIPES.items() if recipe.slices)
        raise ValueError(
            f"schedule {name!r} takes sequences whole; for token slices plan with schedule={able}, with "
            "one stage per rank"
        )
    if per_rank != usual and (name != "interleaved" or per_rank < usual):
        least = "at least " if name == "interleaved" else ""
        raise ValueError(
            f"schedule {name!r} has {least}{usual} stage{'s' * (usual > 1)} per rank, not {per_rank}; "
            "'interleaved' takes any number from 2"
        )
    placement, orders = RECIPES[name].build(Size(num_ranks, num_microbatches, per_rank, num_slices))
    return Schedule(
        name, num_ranks, num_microbatches, tuple(placement), tuple(map(tuple, orders)), num_slices
    )


def generation_schedule(placement: Sequence[int], num_groups: int, num_tokens: int) -> Schedule:
    """Forwards of generation: groups of prompts in turn, a token of each after the other.

    A token is to its group what a slice is to a sequence.

    >>> print(generation_schedule((0, 1), 2, 3))
    rank 0: F0.0 F0.3 F0.1 F0.4 F0.2 F0.5
    rank 1: F1.0 F1.3 F1.1 F1.4 F1.2 F1.5
    """
    num_ranks = max(placement) + 1
    orders = tuple(
        tuple(
            Action(Kind.FORWARD, stage, group * num_tokens + token)
            for token in range(num_tokens)
            for group in range(num_groups)
            for stage, holder in enumerate(placement)
            if holder == rank
        )
        for rank in range(num_ranks)
    )
    return Schedule("generation", num_ranks, num_groups, tuple(placement), orders, num_tokens)


def default_stages_per_rank(name: str) -> int:
    """How many stages each rank holds unless something else is asked for.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return RECIPES[name].stages_per_rank


def split_backward_refused(name: str, dp: int, tp: int) -> ValueError:
    """Why a schedule whose backwards run in two parts cannot be used with ``dp`` and ``tp``."""
    return ValueError(
        f"schedule {name!r} computes gradients of weights apart, where nothing can reduce them: it needs "
        f"dp=1 (here {dp}), tp=1 (here {tp}) and no param_dtype or reduce_dtype; use '1f1b' or 'interleaved'"
    )
