"""Claim: the planner's time model meets measured training steps, and larger ones than it was fitted to.

The data are measured iterations in vTrain's columns (Bang et al., MICRO 2024; see
:data:`osdp.cluster.calibration.measured_step.COLUMNS`), on nodes of eight A100 with NVSwitch inside and 800
Gbit/s between them, by Megatron-LM's kind of program: GPT with a vocabulary of 50,257, which is not padded,
attention that writes its scores, 1F1B, Adam in mixed precision. The rows do not say what was recomputed; all
are taken to be set up alike, with full recomputation if one of them would not fit 80 GB otherwise, and with
none if all do. Steps of other machines are judged with ``--cluster``, the file of these, of one kind or
several: a step ran on its first nodes, with as many layers in each stage, or items where the stages do not
divide the layers. There the vocabulary is padded, as by Megatron-LM and what is built on it.

- Zero-shot: the published rates (:data:`osdp.cluster.cost.rates.PUBLISHED`); nothing is fitted to the data.
- Cross-validation: five parts, each predicted by coefficients fitted to the other four, with and without
  what those leave of measured layers (:mod:`osdp.cluster.cost.corrections`); the summary has it with.
- Intervals: each kind of layer, and each tp, dp and pp, is left out in turn and predicted by a fit to all
  others, with the 90 % interval that a calibration to these has: it follows from the errors of all other
  steps that were left out. Coverage is the share of steps within, the half-width relative to the prediction.
- Leave-out: the larger half of the numbers of GPUs, hidden sizes or microbatches, predicted by what was
  fitted to the smaller ones.

vTrain's own error on its data (8.37 % on one node) is that of kernels profiled on the GPU and not fitted to
measured steps: it may be compared with zero-shot, which has not seen the GPU, and with nothing else here.

Errors are relative and absolute, their mean (MAPE) and median in the summary as fractions. Kendall's tau
compares the order of the predicted steps with that of the measured ones. Regret is by how much longer than
the fastest that layout took which is predicted to be the fastest, on average over all models and batches on
the same devices of which several layouts were measured.

    python -m benchmarks.planner_accuracy --data CSV [--cluster FILE] [--json FILE]
"""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from osdp.cluster.calibration.calibrate import (
    GROUPS,
    cross_validation,
    error_quantile,
    fit,
    held_out_errors,
    leave_out,
    relative_errors,
)
from osdp.cluster.calibration.measured_step import MeasuredStep, read_steps
from osdp.cluster.calibration.step_model import Fitted, Setting, assumed_recompute, nodes_used
from osdp.cluster.cost.rates import PUBLISHED
from osdp.cluster.file import load_cluster
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeGroup, NodeType

Floats = NDArray[np.float64]

#: The GPU is that of NVIDIA's A100 data sheet (2021). Inside a node an all-reduce over eight of them reaches
#: 229 GB/s with 1 GiB and takes 92.8 us with 1 MiB, 32 of them beside its 14 steps and its bytes (vTrain's
#: NCCL table). Between nodes 0.9 of what is installed are reached, after 20 us (calculon,
#: systems/a100_80g.json).
NODE = NodeType(
    name="8 x A100-80GB",
    gpu=Gpu("A100-80GB", 312e12, 81920 * 2**20, 2039e9, 108),
    devices=8,
    inside=NetworkLink(229e9, 4e-6),
    outside=NetworkLink(0.9 * 100e9, 2e-5),
)
#: As many nodes as any step needs. A tensor-parallel rank has ``vocab_size // world_size`` entries of the
#: embedding (vTrain's ``src/model/gpt_modeling.py``); logits of one rank, 50,257 for each token, take 2.7
#: times as long per FLOP in its steps as the 25,128 of each of two.
SETTING = Setting(Cluster((NodeGroup(NODE, 4096),)), pads_vocabulary=False)

#: Field of a step that is extrapolated, by its name in the summary.
LEFT_OUT = {"leave_out_gpus": "devices", "leave_out_hidden": "hidden", "leave_out_microbatch": "samples"}

FOLDS = 5


def kendall_tau(left: Floats, right: Floats) -> float | None:
    """Kendall's tau-b: pairs in the same order less pairs in opposite ones; ties count for neither."""
    same = pairs_left = pairs_right = 0.0
    for index in range(len(left) - 1):
        by_left = np.sign(left[index + 1 :] - left[index])
        by_right = np.sign(right[index + 1 :] - right[index])
        same += float(by_left @ by_right)
        pairs_left += float(np.abs(by_left).sum())
        pairs_right += float(np.abs(by_right).sum())
    return same / float(np.sqrt(pairs_left * pairs_right)) if pairs_left and pairs_right else None


def larger_half(steps: tuple[MeasuredStep, ...], field: str) -> set[int]:
    """The larger half of the distinct values of a field, rounded down."""
    values = sorted({getattr(step, field) for step in steps})
    return set(values[len(values) - len(values) // 2 :])


def mean_regret(steps: Sequence[MeasuredStep], predicted: Floats) -> float | None:
    """Mean of how much longer than the fastest layout the one took that is predicted to be the fastest.

    ``None`` if no two steps are of one model and batch on as many devices.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, s in enumerate(steps):
        alike = (s.devices, s.global_batch, s.hidden, s.heads, s.layers, s.sequence)
        groups.setdefault(alike, []).append(row)
    lost = [
        steps[min(rows, key=lambda row: predicted[row])].seconds / min(steps[row].seconds for row in rows) - 1
        for rows in groups.values()
        if len(rows) > 1
    ]
    return float(np.mean(lost)) if lost else None


def error_row(name: str, errors: Floats) -> Row:
    """What is shown of relative errors."""
    absolute = np.abs(errors)
    return {
        "name": name,
        "steps": len(errors),
        "mape": float(absolute.mean()),
        "median": float(np.median(absolute)),
        "p95": float(np.percentile(absolute, 95)),
        "bias": float(errors.mean()),
    }


def measure(options: Options) -> Result:
    """Zero-shot, cross-validated and left out."""
    result = Result(options)
    steps = read_steps(options.data or "")
    setting = SETTING
    if options.cluster is not None:
        setting = replace(setting, cluster=load_cluster(options.cluster), pads_vocabulary=True)
    setting = replace(setting, recompute=assumed_recompute(steps, setting))
    rows: dict[str, Row] = {}
    measured = np.array([step.seconds for step in steps])
    folds = min(FOLDS, len(steps))
    names = ("zero_shot", "coefficients_alone", "cross_validation", *LEFT_OUT)
    for name in harness.progress(names, len(names), "fits"):
        if name in LEFT_OUT:
            row = _extrapolated(name, steps, setting)
        elif name == "zero_shot" or folds > 1:
            if name == "zero_shot":
                errors = relative_errors(steps, setting, Fitted(PUBLISHED, setting.cluster))
            else:
                corrected = name == "cross_validation"
                errors = cross_validation(steps, setting, folds=folds, corrected=corrected)
            predicted = (1.0 + errors) * measured
            row = error_row(name, errors)
            row |= {
                "kendall_tau": kendall_tau(predicted, measured),
                "regret": mean_regret(steps, predicted),
            }
        else:
            row = dict.fromkeys(("mape", "median", "kendall_tau", "regret"))
            row |= {"name": name, "reason": "a single step cannot be predicted from others"}
        rows[name] = row
        result.add(row)
    covered = interval_rows(steps, setting)
    result.add(*covered.values())
    fitted = fit(steps, setting)
    result.add(
        {
            "name": "coefficients",
            "recompute": str(setting.recompute),
            # Of each kind, that steps on so many devices are taken to have run on.
            "nodes": repr({n: nodes_used(n, setting.cluster) for n in sorted({s.devices for s in steps})}),
            "rates": repr(replace(fitted.rates, corrections=())),
            "links": repr([(g.node.name, g.node.inside, g.node.outside) for g in fitted.cluster.groups]),
        }
    )
    result.summary = {
        "mape_zero_shot": rows["zero_shot"]["mape"],
        "kendall_tau_zero_shot": rows["zero_shot"]["kendall_tau"],
        "regret_zero_shot": rows["zero_shot"]["regret"],
        "mape_cv": rows["cross_validation"]["mape"],
        "median_cv": rows["cross_validation"]["median"],
        "kendall_tau": rows["cross_validation"]["kendall_tau"],
        "regret": rows["cross_validation"]["regret"],
        **{name: rows[name]["mape"] for name in LEFT_OUT},
        "interval_coverage": covered["degrees"]["coverage"],
        "interval_half_width": covered["degrees"]["median_half_width"],
        "interval_coverage_new_layers": covered["layer"]["coverage"],
        "interval_half_width_new_layers": covered["layer"]["median_half_width"],
    }
    return result


def interval_rows(steps: tuple[MeasuredStep, ...], setting: Setting) -> dict[str, Row]:
    """Coverage and width of the intervals of steps whose group is left out, by kind of group."""
    numbers, logs, deviations = {}, {}, {}
    for name, group_of in GROUPS.items():
        groups = [group_of(step) for step in steps]
        distinct = list(dict.fromkeys(groups))
        if len(distinct) < 2:
            continue
        number = np.array([distinct.index(group) for group in groups])
        found, spread = np.empty(len(steps)), np.empty(len(steps))
        for index in harness.progress(range(len(distinct)), len(distinct), f"{name} left out"):
            held = number == index
            found[held], spread[held] = held_out_errors(steps, setting, held)
        numbers[name], logs[name], deviations[name] = number, found, spread
    scores = {name: logs[name] / deviations[name] for name in numbers}
    rows: dict[str, Row] = {}
    for name in GROUPS:
        row: Row = {"name": f"intervals, {name} left out", "groups": 1, "coverage": None}
        rows[name] = row | {"median_half_width": None, "reason": "all steps are of one group"}
        if name not in numbers:
            continue
        factors = np.empty(len(steps))
        for index in range(numbers[name].max() + 1):
            held = numbers[name] == index
            others = np.concatenate([score[~held] for score in scores.values()])
            factors[held] = error_quantile(others) * deviations[name][held]
        rows[name] = row | {
            "groups": int(numbers[name].max()) + 1,
            "coverage": float(np.mean(np.abs(logs[name]) <= factors)),
            "median_half_width": float(np.median(np.sinh(factors))),
        }
    return rows


def _extrapolated(name: str, steps: tuple[MeasuredStep, ...], setting: Setting) -> Row:
    field = LEFT_OUT[name]
    held = larger_half(steps, field)
    if not held:
        return {"name": name, "mape": None, "reason": f"all steps have the same {field}"}
    errors = leave_out(steps, setting, lambda step: getattr(step, field) in held)
    return error_row(f"{name} ({field} {', '.join(map(str, sorted(held)))})", errors)


def main(arguments: list[str] | None = None) -> int:
    """Fit, print and return the exit status."""
    options = harness.parse_options(
        "planner_accuracy",
        __doc__,
        arguments,
        data="CSV file of measured iterations, in vTrain's columns",
        cluster="YAML or JSON file of the machines they ran on; by default vTrain's",
    )
    try:
        result = measure(options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    columns = ["steps predicted", "steps", "MAPE", "median", "p95", "bias", "tau", "regret"]
    shown = [row for row in result.rows if "steps" in row]
    keys = ["name", "steps", "mape", "median", "p95", "bias", "kendall_tau", "regret"]
    cells = [[row.get(key) for key in keys] for row in shown]
    harness.table("relative errors of modelled steps", columns, cells)
    spreads = [row for row in result.rows if "coverage" in row]
    keys = ["name", "groups", "coverage", "median_half_width"]
    harness.table("90 % intervals", keys, [[row[key] for key in keys] for row in spreads])
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
