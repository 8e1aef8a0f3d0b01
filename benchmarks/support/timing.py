"""Times that can be compared on a noisy machine: rounds of all candidates, paired ratios and their interval.

Two runs of the same program differ by several percent here, so a ratio is the median over rounds of the
ratio *within* a round, with a bootstrap interval (Efron, Annals of Statistics 7(1), 1979), and the same
computation for one candidate against itself (A/A) shows what the machine adds.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 2000
#: Half the width of an interval, relative to its middle, that is narrow enough.
NARROW = 0.03


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of times, or a relative error.

    Attributes:
        median: Median of the paired ratios.
        low: Lower end of its 95 % bootstrap interval.
        high: Upper end.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def is_narrow(self) -> bool:
        """Whether its interval is narrow enough to be judged."""
        return (self.high - self.low) / 2 <= NARROW * self.median

    @property
    def inverse(self) -> "Ratio":
        """The ratio the other way round."""
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """Median of ``numerators[i] / denominators[i]`` with its 95 % bootstrap interval.

    Raises:
        ValueError: The two differ in length, or are empty.

    >>> paired_ratio([2.0, 4.0], [1.0, 2.0])
    Ratio(median=2.0, low=2.0, high=2.0)
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"need as many numerators ({len(numerators)}) as denominators ({len(denominators)})")
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    tail = round(0.025 * RESAMPLES)
    return Ratio(statistics.median(ratios), medians[tail], medians[-1 - tail])


def in_common(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of two candidates over the rounds in which both took part."""
    rounds = min(len(first), len(second))
    return paired_ratio(first[:rounds], second[:rounds])


def over_best_rival(rivals: Mapping[str, Sequence[float]], ours: Sequence[float]) -> tuple[str, Ratio]:
    """The fastest of ``rivals``, and its seconds over ours, round by round.

    The fastest of the even rounds is compared in the odd ones, and that of the odd ones in the even ones: a
    rival chosen for the rounds in which it is compared would look faster than it is. Where the two differ,
    the one named is that of the even rounds.
    """
    # Either may have gone on for another row's sake.
    rounds = min(map(len, (ours, *rivals.values())))
    best = []
    above, below = [], []
    for half in (0, 1):
        chosen = {rival: statistics.median(seconds[:rounds][half::2]) for rival, seconds in rivals.items()}
        best.append(min(chosen, key=lambda rival: chosen[rival]))
        above += rivals[best[-1]][:rounds][1 - half :: 2]
        below += ours[:rounds][1 - half :: 2]
    return best[0], paired_ratio(above, below)


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    repeats: int = 1,
    settling: int = 0,
    synchronize: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Time candidates in turn, in another order in each round: A B C, C A B, ...

    What a candidate finds in the caches and in the allocator depends on which one ran before it. In one fixed
    order that would count for or against it in every round.

    Args:
        candidates: What to time, by name.
        rounds: Timed turns of each.
        warmup: Untimed turns of each before.
        repeats: Timed calls in one turn; the time of a turn is their mean.
        settling: Untimed calls before these, which find what the others have left in caches and allocator.
        seed: Of the orders: another for further rounds of the same candidates.
        synchronize: Called before both readings of the clock (a barrier, a device synchronisation).

    Returns:
        Seconds per call, one per round, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    # Seeded: ranks must run the candidates in the same order.
    names, draw = list(candidates), random.Random(len(candidates) + seed)
    for turn in range(warmup + rounds):
        draw.shuffle(names)
        for name in names:
            call = candidates[name]
            for _ in range(settling):
                call()
            synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            synchronize()
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - begin) / repeats)
    return seconds
