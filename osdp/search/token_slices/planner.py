"""Joint search for microbatches, token slices, stages and schedule of a pipeline on long sequences.

Decision space: microbatches of equally many sequences; one slicing for all of them, on the grid of the
tables; the stages and schedules that the caller lists. For each number of microbatches
:mod:`osdp.search.token_slices.slices` finds the slices with the minimum lower bound of a step. They are
simulated in the order of that bound, until no remaining one can beat the best simulated. The search proves
the bound, so the gap of the answer is the difference between its simulated time and the bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from osdp.cost.token_slices.step import SliceTables, StepBound, simulate_slices, step_bound
from osdp.plan.schedule import Schedule, make_schedule
from osdp.plan.schedules import SCHEDULE_KINDS
from osdp.plan.shard_math import slice_bounds
from osdp.plan.token_slices import TokenSlices
from osdp.search.token_slices.slices import slice_grid

#: Maximum number of slicings simulated per number of microbatches, and of actions after which none is added.
_MOST_SIMULATED, _MOST_ACTIONS = 12, 8_000


@dataclass(frozen=True)
class TokenSliceProblem:
    """Equal stages, and the sequences that pass through them.

    Attributes:
        tables: Costs of slices, by number of sequences of a microbatch; other numbers are not considered.
        batch: Sequences of a step, of one pipeline.
        num_stages: Number of stages, one per rank.
        schedule: A schedule that supports token slices.
        end_seconds: After the last slice: reductions of gradients and the optimizer.
        memory_limit: Bytes of activations that a rank may keep; ``None`` for no limit.
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
        if self.schedule not in SCHEDULE_KINDS or not SCHEDULE_KINDS[self.schedule].slices:
            able = ", ".join(name for name, kind in SCHEDULE_KINDS.items() if kind.slices)
            raise ValueError(f"schedule {self.schedule!r} cannot run on slices of sequences; use {able}")
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
        """Lower bound of a step of ``parts`` microbatches, without the seconds at its end."""
        return step_bound(
            self.tables[self.batch // parts],
            num_stages=self.num_stages,
            num_microbatches=parts,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Microbatches, slices, stages and schedule of a step, with its simulated time and memory.

    Attributes:
        schedule: The schedule.
        num_stages: Stages.
        num_microbatches: Microbatches.
        slices: Slices of each sequence.
        seconds: Simulated time of the step.
        activation_bytes: Peak activation bytes of any rank.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    slices: TokenSlices
    seconds: float
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """Result of the search for one problem.

    Attributes:
        best: The fastest choice that was simulated.
        uniform: The fastest simulated choice with slices of equal length, up to rounding.
        whole: The fastest choice without slices; ``None`` if whole sequences are not allowed.
        bound: Lower bound of the seconds of any choice.
        num_paths: Number of shortest paths computed.
    """

    best: TokenChoice
    uniform: TokenChoice | None
    whole: TokenChoice | None
    bound: float
    num_paths: int

    @property
    def gap(self) -> float:
        """Upper bound of the relative time by which the answer may be slower than the optimum."""
        return max(0.0, 1 - self.bound / self.best.seconds) if self.best.seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    value: float
    num_microbatches: int
    slices: TokenSlices


class InfeasibleSlicesError(ValueError):
    """No slices keep the limit of activation memory.

    Attributes:
        limit: Bytes of activations that a rank may keep.
        least: The minimum over all simulated choices.
    """

    def __init__(self, limit: int, least: int) -> None:
        self.limit, self.least = limit, least
        super().__init__(
            f"no slices keep the limit of {limit} bytes of activations: the minimum found is {least} bytes, "
            f"{least - limit} too many. The schedule '1f1b', smaller microbatches, more stages or "
            "recomputation need fewer"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.limit, self.least)


def solve_tokens(problem: TokenSliceProblem) -> TokenOutcome:
    """The fastest microbatches and slices for given stages and schedule.

    Raises:
        InfeasibleSlicesError: Nothing keeps the memory limit.
        ValueError: No slices are allowed by the tables.
    """
    simulator = _Simulator(problem)
    num_paths, bounds = 0, []
    best: TokenChoice | None = None
    # Most microbatches first: with many of them slices gain little, and the proof is short.
    for parts in reversed(problem.parts):
        tables = problem.tables[problem.batch // parts]
        upper = best.seconds - problem.end_seconds if best else math.inf
        least = problem.bound(parts)
        # Only slices whose bound beats the best simulated step so far can be better.
        found = slice_grid(least.weights, least.times, least.bottleneck, upper=upper)
        num_paths += found.num_paths
        bounds.append(found.bound)
        candidates = [_Candidate(path.value, parts, tables.slices(path.bounds)) for path in found.paths]
        best = simulator.fastest(candidates, best)
    # Equal slices and whole sequences are compared, too: the bound alone does not order simulated steps.
    uniform = simulator.fastest([c for parts in problem.parts for c in _uniform(problem, parts)])
    whole = simulator.fastest([c for parts in problem.parts for c in _uniform(problem, parts, 1)])
    choices = [choice for choice in (best, uniform, whole) if choice is not None]
    if not choices:
        raise InfeasibleSlicesError(problem.memory_limit or 0, simulator.least_bytes)
    fastest = min(choices, key=lambda choice: choice.seconds)
    bound = min(min(bounds) + problem.end_seconds, fastest.seconds)
    return TokenOutcome(fastest, uniform, whole, bound, num_paths)


def solve_jointly(problems: Sequence[TokenSliceProblem]) -> tuple[TokenOutcome, ...]:
    """The outcome of each problem, fastest first; stages and schedules are chosen by listing problems.

    Problems that cannot keep their memory limit are left out.

    Raises:
        InfeasibleSlicesError: No problem can keep its limit; reports the one that comes closest.
        ValueError: There is no problem, or one of them allows no slices.
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


class _Simulator:
    """Simulates candidates in the order of their bounds, until no other can be faster."""

    def __init__(self, problem: TokenSliceProblem) -> None:
        self._problem = problem
        self._known: dict[_Candidate, TokenChoice] = {}
        self._schedules: dict[tuple[int, int], Schedule] = {}
        #: Minimum bytes of activations of any candidate so far.
        self.least_bytes = 2**63

    def fastest(
        self, candidates: Sequence[_Candidate], best: TokenChoice | None = None
    ) -> TokenChoice | None:
        """The fastest of the candidates and ``best`` that keeps the limit; ``None`` if none does."""
        limit = self._problem.memory_limit
        simulated = actions = 0
        for candidate in sorted(candidates, key=lambda candidate: candidate.value):
            if best is not None and (
                candidate.value + self._problem.end_seconds >= best.seconds
                or simulated >= _MOST_SIMULATED
                or actions >= _MOST_ACTIONS
            ):
                break
            choice = self._simulate(candidate)
            simulated += 1
            actions += 2 * choice.num_stages * choice.num_microbatches * choice.slices.num_slices
            if limit is not None and choice.activation_bytes > limit:
                continue
            if best is None or choice.seconds < best.seconds:
                best = choice
        return best

    def _simulate(self, candidate: _Candidate) -> TokenChoice:
        # The same slices may come with several bounds.
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


def _uniform(problem: TokenSliceProblem, parts: int, most: int | None = None) -> list[_Candidate]:
    """Candidates with equal slices (up to rounding), for each number up to ``most`` that the tables allow."""
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
