"""Spread: how far measurements lie from predictions, as 90 % intervals, and which predictions are ties.

Without measured steps of one's own the factors are those of published trainings: the 5 % and 95 % quantiles
of measured over predicted seconds of 73 rows (the third smallest and the third largest, between which nine
tenths of others may be expected), and all of measured over predicted peaks of 16, of the tuning half of
``benchmarks/support/published`` (2026-11; the half set aside tells how well they hold,
``benchmarks/published_layouts.py``). Most of such an error is shared by all layouts of a model on a machine.
What is a layout's own follows from the steps of vTrain (MICRO 2024; 9,792 pairs of layouts of one model and
batch on the same devices): nine tenths of the pairs had errors that differ by less than a factor of 1.21.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Factors between predicted and measured values, such that nine tenths of the measured ones lie within.

    Attributes:
        low: Least measured seconds over predicted ones.
        high: Largest measured seconds over predicted ones.
        own: Logarithm of the largest factor that is not shared by all layouts of a model on a machine.
        shared: The same of the factor that all predictions share and what was measured does not; 0 where no
            layout is measured, because only predictions are then compared.
        peak_low: Least measured peak memory over the predicted one.
        peak_high: Largest measured peak memory over the predicted one.
    """

    low: float = 0.90
    high: float = 1.36
    own: float = 0.135
    shared: float = 0.0
    peak_low: float = 0.93
    peak_high: float = 1.17

    def __post_init__(self) -> None:
        seconds, peak = 0 < self.low <= 1 <= self.high, 0 < self.peak_low <= 1 <= self.peak_high
        if not (seconds and peak and self.own >= 0 and self.shared >= 0):
            raise ValueError(
                f"an interval contains its prediction, low <= 1 <= high, and own and shared >= 0; got {self}"
            )

    @property
    def shares(self) -> bool:
        """Whether a part of the error is shared by all layouts of a model on a machine."""
        return math.log(self.high / self.low) / 2 > self.own * (1 + 1e-9)

    def alike(self, other: "Spread", ratio: float) -> bool:
        """Whether two predictions, the one ``ratio`` times the other, cannot be told apart."""
        return abs(math.log(ratio)) <= math.hypot(self.own, other.own, self.shared - other.shared)


#: That of predictions from published rates alone.
PUBLISHED_SPREAD = Spread()


def fitted_spread(log_factor: float) -> Spread:
    """The spread of seconds that were fitted to measured steps; of peaks as published.

    Args:
        log_factor: Logarithm of the factor within which nine tenths of the measured ones lie.
    """
    return Spread(low=math.exp(-log_factor), high=math.exp(log_factor), own=log_factor)
