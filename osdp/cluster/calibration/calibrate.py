"""Calibration: fit the coefficients of the time model to measured steps.

With r_i the relative errors of the steps and x_j the logarithms of the coefficients, the fit minimises ::

    sum_i r_i^2 / sqrt(r_i^2 + d^2) / s  +  sum_j ((x_j - p_j) / w_j)^2

The first sum is close to the absolute errors, so that outliers that no coefficient explains do not distort
the others; s is a typical error. The second sum is a prior: it keeps each coefficient near its published
value (p), as firmly as that is known (w). A coefficient that the measurements do not determine stays at its
published value, so that small models predict large ones by physics where not by measurement. The remaining
residuals are interpolated between the measured layers (:mod:`osdp.cluster.cost.corrections`). Solved by
Levenberg-Marquardt steps (Moré, "The Levenberg-Marquardt algorithm", 1978) from p: a local optimum, not
proven global; the same rows give the same answer.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.calibration.measured_step import MeasuredStep
from osdp.cluster.calibration.step_model import Fitted, Setting, StepModel
from osdp.cluster.cost.corrections import ALONE, Correction, LayerSize, corrections_of, deviation_at
from osdp.cluster.cost.rates import PUBLISHED, DeviceEfficiencies, Efficiencies
from osdp.cluster.hardware import Cluster, NetworkLink, NodeGroup
from osdp.codec import Savable

Floats = NDArray[np.float64]

#: Relative error below which errors count squared, and a typical relative error: d and s above.
_SMALL, _TYPICAL = 0.02, 0.05
#: Coefficients of each kind of GPU with its host, and those of all of them together.
OF_DEVICES = ("matrix_share", "unaligned_share", "memory_share", "call_seconds", "blend")
SHARED = ("sum_seconds", "step_seconds")
#: Prior standard deviation of each coefficient's logarithm: w above.
_SPREAD = {
    "matrix_share": 0.15,
    "unaligned_share": 0.5,
    "memory_share": 0.25,
    "call_seconds": 0.3,
    "blend": 0.5,
    "sum_seconds": 1.0,
    "step_seconds": 1.0,
    "bandwidth": 0.4,
    "latency": 0.5,
}
#: Start values of coefficients without a published value: almost no effect.
_START = {"blend": 0.2, "sum_seconds": 3e-5, "step_seconds": 5e-4, "latency": 1e-6}
#: Levenberg-Marquardt: maximum iterations, relative gain at which to stop, and step of finite differences.
_MAX_STEPS, _ENOUGH, _DIFFERENCE = 30, 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class FittedLinks:
    """Links of a kind of node that measured steps ran on.

    Attributes:
        node: Name of the kind.
        inside: Link between devices of a node.
        outside: Link between a node and the network; ``None`` if no step ran on several nodes.
    """

    node: str
    inside: NetworkLink
    outside: NetworkLink | None


@dataclass(frozen=True, slots=True)
class Calibration(Savable):
    """Coefficients fitted to measured steps, and their cross-validation error.

    Attributes:
        links: Links of each kind of node that the steps ran on.
        rates: Efficiencies of devices and hosts.
        steps: Number of steps in the fit.
        mean_error: Mean absolute relative error of held-out steps.
        median_error: Median absolute relative error of held-out steps.
        folds: Number of folds of the cross-validation.
        flash: Whether those steps used FlashAttention, which does not store its scores.
    """

    links: tuple[FittedLinks, ...]
    rates: Efficiencies
    steps: int
    mean_error: float
    median_error: float
    folds: int
    flash: bool

    def apply_to(self, cluster: Cluster) -> Cluster:
        """The cluster with the fitted links.

        Raises:
            ValueError: It has nodes of a kind that the steps did not run on.
        """
        known = {links.node: links for links in self.links}
        others = [group.node.name for group in cluster.groups if group.node.name not in known]
        if others:
            raise ValueError(
                f"the calibration is of nodes {', '.join(map(repr, known))}, the cluster has "
                f"{', '.join(others)} too; measure steps there, or plan without it"
            )

        def fitted(group: NodeGroup) -> NodeGroup:
            links = known[group.node.name]
            outside = links.outside or group.node.outside
            return replace(group, node=replace(group.node, inside=links.inside, outside=outside))

        return Cluster(tuple(map(fitted, cluster.groups)))


def calibrate(
    steps: Sequence[MeasuredStep], setting: Setting, *, rates: Efficiencies = PUBLISHED, folds: int = 5
) -> Calibration:
    """Fit the coefficients to all of ``steps``, and estimate their error by cross-validation.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        rates: Prior coefficients.
        folds: Number of folds of the cross-validation.

    Raises:
        ValueError: There are fewer steps than folds, or fewer folds than two.
    """
    errors = np.abs(cross_validation(steps, setting, rates=rates, folds=folds))
    found, model = fit(steps, setting, rates=rates), StepModel(steps, setting)
    quantile = error_quantile(held_out_scores(steps, setting, rates=rates, folds=folds))
    return Calibration(
        links=tuple(
            FittedLinks(node.name, node.inside, node.outside if model.spans_nodes(kind) else None)
            for kind, node in enumerate(group.node for group in found.cluster.groups)
            if model.uses(kind)
        ),
        rates=replace(found.rates, error_quantile=quantile),
        steps=len(steps),
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        folds=folds,
        flash=setting.flash,
    )


def fit(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    *,
    rates: Efficiencies = PUBLISHED,
    corrected: bool = True,
) -> Fitted:
    """Fit the coefficients, and the links in and between nodes, to ``steps``.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        rates: Prior coefficients.
        corrected: Whether to interpolate the remaining residuals.

    Raises:
        ValueError: There are no steps.
    """
    if not steps:
        raise ValueError("a calibration needs at least 1 measured step, got none")
    return _fit(StepModel(steps, setting), rates, corrected)


def relative_errors(steps: Sequence[MeasuredStep], setting: Setting, fitted: Fitted) -> Floats:
    """Modelled over measured seconds, minus one; shape ``(steps,)``."""
    model = StepModel(steps, setting)
    errors: Floats = model.seconds(fitted) / model.measured - 1.0
    return errors


def cross_validation(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    *,
    rates: Efficiencies = PUBLISHED,
    folds: int = 5,
    corrected: bool = True,
) -> Floats:
    """Relative error of each step, predicted by a fit to the other folds of a random division.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        rates: Prior coefficients.
        folds: Number of folds.
        corrected: Whether to interpolate the remaining residuals.

    Returns:
        Relative errors, shape ``(steps,)``.

    Raises:
        ValueError: There are fewer steps than folds, or fewer folds than two.
    """
    if not 2 <= folds <= len(steps):
        raise ValueError(
            f"{len(steps)} steps cannot be divided into {folds} folds: at least {max(folds, 2)} steps and 2 "
            "folds are needed"
        )
    # A fixed seed, so that the same rows give the same error.
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
    rates: Efficiencies = PUBLISHED,
) -> Floats:
    """Relative errors of the steps that ``held`` selects, predicted by a fit to all others.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        held: Whether to hold out a step.
        rates: Prior coefficients.

    Returns:
        Relative errors of the held-out steps, in order.

    Raises:
        ValueError: It selects all steps or none.
    """
    picked = np.array([held(step) for step in steps])
    if picked.all() or not picked.any():
        raise ValueError(
            f"{int(picked.sum())} of {len(steps)} steps are left out; at least 1 must be left out and 1 kept"
        )
    return _held_out(steps, setting, picked, rates)


def layer_of(step: MeasuredStep) -> LayerSize:
    """The kind of layer of a step."""
    return LayerSize(step.hidden, step.heads, step.sequence, step.tp, step.samples)


def degrees_of(step: MeasuredStep) -> tuple[int, int, int]:
    """The degrees of a step: tp, dp and pp."""
    return step.tp, step.dp, step.pp


#: What steps have in common that are held out together, where the error of new ones is asked for.
GROUPS: dict[str, Callable[[MeasuredStep], Hashable]] = {"layer": layer_of, "degrees": degrees_of}


def held_out_scores(
    steps: Sequence[MeasuredStep], setting: Setting, *, rates: Efficiencies = PUBLISHED, folds: int = 5
) -> Floats:
    """Errors of steps that are held out with all others of their kind of layer, and of their degrees.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        rates: Prior coefficients.
        folds: Number of folds into which the groups are divided, or as many as there are.

    Returns:
        Logarithms of measured over modelled seconds, in standard deviations; shape ``(up to 2 steps,)``.
    """
    scores = []
    for group_of in GROUPS.values():
        groups = list(dict.fromkeys(group_of(step) for step in steps))
        number = min(folds, len(groups))
        if number < 2:
            continue
        # A fixed seed, so that the same rows give the same error.
        part = dict(zip(groups, np.random.default_rng(0).permutation(len(groups)) % number, strict=True))
        of_step = np.array([part[group_of(step)] for step in steps])
        for fold in range(number):
            logs, deviations = held_out_errors(steps, setting, of_step == fold, rates)
            scores.append(logs / deviations)
    return np.concatenate(scores) if scores else np.zeros(0)


def error_quantile(scores: Floats) -> float:
    """90 % quantile of absolute scores; of normally distributed ones where there are none."""
    return float(np.quantile(np.abs(scores), 0.9)) if len(scores) else 1.645


def held_out_errors(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    held: NDArray[np.bool_],
    rates: Efficiencies = PUBLISHED,
) -> tuple[Floats, Floats]:
    """Logarithms of measured over modelled seconds of the held-out steps, and their standard deviations.

    Args:
        steps: Measured steps.
        setting: Settings that all steps share.
        held: Which of them are predicted by a fit to the others; shape ``(steps,)``.
        rates: Prior coefficients.
    """
    fitted = fit([step for step, out in zip(steps, held, strict=True) if not out], setting, rates=rates)
    picked = [step for step, out in zip(steps, held, strict=True) if out]
    logs: Floats = -np.log(1.0 + relative_errors(picked, setting, fitted))
    kinds = {layer_of(step) for step in picked}
    deviation = {kind: deviation_at(fitted.rates.corrections, kind) for kind in kinds}
    return logs, np.array([deviation[layer_of(step)] for step in picked])


def _held_out(
    steps: Sequence[MeasuredStep],
    setting: Setting,
    held: NDArray[np.bool_],
    rates: Efficiencies,
    corrected: bool = True,
) -> Floats:
    """Relative errors of the steps in ``held``, predicted by a fit to the others."""
    others = [step for step, out in zip(steps, held, strict=True) if not out]
    fitted = fit(others, setting, rates=rates, corrected=corrected)
    picked = [step for step, out in zip(steps, held, strict=True) if out]
    return relative_errors(picked, setting, fitted)


def _fit(model: StepModel, rates: Efficiencies, corrected: bool) -> Fitted:
    """Fit the logarithms of all coefficients at once, with ``rates`` and the links of the nodes as prior."""
    # 1. The prior, in logarithms, by part of the model: what all share, each kind of GPU, each kind of link.
    groups = model.setting.cluster.groups
    kinds = [kind for kind in range(len(groups)) if model.uses(kind)]
    gpus = list(dict.fromkeys(groups[kind].node.gpu.name for kind in kinds))
    prior: dict[tuple[str, str], float] = {("", name): getattr(rates, name) for name in SHARED}
    prior |= {(gpu, name): getattr(rates.on(gpu), name) for gpu in gpus for name in OF_DEVICES}
    for kind in kinds:
        node = groups[kind].node
        prior |= {(f"inside {kind}", name): value for name, value in asdict(node.inside).items()}
        if model.spans_nodes(kind):
            prior |= {(f"outside {kind}", name): value for name, value in asdict(node.outside).items()}
    start = np.log([value or _START[name] for (_, name), value in prior.items()])
    spread = np.array([_SPREAD[name] for _, name in prior])
    measured = model.measured

    # 2. Residuals: weighted errors of the steps, then distances from the prior; (rows + coefficients,).
    def coefficients(x: Floats) -> Fitted:
        found: dict[str, dict[str, float]] = {}
        for (part, name), value in zip(prior, np.exp(x).tolist(), strict=True):
            found.setdefault(part, {})[name] = min(value, 1.0) if name == "blend" else value
        own = tuple(DeviceEfficiencies(gpu, **found[gpu]) for gpu in gpus)
        # Of one kind of GPU they are those of all.
        first: dict[str, Any] = found[""] | found[gpus[0]]
        shared = Efficiencies(**first, devices=own if len(gpus) > 1 else ())

        def fitted(kind: int, group: NodeGroup) -> NodeGroup:
            node = group.node
            for side in ("inside", "outside"):
                if own := found.get(f"{side} {kind}"):
                    link = NetworkLink(**own)
                    node = replace(node, inside=link) if side == "inside" else replace(node, outside=link)
            return replace(group, node=node)

        return Fitted(shared, Cluster(tuple(fitted(kind, group) for kind, group in enumerate(groups))))

    def residuals(x: Floats) -> Floats:
        error = model.seconds(coefficients(x)) / measured - 1.0
        # The square of ``weighed`` is a step's term of the objective above.
        weighed = error / np.sqrt(_TYPICAL * np.sqrt(error**2 + _SMALL**2))
        return np.concatenate([weighed, (x - start) / spread])

    # 3. Fit, then explain what is left by corrections per layer.
    found = coefficients(_least_squares(residuals, start))
    if not corrected:
        return found
    return replace(found, rates=replace(found.rates, corrections=_corrections(model, found)))


def _corrections(model: StepModel, fitted: Fitted) -> tuple[Correction, ...]:
    """Corrections of the residuals that the coefficients leave, one for each measured layer."""
    logs = np.log(model.measured / model.seconds(fitted))
    cases = [layer_of(step) for step in model.steps]
    rows: dict[LayerSize, list[float]] = {}
    for case, log in zip(cases, logs.tolist(), strict=True):
        rows.setdefault(case, []).append(log)
    means = np.array([np.mean(found) for found in rows.values()])
    # Standard errors of the means; a single step is as uncertain as steps of one layer differ at least.
    deviations = np.array([max(float(np.std(found)), ALONE) / len(found) ** 0.5 for found in rows.values()])
    return corrections_of(tuple(rows), means, deviations)


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Minimize the sum of squared residuals from ``start`` (Levenberg-Marquardt); a local minimum."""
    x, now, damping = start, residuals(start), 1e-3
    for _ in range(_MAX_STEPS):
        # Jacobian by forward differences, (residuals, coefficients).
        slopes = np.stack([residuals(x + _DIFFERENCE * unit) - now for unit in np.eye(len(x))], axis=1)
        slopes /= _DIFFERENCE
        square, gradient = slopes.T @ slopes, slopes.T @ now
        # Raise the damping until a step improves; give up where only tiny steps are left.
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
