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

#: Minimum relative deviation of steps with the same layer, whatever else differs between them.
ALONE = 0.02


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
    """A measured case.

    Attributes:
        case: The case.
        weight: Its coefficient in the interpolation.
        deviation: Standard deviation of the logarithm that was measured.
    """

    case: LayerSize
    weight: float
    deviation: float = ALONE


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
    weights = np.linalg.solve(_covariances(cases, deviations), logs)
    found = zip(cases, weights.tolist(), deviations.tolist(), strict=True)
    return tuple(Correction(case, weight, deviation) for case, weight, deviation in found)


def deviation_at(corrections: Sequence[Correction], case: LayerSize) -> float:
    """Standard deviation of the logarithm of a case's error, beside what its correction explains.

    That of the interpolation (Cressie, section 3.2), and of steps of one layer among each other.

    Args:
        corrections: The measured cases.
        case: The case that is predicted.
    """
    unexplained = _VARIANCE
    if corrections:
        near = np.array([_covariance(each.case, case) for each in corrections])
        known = _covariances(
            [each.case for each in corrections], np.array([each.deviation for each in corrections])
        )
        unexplained -= float(near @ np.linalg.solve(known, near))
    return math.sqrt(max(unexplained, 0.0) + ALONE**2)


def _covariances(cases: Sequence[LayerSize], deviations: Floats) -> Floats:
    covariance: Floats = np.array([[_covariance(x, y) for y in cases] for x in cases])
    return covariance + np.diag(deviations**2)


def _covariance(x: LayerSize, y: LayerSize) -> float:
    doublings = sum(abs(math.log2(getattr(x, f.name) / getattr(y, f.name))) for f in fields(LayerSize))
    return _VARIANCE * math.exp(-doublings / _DOUBLINGS)
