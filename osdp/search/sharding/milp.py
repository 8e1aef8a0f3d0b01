"""Chain problem as a mixed-integer linear program for HiGHS, a check of our own solver of it.

A path is a unit flow through the positions of the chain: one binary variable per candidate, one flow balance
per operator boundary, one row per time and memory row, and a variable for the largest time. Independent of
the chain solver; needs scipy.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, hstack, vstack

from osdp.arrays import Floats, Ints
from osdp.search.sharding.chain.solver import ChainProblem, ChainSolution, DualPrices

#: Status of HiGHS for a problem without a solution.
_INFEASIBLE = 2


def solve_milp(
    problem: ChainProblem,
    upper: float = np.inf,
    widths: Sequence[int] = (),
    duals: DualPrices | None = None,
    *,
    time_limit: float = 60.0,
) -> ChainSolution:
    """The result of :func:`osdp.search.sharding.chain.solver.solve_chain` by HiGHS.

    HiGHS closes the gap completely or stops after ``time_limit`` seconds; it needs no ``widths`` and no
    ``duals``.
    """
    # 1. One column per candidate, with its edge and its rows.
    places, rows = _candidates(problem)
    count = len(places)
    times = problem.num_time_rows
    scale = np.abs(rows).max(axis=0, initial=0.0) + np.abs(problem.constant) + 1e-30
    # 2. Flow balance: one unit leaves the first boundary and arrives at the last.
    flow = _flow(places)
    balance = np.zeros(flow.shape[0])
    balance[0], balance[-1] = 1.0, -1.0
    # 3. Times: rows - T <= -constant; memory: rows <= cap - constant; each divided by its size.
    largest = np.where(np.arange(len(scale)) < times, -scale[0] / scale, 0.0)[:, None]
    room = np.where(np.isfinite(problem.caps), problem.caps, 0.0) - problem.constant
    bounded = hstack([csr_matrix((rows / scale).T), csr_matrix(largest)])
    closed = hstack([flow, csr_matrix((flow.shape[0], 1))])
    matrix = vstack([closed, bounded])
    low = np.concatenate([balance, np.full(len(scale), -np.inf)])
    high = np.concatenate([balance, room / scale])
    # 4. Minimise T, the last variable; the candidates are binary.
    answer = milp(
        np.concatenate([np.zeros(count), [1.0]]),
        integrality=np.concatenate([np.ones(count), [0.0]]),
        bounds=Bounds(np.zeros(count + 1), np.concatenate([np.ones(count), [np.inf]])),
        constraints=LinearConstraint(matrix.tocsc(), low, high),
        options={"mip_rel_gap": 0.0, "time_limit": time_limit},
    )
    if answer.x is None:
        # Running out of time proves nothing.
        proven = answer.status == _INFEASIBLE
        return ChainSolution(np.inf, None, upper if proven else -np.inf)
    taken = np.flatnonzero(answer.x[:count] > 0.5)
    value = float((rows[taken].sum(axis=0) + problem.constant)[:times].max())
    if value >= upper:
        return ChainSolution(np.inf, None, upper)
    bound = min(value, float(answer.mip_dual_bound) * scale[0])
    return ChainSolution(value, _paths(problem, places, taken), bound)


def _candidates(problem: ChainProblem) -> tuple[list[tuple[int, int, int, int]], Floats]:
    """Every candidate as (boundary, next boundary, item, index), and its rows, shape ``(candidates, R)``."""
    sizes = [problem.templates[template].size for template, _ in problem.kinds]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    places, rows = [], []
    for item, (kind, distinct) in enumerate(problem.kinds):
        template = problem.templates[kind]
        for index in range(len(template.start)):
            begin, end = int(template.start[index]), int(template.stop[index])
            places.append((int(bounds[item]) + begin, int(bounds[item]) + end, item, index))
        rows.append(template.rows[distinct])
    return places, np.concatenate(rows)


def _flow(places: list[tuple[int, int, int, int]]) -> csr_matrix:
    """Incidence matrix of boundaries and candidates: 1 where a candidate starts, -1 where it ends."""
    boundaries = 1 + max((place[1] for place in places), default=0)
    index = np.arange(len(places))
    start = np.array([place[0] for place in places])
    stop = np.array([place[1] for place in places])
    ones = np.ones(len(places))
    shape = (boundaries, len(places))
    return csr_matrix((ones, (start, index)), shape) - csr_matrix((ones, (stop, index)), shape)


def _paths(
    problem: ChainProblem, places: list[tuple[int, int, int, int]], taken: Ints
) -> tuple[tuple[int, ...], ...]:
    """The chosen candidates of each item, in trace order."""
    found: list[list[int]] = [[] for _ in problem.kinds]
    for _, _, item, index in sorted(places[candidate] for candidate in taken.tolist()):
        found[item].append(index)
    return tuple(tuple(path) for path in found)
