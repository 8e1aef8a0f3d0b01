"""Latency model of token slices: fit to measured slices, and evaluation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from osdp.arrays import Floats
from osdp.hardware.token_latency import BatchLatency, PassLatency, SliceSample, TokenLatency, TokenSamples

#: Number of coefficients of the seconds that context adds, and the minimum number of slices with context.
_COEFFICIENTS = 4


def pass_seconds(latency: PassLatency, lengths: ArrayLike, contexts: ArrayLike) -> Floats:
    """Seconds of slices of ``lengths`` tokens after ``contexts`` earlier tokens; shapes broadcast.

    A slice shorter than the shortest measured one takes as long as that one; one longer than the longest
    measured is unknown and takes infinitely long. The context never reduces the seconds.
    """
    i, j = np.asarray(lengths, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
    alone = np.interp(i, latency.lengths, latency.seconds, right=np.inf)
    a0, a1, a2, a3 = latency.context
    added = np.maximum(a0 + a1 * i + a2 * j + a3 * i * j, 0.0)
    return np.asarray(alone + np.where(j > 0, added, 0.0))


def fit(measured: TokenSamples) -> TokenLatency:
    """Fit the latency model to measured slices, for each measured number of sequences.

    Raises:
        ValueError: For some number of sequences no slice was measured without context, or too few with it.
    """
    batches = []
    for batch in sorted({sample.batch for sample in measured.samples}):
        own = [sample for sample in measured.samples if sample.batch == batch]
        forward = _fit_pass(own, [sample.forward_seconds for sample in own])
        backward = _fit_pass(own, [sample.backward_seconds for sample in own])
        batches.append(BatchLatency(batch, forward, backward))
    return TokenLatency(
        measured.model, measured.device, measured.num_layers, measured.token_bytes, tuple(batches)
    )


def _fit_pass(samples: Sequence[SliceSample], seconds: Sequence[float]) -> PassLatency:
    lengths = np.array([sample.length for sample in samples])
    contexts = np.array([sample.context for sample in samples])
    times = np.array(seconds)
    # 1. Without context: the median of each measured length.
    alone, after = contexts == 0, contexts > 0
    if not alone.any():
        raise ValueError(
            f"no slice of {samples[0].batch} sequences was measured without context; measure some, "
            "of several lengths up to the longest one needed"
        )
    known = np.unique(lengths[alone])
    at = tuple(float(np.median(times[alone & (lengths == length)])) for length in known)
    latency = PassLatency(tuple(known.tolist()), at)
    if not after.any():
        return latency
    # 2. Seconds that context adds: least squares for a0 + a1 i + a2 j + a3 i j.
    i, j = lengths[after].astype(np.float64), contexts[after].astype(np.float64)
    terms = np.stack([np.ones_like(i), i, j, i * j], axis=1)
    base = pass_seconds(latency, i, np.zeros_like(j))
    if np.isinf(base).any():
        raise ValueError(
            f"slices of {int(i.max())} tokens were measured with context but only up to {known[-1]} without; "
            "measure slices of that length without context"
        )
    if np.linalg.matrix_rank(terms) < _COEFFICIENTS:
        raise ValueError(
            f"{len(i)} slices with context do not determine what context adds; measure at least two lengths, "
            "each after two contexts"
        )
    # Minimise relative errors, not absolute ones, because the search makes slices short.
    wanted = times[after]
    solution = np.linalg.lstsq(terms / wanted[:, None], (wanted - base) / wanted, rcond=None)[0]
    a0, a1, a2, a3 = solution.tolist()
    fitted = PassLatency(latency.lengths, latency.seconds, (a0, a1, a2, a3))
    errors = np.abs(pass_seconds(fitted, i, j) / wanted - 1)
    return PassLatency(
        fitted.lengths, fitted.seconds, fitted.context, float(errors.max()), float(errors.mean())
    )
