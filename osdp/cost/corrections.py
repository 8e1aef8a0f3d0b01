"""Corrections: what measured steps say of layers like theirs beyond what the coefficients explain.

The host, the libraries and the links have habits that no formula has, and that return with every step of the
same layer on the same ranks with the same microbatch. Their logarithms are interpolated by simple kriging
with an exponential covariance (Cressie, Statistics for Spatial Data, 1993, section 3.2)

    k(x, y) = v exp(-|x - y| / l),    |x - y| = sum of the doublings between x and y,

so that a layer that was measured takes what it took, and one that is a few doublings away what the formulas
say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: v and l: logarithms of corrections are about 0.1, and half a doubling away an e-th of them is left.
_VARIANCE, _DOUBLINGS = 0.1**2, 0.5


@dataclass(frozen=True, slots=True)
class LayerCase:
    """What decides how a layer runs on its ranks.

    Attributes:
        hidden: Width of the residual stream.
        heads: Of attention.
        sequence: Tokens of a sample.
        tp: Ranks that compute it together.
        samples: Of a microbatch.
    """

    hidden: int
    heads: int
    sequence: int
    tp: int
    samples: int


@dataclass(frozen=True, slots=True)
class Correction:
    """One case that was measured; ``weight`` is its coefficient in the interpolation."""

    case: LayerCase
    weight: float


def correction_factor(corrections: Sequence[Correction], case: LayerCase) -> float:
    """By what the seconds of a case are multiplied; 1 without corrections."""
    return math.exp(sum(each.weight * _covariance(each.case, case) for each in corrections))


def corrections_of(cases: Sequence[LayerCase], logs: Floats, deviations: Floats) -> tuple[Correction, ...]:
    """The interpolation through measured corrections.

    Args:
        cases: Distinct ones.
        logs: Logarithm of the factor that each needs; shape ``(cases,)``.
        deviations: Standard deviation of each logarithm; shape ``(cases,)``.
    """
    covariance = np.array([[_covariance(x, y) for y in cases] for x in cases])
    weights = np.linalg.solve(covariance + np.diag(deviations**2), logs)
    return tuple(Correction(case, float(weight)) for case, weight in zip(cases, weights, strict=True))


def _covariance(x: LayerCase, y: LayerCase) -> float:
    doublings = sum(abs(math.log2(getattr(x, f.name) / getattr(y, f.name))) for f in fields(LayerCase))
    return _VARIANCE * math.exp(-doublings / _DOUBLINGS)
