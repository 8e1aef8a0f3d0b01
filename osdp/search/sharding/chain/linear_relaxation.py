"""Linear relaxation of a chain by column generation: dual prices of its rows and a lower bound.

The master problem takes any mixture of known paths per kind of item,

    min T   s.t.   times <= T,   memory <= caps,   mixtures of kind k add up to its number of items,

and is solved by the revised simplex method (Dantzig and Wolfe, Operations Research 8(1), 1960). Its dual
prices are the value of a byte and of a second; a shortest path under those prices is the next column. It has
a few dozen rows, so each basis is solved afresh. scipy's HiGHS would do as well, but is not a requirement of
the library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from osdp.arrays import Floats

#: Function from prices of the rows, ``(R,)``, to the cheapest path of each kind: its rows, ``(kinds, R)``.
Pricer = Callable[[Floats], Floats]

_MOST_PIVOTS = 400
_NEGATIVE = 1e-9
#: Cost of exceeding a row, in units of the largest time: far above any price of memory.
_PENALTY = 1e4


@dataclass(frozen=True)
class Relaxation:
    """Solution of the master problem.

    Attributes:
        weights: Dual price of each row, shape ``(R,)``; those of time rows sum to one.
        feasible: Whether some mixture keeps all caps.
        totals: Rows of the optimal mixture of each kind, shape ``(kinds, R)``.
    """

    weights: Floats
    feasible: bool
    totals: Floats


def relax(
    pricer: Pricer,
    counts: Floats,
    constant: Floats,
    caps: Floats,
    num_time_rows: int,
    *,
    known: Sequence[Floats] = (),
    ends: Callable[[float], bool] | None = None,
) -> Relaxation:
    """Solve the relaxation.

    Args:
        pricer: Finds the cheapest path of each kind under given prices.
        counts: Number of items of each kind, shape ``(kinds,)``.
        constant: Added to each row, shape ``(R,)``.
        caps: Upper bound of each row, shape ``(R,)``; infinite for times.
        num_time_rows: Number of time rows, which come first.
        known: Rows of paths of each kind, ``(kinds, R)``, to mix before others are priced.
        ends: Whether a mixture of so many seconds is good enough, asked after each pricing.

    Returns:
        Prices that are optimal within rounding, or as good as the pivots allowed; any prices give a valid
        bound.
    """
    start = np.zeros(len(constant))
    start[0] = 1.0
    first = known[0] if known else pricer(start)
    master = _Master(counts, constant, caps, num_time_rows, first)
    for _ in range(_MOST_PIVOTS):
        # Slacks enter first: the pricer needs non-negative prices.
        prices, convexity = master.duals()
        if master.enter_slack(prices) or any(master.enter_path(paths, prices, convexity) for paths in known):
            continue
        paths = pricer(np.maximum(prices, 0.0) / master.scale)
        if ends is not None and ends(master.seconds()):
            break
        if not master.enter_path(paths, prices, convexity):
            break
    prices, _ = master.duals()
    # Prices below the rounding of the duals count as zero.
    weights = np.where(prices > _NEGATIVE, prices, 0.0) / master.scale
    total = float(weights[:num_time_rows].sum())
    feasible = master.overflow() <= 1e-9
    return Relaxation(weights / total if total > 0 else start, feasible, master.totals())


#: The smallest pivot, relative to the largest entry of its column.
_PIVOT = 1e-9


class _Master:
    """A basis of the master problem.

    ::

                     slacks, T, overflow | paths of kind 0 | paths of kind 1 | ...
        times        T on the right side |    row sums of the whole kind      <= T
        memory       overflow, penalised |    on this path                    <= caps
        convexity                        |       1  1      |      1  1         = 1 per kind

    Rows are scaled to about 1.
    """

    def __init__(self, counts: Floats, constant: Floats, caps: Floats, num_times: int, first: Floats) -> None:
        self._num_rows, self._kinds, self._times = len(constant), len(counts), num_times
        totals = counts @ first + constant
        time_scale = max(float(np.max(np.abs(totals[:num_times]))), 1e-30)
        self.scale = np.where(np.isfinite(caps), np.maximum(np.abs(caps), 1.0), time_scale)
        self._time_scale = time_scale
        self._counts = counts
        room = np.where(np.isfinite(caps), caps, 0.0) - constant
        self._right = np.concatenate([room / self.scale, np.ones(self._kinds)])
        self._columns: list[Floats] = []
        self._paths: dict[int, int] = {}  # column to kind
        self._costs: list[float] = []
        self._start_basis(first, totals, caps)

    def _start_basis(self, first: Floats, totals: Floats, caps: Floats) -> None:
        """Initial basis: a path per kind, T on the longest time, overflow on the fullest cap, else slacks."""
        size = self._num_rows + self._kinds
        longest = np.zeros(size)
        longest[: self._times] = -1.0
        overflow = np.zeros(size)
        overflow[self._times : self._num_rows] = -1.0
        excess = np.where(np.isfinite(caps), (totals - caps) / self.scale, -np.inf)
        basis = [self._add(self._slack(row), 0.0) for row in range(self._num_rows)]
        time = self._add(longest, 1.0)
        self._overflow = self._add(overflow, _PENALTY)
        basis[int(np.argmax(totals[: self._times]))] = time
        if self._num_rows > self._times and excess.max() > 0:
            basis[int(np.argmax(excess))] = self._overflow
        basis += [self._add_path(kind, first[kind]) for kind in range(self._kinds)]
        self._basis = basis

    def _slack(self, row: int) -> Floats:
        column = np.zeros(self._num_rows + self._kinds)
        column[row] = 1.0
        return column

    def _add_path(self, kind: int, rows: Floats) -> int:
        # A variable of 1 means the whole kind on this path, so that all variables are of the same size.
        column = np.zeros(self._num_rows + self._kinds)
        column[: self._num_rows] = self._counts[kind] * rows / self.scale
        column[self._num_rows + kind] = 1.0
        self._paths[len(self._columns)] = kind
        return self._add(column, 0.0)

    def _add(self, column: Floats, cost: float) -> int:
        self._columns.append(column)
        self._costs.append(cost)
        return len(self._columns) - 1

    def _matrix(self) -> Floats:
        return np.stack([self._columns[index] for index in self._basis], axis=1)

    def duals(self) -> tuple[Floats, Floats]:
        """Price of each row, ``(R,)``, and value of each convexity row, ``(kinds,)``.

        Prices are non-negative at the optimum.
        """
        costs = np.array([self._costs[index] for index in self._basis])
        duals = np.linalg.solve(self._matrix().T, costs)
        return -duals[: self._num_rows], duals[self._num_rows :]

    def overflow(self) -> float:
        """Relative excess of the mixture over the caps."""
        values = np.linalg.solve(self._matrix(), self._right)
        return float(values[self._basis.index(self._overflow)]) if self._overflow in self._basis else 0.0

    def seconds(self) -> float:
        """The longest time of the current mixture, and what exceeding the caps costs."""
        values = np.linalg.solve(self._matrix(), self._right)
        return float(values @ np.array([self._costs[index] for index in self._basis])) * self._time_scale

    def totals(self) -> Floats:
        """Rows of the current mixture of each kind, shape ``(kinds, R)``."""
        values = np.linalg.solve(self._matrix(), self._right)
        totals = np.zeros((self._kinds, self._num_rows))
        for value, index in zip(values, self._basis, strict=True):
            if index in self._paths:
                totals[self._paths[index]] += value * self._columns[index][: self._num_rows] * self.scale
        return totals

    def enter_slack(self, prices: Floats) -> bool:
        """Enter the slack of the row with the most negative price, if any."""
        row = int(np.argmin(prices))
        return prices[row] < -_NEGATIVE and self._enter(row)

    def enter_path(self, paths: Floats, prices: Floats, convexity: Floats) -> bool:
        """Enter the path with the most negative reduced cost, if any."""
        reduced = self._counts * (paths @ (prices / self.scale)) - convexity
        kind = int(np.argmin(reduced))
        if reduced[kind] >= -_NEGATIVE:
            return False
        return self._enter(self._add_path(kind, paths[kind]))

    def _enter(self, column: int) -> bool:
        matrix = self._matrix()
        values = np.maximum(np.linalg.solve(matrix, self._right), 0.0)
        direction = np.linalg.solve(matrix, self._columns[column])
        # A smaller pivot would be rounding, and the basis singular.
        growing = direction > _PIVOT * max(1.0, float(np.abs(direction).max()))
        if not growing.any() or column in self._basis:
            return False
        steps = np.where(growing, values / np.where(growing, direction, 1.0), np.inf)
        # Among equal steps take the largest pivot, for a well-conditioned basis.
        close = steps <= steps.min() + 1e-12
        self._basis[int(np.argmax(np.where(close, direction, -np.inf)))] = column
        return True
