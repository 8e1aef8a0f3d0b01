"""How a pipeline works on long sequences: microbatches, slices, stages and schedule, together.

Decision space: microbatches of equally many sequences; one slicing for all of them, on the grid of the
tables; the stages and schedules that the caller lists. For each number of microbatches
:mod:`osdp.search.token_slices` finds the slices with the least lower bound of a step. The simulated schedule
judges them in the order of that bound, until none that is left can beat the best judged. What the search
proves is the bound, so the gap between the two is that of the answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from osdp.cost.token_pipeline import SliceTables, StepBound, simulate_slices, step_bound
from osdp.layout import slice_bounds
from osdp.orders import RECIPES
from osdp.schedule import Schedule, make_schedule
from osdp.search.token_slices import slice_grid
from osdp.token_slices import TokenSlices

#: Slicings that are judged at most for each number of microbatches, and the actions after which no more are.
_JUDGED, _JUDGED_ACTIONS = 12, 8_000


@dataclass(frozen=True)
class TokenProblem:
    """Equal stages and the sequences that go through them.

    Attributes:
        tables: Costs of slices, by the sequences of a microbatch; what is not there is not considered.
        batch: Sequences of a step, of one pipeline.
        num_stages: Stages, one to a rank.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        end_seconds: After the last slice: reductions of gradients and the optimizer.
        memory_limit: Bytes of activations that a rank may keep; ``None`` is any number.
    """

    tables: Mapping[int, SliceTables]
    batch: int
    num_stages: int
    schedule: str = "gpipe"
    end_seconds: float = 0.0
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.end_seconds < 0:
            raise ValueError(
                f"{self.num_stages} stages and {self.end_seconds} s at the end; at least 1 and 0 are needed"
            )
        if self.schedule not in RECIPES or not RECIPES[self.schedule].slices:
            able = ", ".join(name for name, recipe in RECIPES.items() if recipe.slices)
            raise ValueError(f"schedule {self.schedule!r} takes sequences whole; slices go with {able}")
        if not self.parts:
            raise ValueError(
                f"a batch of {self.batch} sequences cannot be cut into microbatches of "
                f"{', '.join(map(str, sorted(self.tables))) or 'nothing'}; give tables for a divisor of it"
            )

    @property
    def parts(self) -> tuple[int, ...]:
        """Possible numbers of microbatches, ascending."""
        return tuple(sorted(self.batch // size for size in self.tables if self.batch % size == 0))

    def bound(self, parts: int) -> StepBound:
        """The lower bound of a step of so many microbatches, without its end."""
        return step_bound(
            self.tables[self.batch // parts],
            num_stages=self.num_stages,
            num_microbatches=parts,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One way to do a step.

    Attributes:
        schedule: The schedule.
        num_stages: Stages.
        num_microbatches: Microbatches.
        slices: Slices of each sequence.
        seconds: Of the step, simulated.
        activation_bytes: Most activations that a rank keeps.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    slices: TokenSlices
    seconds: float
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """What the search found for one problem.

    Attributes:
        best: The fastest way that was judged.
        uniform: The fastest of those judged with slices as equal as can be.
        whole: The fastest without slices; ``None`` if whole sequences are not allowed.
        bound: No way takes less.
        num_paths: Shortest paths that it took.
    """

    best: TokenChoice
    uniform: TokenChoice | None
    whole: TokenChoice | None
    bound: float
    num_paths: int

    @property
    def gap(self) -> float:
        """By how much of its time the answer may be too slow at most."""
        return max(0.0, 1 - self.bound / self.best.seconds) if self.best.seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    value: float
    num_microbatches: int
    slices: TokenSlices


class InfeasibleSlicesError(ValueError):
    """No slices keep the limit of activations.

    Attributes:
        limit: Bytes of activations that a rank may keep.
        least: The fewest that any judged way keeps.
    """

    def __init__(self, limit: int, least: int) -> None:
        self.limit, self.least = limit, least
        super().__init__(
            f"no slices keep {limit} bytes of activations: the fewest found are {least} bytes, "
            f"{least - limit} too much. The schedule '1f1b', smaller microbatches, more stages or "
            "recomputation need fewer"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.limit, self.least)


def solve_tokens(problem: TokenProblem) -> TokenOutcome:
    """The fastest microbatches and slices for given stages and schedule.

    Raises:
        InfeasibleSlicesError: Nothing keeps the memory limit.
        ValueError: No slices are allowed by the tables.
    """
    judge = _Judge(problem)
    num_paths, bounds = 0, []
    best: TokenChoice | None = None
    # Most microbatches first: where they are many, slices have little to win, and the proof is short.
    for parts in reversed(problem.parts):
        tables = problem.tables[problem.batch // parts]
        upper = best.seconds - problem.end_seconds if best else math.inf
        least = problem.bound(parts)
        found = slice_grid(least.weights, least.times, least.bottleneck, upper=upper)
        num_paths += found.num_paths
        bounds.append(found.bound)
        candidates = [_Candidate(path.value, parts, tables.slices(path.bounds)) for path in found.paths]
        best = judge.fastest(candidates, best)
    uniform = judge.fastest([c for parts in problem.parts for c in _uniform(problem, parts)])
    whole = judge.fastest([c for parts in problem.parts for c in _uniform(problem, parts, 1)])
    choices = [choice for choice in (best, uniform, whole) if choice is not None]
    if not choices:
        raise InfeasibleSlicesError(problem.memory_limit or 0, judge.least_bytes)
    fastest = min(choices, key=lambda choice: choice.seconds)
    bound = min(min(bounds) + problem.end_seconds, fastest.seconds)
    return TokenOutcome(fastest, uniform, whole, bound, num_paths)


def solve_jointly(problems: Sequence[TokenProblem]) -> tuple[TokenOutcome, ...]:
    """The outcome of each problem, fastest first: stages and schedules are chosen by listing them.

    Problems that cannot keep their memory limit are left out.

    Raises:
        InfeasibleSlicesError: No problem can; the one that needs least says so.
        ValueError: There is none, or one has no slices.
    """
    outcomes, failures = [], []
    for problem in problems:
        try:
            outcomes.append(solve_tokens(problem))
        except InfeasibleSlicesError as error:
            failures.append(error)
    if not outcomes:
        if failures:
            raise min(failures, key=lambda error: error.least - error.limit)
        raise ValueError("no stages and schedules to choose from; list at least one problem")
    return tuple(sorted(outcomes, key=lambda outcome: outcome.best.seconds))


class _Judge:
    """Simulates candidates, best bound first, until no other can be faster."""

    def __init__(self, problem: TokenProblem) -> None:
        self._problem = problem
        self._known: dict[_Candidate, TokenChoice] = {}
        self._schedules: dict[tuple[int, int], Schedule] = {}
        #: The fewest bytes of activations of any candidate so far.
        self.least_bytes = 2**63

    def fastest(
        self, candidates: Sequence[_Candidate], best: TokenChoice | None = None
    ) -> TokenChoice | None:
        """The fastest of the candidates and ``best`` that keeps the limit; ``None`` if none does."""
        limit = self._problem.memory_limit
        judged = actions = 0
        for candidate in sorted(candidates, key=lambda candidate: candidate.value):
            if best is not None and (
                candidate.value + self._problem.end_seconds >= best.seconds
                or judged >= _JUDGED
                or actions >= _JUDGED_ACTIONS
            ):
                break
            choice = self._judge(candidate)
            judged += 1
            actions += 2 * choice.num_stages * choice.num_microbatches * choice.slices.num_slices
            if limit is not None and choice.activation_bytes > limit:
                continue
            if best is None or choice.seconds < best.seconds:
                best = choice
        return best

    def _judge(self, candidate: _Candidate) -> TokenChoice:
        same = replace(candidate, value=0.0)
        if same not in self._known:
            problem = self._problem
            tables = problem.tables[problem.batch // candidate.num_microbatches]
            schedule = self._schedule(candidate.num_microbatches, candidate.slices.num_slices)
            outcome = simulate_slices(tables, candidate.slices, schedule)
            self._known[same] = TokenChoice(
                problem.schedule,
                problem.num_stages,
                candidate.num_microbatches,
                candidate.slices,
                outcome.seconds + problem.end_seconds,
                max(outcome.peak_activation_bytes),
            )
            self.least_bytes = min(self.least_bytes, self._known[same].activation_bytes)
        return self._known[same]

    def _schedule(self, num_microbatches: int, num_slices: int) -> Schedule:
        key = (num_microbatches, num_slices)
        if key not in self._schedules:
            self._schedules[key] = make_schedule(
                self._problem.schedule, self._problem.num_stages, num_microbatches, num_slices=num_slices
            )
        return self._schedules[key]


def _uniform(problem: TokenProblem, parts: int, most: int | None = None) -> list[_Candidate]:
    """Every number of slices as equal as can be, up to ``most``, that the tables allow."""
    tables = problem.tables[problem.batch // parts]
    least = problem.bound(parts)
    found = []
    steps = len(tables.points) - 1
    for num_slices in range(1, min(steps, most or steps) + 1):
        bounds = np.array([0, *(stop for _, stop in slice_bounds(steps, num_slices))])
        ends, begins = bounds[1:], bounds[:-1]
        largest = float(least.times[ends, begins].max())
        if math.isfinite(largest):
            value = float(least.weights[ends, begins].sum()) + least.bottleneck * largest
            found.append(_Candidate(value, parts, tables.slices(bounds.tolist())))
    return found
