"""The rows of the contest: a part of all combinations in which every pair of factors occurs.

Every value of one factor meets every value of each other factor at least once (pairwise covering, as in
Cohen et al., IEEE Transactions on Software Engineering 23(7), 1997). Rows are drawn by a committed seed, so
that nobody chooses them.
"""

import random
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

#: Decides the rows.
SEED = 20261122

#: Limits as parts of the way from the all-sharded to the all-replicated peak; ``None`` is no limit.
FRACTIONS = (0.1, 0.3, 0.6, 0.9, None)

#: Bits per second of the uplink of each of two hosts; ``None`` is one host, over loopback.
NETWORKS = (None, 10**9, 2 * 10**8)

WORLD_SIZES = (2, 4)


@dataclass(frozen=True, slots=True)
class Round:
    """What is measured in one launch.

    Attributes:
        case: Name of the model.
        network: Bits per second of a host's uplink, or ``None``.
        world_size: Number of ranks.
        fractions: Its limits, one for each row.
    """

    case: str
    network: int | None
    world_size: int
    fractions: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """For the table."""
        network = "loopback" if self.network is None else f"{self.network // 10**6} Mbit/s"
        return f"{self.case}, {network}, {self.world_size} ranks"


def draw(cases: tuple[str, ...], num_rows: int, seed: int = SEED) -> list[Round]:
    """``num_rows`` rows that cover all pairs, gathered into launches.

    Raises:
        ValueError: That many rows cannot cover all pairs, or do not exist.
    """
    factors = (cases, FRACTIONS, NETWORKS, WORLD_SIZES)
    rows = list(product(*factors))
    if num_rows > len(rows):
        raise ValueError(f"there are {len(rows)} rows, not {num_rows}")
    random.Random(seed).shuffle(rows)
    missing = {pair for row in rows for pair in pairs(row)}
    chosen: list[tuple[Any, ...]] = []
    launched: set[tuple[Any, ...]] = set()
    while rows and len(chosen) < num_rows:
        # The first of those that cover the most pairs (greedy: within a logarithm of the fewest rows), and
        # among them one of a launch that is made anyway: most of a launch is what its rows share.
        best = max(rows, key=lambda row: (len(missing & pairs(row)), _launch(row) in launched))
        rows.remove(best)
        chosen.append(best)
        launched.add(_launch(best))
        missing -= pairs(best)
    if missing:
        raise ValueError(f"{num_rows} rows leave {len(missing)} pairs of factors uncovered")
    return _gathered(chosen)


def _launch(row: tuple[Any, ...]) -> tuple[Any, ...]:
    case, _, network, world_size = row
    return case, network, world_size


def pairs(row: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """All pairs of factors of ``row``, each with its number and value."""
    return set(combinations(enumerate(row), 2))


def _gathered(rows: list[tuple[Any, ...]]) -> list[Round]:
    limits: dict[tuple[Any, ...], list[float | None]] = {}
    for row in rows:
        limits.setdefault(_launch(row), []).append(row[1])
    return [
        Round(*key, tuple(sorted(found, key=FRACTIONS.index)))
        for key, found in sorted(limits.items(), key=str)
    ]
