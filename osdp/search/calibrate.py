"""Calibration: the coefficients of the time model that fit measured steps best.

With r_i the relative errors of the steps and x_j the logarithms of the coefficients, minimised is ::

    sum_i r_i^2 / sqrt(r_i^2 + d^2) / s  +  sum_j ((x_j - p_j) / w_j)^2

The first sum is near the absolute errors, so that rows that no coefficient explains do not pull the others
along; s is a typical error. The second holds each coefficient near what is published (p) as firmly as that
is known (w): a coefficient that the rows say nothing about stays there, hence what a small model says about a
large one is physics where it is not measurement. What the coefficients leave is interpolated between the
layers that were measured (:mod:`osdp.cost.corrections`). Solved by Levenberg-Marquardt steps (Moré, "The
Levenberg-Marquardt algorithm", 1978) from p. Local, not proven optimal; the same rows give the same answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from osdp import codec
from osdp.cluster import Cluster, Wire
from osdp.cost.corrections import Correction, LayerCase, corrections_of
from osdp.cost.rates import PUBLISHED, Rates
from osdp.cost.step_model import Setting, StepModel
from osdp.measured_step import MeasuredStep

Floats = NDArray[np.float64]

#: Relative errors below which they count squared, and a typical one: d and s above.
_SMALL, _TYPICAL = 0.02, 0.05
#: By what factor, as a logarithm, each coefficient is known beforehand: w above.
_SPREAD = {
    "matrix_share": 0.15,
    "unaligned_share": 0.5,
    "memory_share": 0.25,
    "call_seconds": 0.3,
    "blend": 0.5,
    "sum_seconds": 1.0,
    "step_seconds": 1.0,
    "inside_bandwidth": 0.4,
    "inside_latency": 0.5,
    "outside_bandwidth": 0.4,
    "outside_latency": 0.5,
}
#: Where coefficients start of which nothing is published: hardly more than nothing.
_START = {
    "blend": 0.2,
    "sum_seconds": 3e-5,
    "step_seconds": 5e-4,
    "inside_latency": 1e-6,
    "outside_latency": 1e-6,
}
#: Relative deviation of steps with the same layer, at least: what else differs between them.
_ALONE = 0.02
_MAX_STEPS, _ENOUGH, _DIFFERENCE = 30, 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class Fitted:
    """What fits measured steps best.

    Attributes:
        rates: Of devices and hosts.
        inside: The link between devices of a node.
        outside: That between a node and the network; as it was where no step ran on several nodes.
    """

    rates: Rates
    inside: Wire
    outside: Wire


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients fitted to measured steps, and how far to trust them.

    Attributes:
        node: Name of the kind of node they ran on.
        rates: Of devices and hosts.
        inside: The link between devices of a node.
        outside: That between a node and the network; ``None`` if no step ran on several nodes.
        steps: How many steps they were fitted to.
        mean_error: Mean absolute relative error of steps that were left out of the fit.
        median_error: Their median.
        folds: In so many parts.
        flash: Whether scores of attention were never written in those steps.
    """

    node: str
    rates: Rates
    inside: Wire
    outside: Wire | None
    steps: int
    mean_error: float
    median_error: float
    folds: int
    flash: bool

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with the links that were found.

        Raises:
            ValueError: It has other nodes than the steps ran on.
        """
        others = [group.node.name for group in cluster.groups if group.node.name != self.node]
        if others:
            raise ValueError(
                f"the calibration is of nodes {self.node!r}, the cluster has {', '.join(others)} too; "
                "measure steps there, or plan without it"
            )
        (group,) = cluster.groups
        node = replace(group.node, inside=self.inside, outside=self.outside or group.node.outside)
        return Cluster((replace(group, node=node),))

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """The calibration saved at ``path``."""
        return codec.load(cls, path)


def calibrate(
    steps: Sequence[MeasuredStep], setting: Setting, *, rates: Rates = PUBLISHED, folds: int = 5
) -> Calibration:
    """Fit the coefficients to all of ``steps``; its errors are those of cross-validation.

    Args:
        steps: Measured.
        setting: What they have in common.
        rates: What the coefficients are taken to be before anything is measured.
        folds: Parts of the cross-validation.

    Raises:
        ValueError: There are fewer steps than folds, or fewer folds than two.
    """
    errors = np.abs(cross_validation(steps, setting, rates=rates, folds=folds))
    found = fit(steps, setting, rates=rates)
    return Calibration(
        node=setting.node.name,
        rates=found.rates,
        inside=found.inside,
        outside=found.outside if StepModel(steps, setting).crosses else None,
        steps=len(steps),
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        folds=folds,
        flash=setting.flash,
    )


def fit(
    steps: Sequence[MeasuredStep], setting: Setting, *, rates: Rates = PUBLISHED, corrected: bool = True
) -> Fitted:
    """The coefficients, and the links in and between nodes, that fit ``steps`` best.

    Args:
        steps: Measured.
        setting: What they have in common.
        rates: What the coefficients are taken to be before anything is measured.
        corrected: Whether what the coefficients leave is interpolated.

    Raises:
        ValueError: There are no steps.
    """
    if not steps:
        raise ValueError("a calibration needs at least 1 measured step, got none")
    return _fit(StepModel(steps, setting), rates, corrected)


def relative_errors(steps: Sequence[MeasuredStep], setting: Setting, fitted: Fitted) -> Floats:
    """Modelled over measured seconds, less one; shape ``(steps,)``."""
    model = StepModel(steps, setting)
    seconds = model.seconds(fitted.rates, fitted.inside, fitted.outside)
    errors: Floats = seconds / model.measured - 1.0
    return errors


def cross_validation(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    *,
    rates: Rates = PUBLISHED,
    folds: int = 5,
    corrected: bool = True,
) -> Floats:
    """Relative error of each step by what was fitted to the other parts of a random division.

    Raises:
        ValueError: There are fewer steps than folds, or fewer folds than two.
    """
    if not 2 <= folds <= len(steps):
        raise ValueError(
            f"{len(steps)} steps cannot be divided into {folds} parts: at least {max(folds, 2)} are needed"
        )
    part = np.random.default_rng(0).permutation(len(steps)) % folds
    errors = np.empty(len(steps))
    for fold in range(folds):
        held = part == fold
        errors[held] = _held_out(steps, setting, held, rates, corrected)
    return errors


def leave_out(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    held: Callable[[MeasuredStep], bool],
    *,
    rates: Rates = PUBLISHED,
) -> Floats:
    """Relative errors of the steps that ``held`` picks, by coefficients fitted to all others.

    Raises:
        ValueError: It picks all of them or none.
    """
    picked = np.array([held(step) for step in steps])
    if picked.all() or not picked.any():
        raise ValueError(
            f"{int(picked.sum())} of {len(steps)} steps are left out; leave some out and some in"
        )
    return _held_out(steps, setting, picked, rates)


def _held_out(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    held: NDArray[np.bool_],
    rates: Rates,
    corrected: bool = True,
) -> Floats:
    others = [step for step, out in zip(steps, held, strict=True) if not out]
    fitted = fit(others, setting, rates=rates, corrected=corrected)
    picked = [step for step, out in zip(steps, held, strict=True) if out]
    return relative_errors(picked, setting, fitted)


def _fit(model: StepModel, rates: Rates, corrected: bool) -> Fitted:
    node = model.setting.node
    prior = {f.name: getattr(rates, f.name) for f in fields(rates) if f.name != "corrections"}
    prior |= {"inside_bandwidth": node.inside.bandwidth, "inside_latency": node.inside.latency}
    if model.crosses:
        prior |= {"outside_bandwidth": node.outside.bandwidth, "outside_latency": node.outside.latency}
    names = tuple(prior)
    start = np.log([prior[name] or _START[name] for name in names])
    spread = np.array([_SPREAD[name] for name in names])
    measured = model.measured

    def coefficients(x: Floats) -> Fitted:
        found = dict(zip(names, np.exp(x).tolist(), strict=True))
        inside = Wire(found.pop("inside_bandwidth"), found.pop("inside_latency"))
        outside = node.outside
        if model.crosses:
            outside = Wire(found.pop("outside_bandwidth"), found.pop("outside_latency"))
        return Fitted(Rates(**(found | {"blend": min(found["blend"], 1.0)})), inside, outside)

    def residuals(x: Floats) -> Floats:
        now = coefficients(x)
        error = model.seconds(now.rates, now.inside, now.outside) / measured - 1.0
        weighed = error / np.sqrt(_TYPICAL * np.sqrt(error**2 + _SMALL**2))
        return np.concatenate([weighed, (x - start) / spread])

    found = coefficients(_least_squares(residuals, start))
    if not corrected:
        return found
    return replace(found, rates=replace(found.rates, corrections=_corrections(model, found)))


def _corrections(model: StepModel, fitted: Fitted) -> tuple[Correction, ...]:
    """What the coefficients leave of each layer that was measured."""
    logs = np.log(model.measured / model.seconds(fitted.rates, fitted.inside, fitted.outside))
    cases = [LayerCase(step.hidden, step.heads, step.sequence, step.tp, step.samples) for step in model.steps]
    rows: dict[LayerCase, list[float]] = {}
    for case, log in zip(cases, logs.tolist(), strict=True):
        rows.setdefault(case, []).append(log)
    means = np.array([np.mean(found) for found in rows.values()])
    deviations = np.array([max(float(np.std(found)), _ALONE) / len(found) ** 0.5 for found in rows.values()])
    return corrections_of(tuple(rows), means, deviations)


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """The ``x`` near ``start`` with the least sum of squared residuals."""
    x, now, damping = start, residuals(start), 1e-3
    for _ in range(_MAX_STEPS):
        slopes = np.stack([residuals(x + _DIFFERENCE * unit) - now for unit in np.eye(len(x))], axis=1)
        slopes /= _DIFFERENCE
        square, gradient = slopes.T @ slopes, slopes.T @ now
        while damping < 1e6:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -gradient)
            tried = residuals(x + step)
            if tried @ tried < now @ now:
                break
            damping *= 4
        else:
            return x
        gained = 1 - (tried @ tried) / (now @ now)
        x, now, damping = x + step, tried, damping / 4
        if gained < _ENOUGH:
            break
    return x
