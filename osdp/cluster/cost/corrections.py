"""Corrections: residuals of the fitted time model, interpolated between the layers that were measured.

Hosts, libraries and links have systematic effects that no formula covers, and that recur in every step of the
same layer on the same ranks with the same microbatch. The logarithms of these factors are interpolated by
simple kriging with an exponential covariance (Cressie, Statistics for Spatial Data, 1993, section 3.2)

    k(x, y) = v exp(-|x - y| / l),    |x - y| = sum of the doublings between x and y,

so that a measured layer is predicted as it was measured, and one that is a few doublings away as the formulas
predict it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: v and l: logarithms of corrections are about 0.1, and half a doubling away 1/e of a correction is left.
_VARIANCE, _DOUBLINGS = 0.1**2, 0.5


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Layer size, microbatch and tensor-parallel degree that a correction belongs to.

    Attributes:
        hidden: Width of the residual stream.
        heads: Attention heads.
        sequence: Tokens per sample.
        tp: Tensor-parallel degree.
        samples: Samples per microbatch.
    """

    hidden: int
    heads: int
    sequence: int
    tp: int
    samples: int


@dataclass(frozen=True, slots=True)
class Correction:
    """A measured case; ``weight`` is its coefficient in the interpolation."""

    case: LayerSize
    weight: float


def correction_factor(corrections: Sequence[Correction], case: LayerSize) -> float:
    """Factor for the modelled seconds of a case; 1 without corrections."""
    return math.exp(sum(each.weight * _covariance(each.case, case) for each in corrections))


def corrections_of(cases: Sequence[LayerSize], logs: Floats, deviations: Floats) -> tuple[Correction, ...]:
    """Kriging weights of measured corrections.

    Args:
        cases: Distinct cases.
        logs: Logarithm of the measured factor of each case; shape ``(cases,)``.
        deviations: Standard deviation of each logarithm; shape ``(cases,)``.
    """
    covariance = np.array([[_covariance(x, y) for y in cases] for x in cases])
    weights = np.linalg.solve(covariance + np.diag(deviations**2), logs)
    return tuple(Correction(case, float(weight)) for case, weight in zip(cases, weights, strict=True))


def _covariance(x: LayerSize, y: LayerSize) -> float:
    doublings = sum(abs(math.log2(getattr(x, f.name) / getattr(y, f.name))) for f in fields(LayerSize))
    return _VARIANCE * math.exp(-doublings / _DOUBLINGS)
