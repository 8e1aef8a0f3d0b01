"""The chain search and the linear relaxation under it, against enumeration and against HiGHS."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from osdp.arrays import Floats
from osdp.search.sharding.chain.linear_relaxation import relax
from osdp.search.sharding.chain.solver import LAST_WORD, TOLERANCE, ChainProblem, ItemShape, solve_chain
from osdp.search.sharding.milp import solve_milp


def random_problem(seed: int) -> ChainProblem:
    """A few items of one or two shapes, one or two times, up to three memory rows with caps that may bind."""
    rng = np.random.default_rng(seed)
    num_times, num_memory = int(rng.integers(1, 3)), int(rng.integers(0, 4))
    templates = tuple(_template(rng, num_times, num_memory) for _ in range(rng.integers(1, 3)))
    kinds = []
    for _ in range(rng.integers(1, 5)):
        template = int(rng.integers(len(templates)))
        kinds.append((template, int(rng.integers(len(templates[template].rows)))))
    # Bytes are whole numbers, whose sums are exact.
    constant = np.append(rng.uniform(0, 2, num_times), rng.integers(0, 5, num_memory))
    problem = ChainProblem(templates, tuple(kinds), num_times, constant, np.full(len(constant), np.inf))
    every = sums(problem)
    low, high = every.min(axis=0), every.max(axis=0)
    # Below 0 a cap cannot be kept, at 1 it does not bind.
    caps = np.floor(low + rng.uniform(-0.05, 1, len(constant)) * (high - low))
    caps[:num_times] = np.inf
    return ChainProblem(templates, tuple(kinds), num_times, constant, caps)


def _template(rng: np.random.Generator, num_times: int, num_memory: int) -> ItemShape:
    size = int(rng.integers(1, 4))
    spans = [(a, b) for a in range(size) for b in range(a + 1, size + 1)]
    # One candidate for each single position, so that there is a path, and some others.
    taken = [span for span in spans for _ in range(int(rng.integers(span[1] - span[0] == 1, 3)))]
    start, stop = (np.array(column, dtype=np.int64) for column in zip(*taken, strict=True))
    shape = (int(rng.integers(1, 3)), len(taken))
    # Memory may sink where time grows; few distinct values, so that there are ties.
    times = rng.integers(0, 6, (*shape, num_times)) * 0.125
    memory = rng.integers(-2, 9, (*shape, num_memory)).astype(float)
    return ItemShape(size, start, stop, np.concatenate([times, memory], axis=2))


def paths_of(template: ItemShape) -> Iterator[tuple[int, ...]]:
    """All ways through one item."""

    def extend(position: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if position == template.size:
            yield taken
        for edge in np.flatnonzero(template.start == position).tolist():
            yield from extend(int(template.stop[edge]), (*taken, edge))

    return extend(0, ())


def item_sums(problem: ChainProblem, kind: tuple[int, int]) -> Floats:
    """Rows of all paths through one item."""
    template = problem.templates[kind[0]]
    return np.array([template.rows[kind[1], list(path)].sum(axis=0) for path in paths_of(template)])


def sums(problem: ChainProblem) -> Floats:
    """Rows of all paths through the chain."""
    total = problem.constant[None, :]
    for kind in problem.kinds:
        total = (total[:, None] + item_sums(problem, kind)[None]).reshape(-1, total.shape[1])
    return total


def best_value(problem: ChainProblem) -> float:
    """The least largest time of the paths under the caps; infinite without one."""
    every = sums(problem)
    fits = (every <= problem.caps).all(axis=1)
    return float(every[fits, : problem.num_time_rows].max(axis=1).min(initial=np.inf))


@given(seed=st.integers(0, 100_000))
@settings(max_examples=150, deadline=None)
def test_equals_enumeration(seed: int) -> None:
    problem = random_problem(seed)
    best = best_value(problem)
    found = solve_chain(problem)
    assert found.value == pytest.approx(best, rel=1e-9)
    assert (found.paths is None) == np.isinf(best)
    if found.paths is None:
        return
    assert found.value * (1 - 2 * TOLERANCE) <= found.bound <= found.value
    total = problem.constant.copy()
    for (template, index), path in zip(problem.kinds, found.paths, strict=True):
        assert path in set(paths_of(problem.templates[template]))
        total += problem.templates[template].rows[index, list(path)].sum(axis=0)
    assert (total <= problem.caps).all()
    assert total[: problem.num_time_rows].max() == pytest.approx(found.value, rel=1e-12)


@given(seed=st.integers(0, 100_000), share=st.floats(0.5, 1.5))
@settings(max_examples=60, deadline=None)
def test_only_paths_better_than_what_is_known_count(seed: int, share: float) -> None:
    problem = random_problem(seed)
    best = best_value(problem)
    known = (best if np.isfinite(best) else 1.0) * share
    found = solve_chain(problem, known)
    if best < known * (1 - 1e-9):
        assert found.value == pytest.approx(best, rel=1e-9)
    elif best > known * (1 + 1e-9):
        assert (found.paths, found.bound) == (None, known)


@given(seed=st.integers(0, 100_000))
@settings(max_examples=60, deadline=None)
def test_a_narrow_search_is_honest_about_its_bound(seed: int) -> None:
    problem = random_problem(seed)
    best = best_value(problem)
    found = solve_chain(problem, widths=(1,))
    assert found.value >= best * (1 - 1e-9)
    assert found.bound <= best * (1 + 1e-9)


@given(seed=st.integers(0, 100_000))
@settings(max_examples=60, deadline=None)
def test_highs_equals_enumeration(seed: int) -> None:
    problem = random_problem(seed)
    assert solve_milp(problem, widths=LAST_WORD).value == pytest.approx(best_value(problem), rel=1e-6)


def test_a_chain_without_items_is_its_constant() -> None:
    problem = ChainProblem((), (), 1, np.array([3.0, 5.0]), np.array([np.inf, 6.0]))
    assert (solve_chain(problem).value, solve_chain(problem).paths) == (3.0, ())
    assert solve_chain(problem, 3.0).paths is None
    tight = ChainProblem((), (), 1, np.array([3.0, 5.0]), np.array([np.inf, 4.0]))
    assert solve_chain(tight).paths is None


def linear_program(problem: ChainProblem) -> tuple[bool, float]:
    """Whether some mixture of paths keeps the caps, and the least time of one, by HiGHS."""
    items = [item_sums(problem, kind) for kind in problem.kinds]
    paths = np.concatenate(items)
    num_times, count = problem.num_time_rows, len(paths)
    bounded = np.isfinite(problem.caps)
    upper = np.concatenate(
        [
            np.hstack([paths[:, :num_times].T, -np.ones((num_times, 1))]),
            np.hstack([paths[:, bounded].T, np.zeros((int(bounded.sum()), 1))]),
        ]
    )
    room = np.concatenate([-problem.constant[:num_times], (problem.caps - problem.constant)[bounded]])
    one_each = np.zeros((len(items), count + 1))
    owner = np.repeat(np.arange(len(items)), [len(item) for item in items])
    one_each[owner, np.arange(count)] = 1.0
    answer = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=upper,
        b_ub=room,
        A_eq=one_each,
        b_eq=np.ones(len(items)),
        bounds=[(0, None)] * count + [(None, None)],
    )
    return answer.status == 0, float(answer.fun) if answer.status == 0 else np.inf


@given(seed=st.integers(0, 100_000))
@settings(max_examples=150, deadline=None)
def test_the_relaxation_has_the_value_of_the_linear_program(seed: int) -> None:
    problem = random_problem(seed)
    feasible, value = linear_program(problem)
    counts = np.array([float(problem.kinds.count(kind)) for kind in sorted(set(problem.kinds))])
    rows = [item_sums(problem, kind) for kind in sorted(set(problem.kinds))]

    def cheapest(weights: Floats) -> Floats:
        return np.stack([item[np.argmin(item @ weights)] for item in rows])

    found = relax(cheapest, counts, problem.constant, problem.caps, problem.num_time_rows)
    assert found.feasible == feasible
    if not feasible:
        return
    assert (found.weights >= 0).all()
    assert found.weights[: problem.num_time_rows].sum() == pytest.approx(1)
    caps = np.where(np.isfinite(problem.caps), problem.caps, 0.0)
    least = cheapest(found.weights) @ found.weights
    bound = counts @ least + found.weights @ (problem.constant - caps)
    assert bound == pytest.approx(value, rel=1e-6, abs=1e-6)


def test_enumeration_is_one() -> None:
    """The oracle itself: two positions, two candidates each and one over both make five paths."""
    template = ItemShape(2, np.array([0, 0, 1, 1, 0]), np.array([1, 1, 2, 2, 2]), np.zeros((1, 5, 1)))
    assert set(paths_of(template)) == {*itertools.product((0, 1), (2, 3)), (4,)}
