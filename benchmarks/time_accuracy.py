"""Claim: the predicted time of a step is the measured one, whatever the model, the plan and the network.

On CPU two ranks train under gloo, on one host or on two with limited uplinks. For each model, batch and
network several plans are made as a user makes them, uniform ones and searched ones under limits between
their peaks, and whole steps are timed in turn beside their predictions. Within such a group Kendall's tau
says whether predictions order the plans as times do; pairs whose times differ by 3 % or less do not count.

The speed of a machine that shares its host changes by a fifth within seconds. So steps and what predicts
them are measured in turns: the model is profiled and the links are measured before the steps and after each
third of them, and a prediction is the median of what all say of the plan, as the measured time is that of
its steps; the errors of the first alone, from which the plans were made, stand beside.

With ``--device cuda`` one device trains each model by itself and under a fake process group (all of FSDP2's
copies and hooks, no communication).

    python -m benchmarks.time_accuracy [--quick] [--json FILE] [--device cuda]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.support import harness
from benchmarks.support.baselines import reference_losses
from benchmarks.support.candidates import (
    UNLIMITED,
    live_mesh,
    make_setting,
    make_setting_together,
    on_routes_of,
)
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.memory_oracle import fake_group
from benchmarks.support.models import CASES, FULL_SIZE, QUICK_FULL_SIZE
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import alternate
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, InfeasibleError, Plan, Training
from osdp.cost.evaluate import evaluate

WORLD_SIZE = 2
UNIFORM = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
#: Limits of the searched plans, as parts of the way from the all-sharded to the all-replicated peak.
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Plans of a group that are enough for Kendall's tau, and the relative difference of times that counts.
ENOUGH, DIFFERENT = 6, 0.03
LOSS_TOLERANCE = 1e-3
#: About how long the slowest plan is timed: other programs come and go in bursts of half a second.
SECONDS, MOST_ROUNDS = 6.0, 40
#: Steps in a turn, and untimed ones before: a training takes its steps one after the other, and the first of
#: a turn finds its weights driven out of the caches by those of other plans (opt on two ranks: 7 % longer).
REPEATS, SETTLING = 4, 1
#: Parts of the steps, after each of which everything is measured again.
THIRDS = 3
TIMEOUT = 600


@dataclass(frozen=True, slots=True)
class Group:
    """Plans that are compared with each other.

    Attributes:
        case: Name of the model.
        network: Bits per second of the uplink of each of two hosts; ``None`` is one host, over loopback.
        local_batch: Samples of a rank.
    """

    case: str
    network: int | None
    local_batch: int

    @property
    def name(self) -> str:
        """For the table."""
        network = "loopback" if self.network is None else f"{self.network // 10**6} Mbit/s"
        return f"{self.case} x {self.local_batch}, {network}"


#: All families, and models unlike them (a large table, a convolutional stem), on all networks.
GROUPS = (
    Group("bert", None, 4),
    Group("opt", None, 2),
    Group("vit", None, 8),
    Group("resnet", None, 4),
    Group("mlp-table", None, 16),
    Group("llama", 10**9, 4),
    Group("transformer", 10**9, 8),
    Group("convnext", 10**9, 2),
    Group("mlp", 2 * 10**8, 32),
    Group("vit-stem", 2 * 10**8, 8),
)


def compare(rank: int, world_size: int, *, case: str, local_batch: int, rounds: int) -> dict[str, Any]:
    """Worker: predicted and measured seconds of all plans of a group."""
    del rank, world_size
    mesh = live_mesh()
    device = DeviceInfo.detect("1TiB", cache_dir=None)
    setting = make_setting_together(CASES[case], Training(local_batch=local_batch), mesh)
    plans = {strategy: setting.plan(device, strategy=strategy) for strategy in UNIFORM}
    high, _, low = (plans[strategy].predicted.peak_bytes for strategy in UNIFORM)
    for fraction in FRACTIONS:
        try:
            plan = setting.plan(device, int(low + fraction * (high - low)))
        except InfeasibleError:
            continue
        if all(_choices(plan) != _choices(other) for other in plans.values()):
            plans[f"searched {fraction}"] = plan
    steps = {name: setting.candidate(device, plan).prepare(mesh) for name, plan in plans.items()}
    # Losses are compared after few steps, as those of small batches drift apart.
    turns = take_turns(steps, rounds=1, warmup=3, repeats=REPEATS)
    slowest = torch.tensor(max(median(seconds) for seconds in turns.seconds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # as many rounds on every rank
    rounds = max(rounds, min(int(SECONDS / REPEATS / float(slowest)), MOST_ROUNDS))
    predicted = {name: [plan.predicted.step_seconds] for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    doubts = list(device.doubts)
    for _ in range(THIRDS):
        each = -(-rounds // THIRDS)
        part = take_turns(steps, rounds=each, warmup=0, repeats=REPEATS, settling=SETTLING)
        profile = make_setting_together(CASES[case], setting.training, mesh).profile
        now = DeviceInfo.detect("1TiB", cache_dir=None)
        doubts += now.doubts
        for name, plan in plans.items():
            seconds[name] += part.seconds[name]
            found = evaluate(on_routes_of(now, plan), profile, now, plan.training, setting.model_desc)
            predicted[name].append(found.step_seconds)
    return {
        "predicted": predicted,
        "units": {name: len(plan.units) for name, plan in plans.items()},
        "seconds": seconds,
        "losses": turns.losses,
        "steps": turns.steps,
        "doubts": list(dict.fromkeys(doubts)),
    }


def _choices(plan: Plan) -> object:
    return plan.units, plan.decisions, plan.recomputed


def rows_of(group: Group, rounds: int) -> list[Row]:
    """One row for each plan of a group."""
    arguments = {"case": group.case, "local_batch": group.local_batch, "rounds": rounds}
    try:
        found = launch_over(
            group.network, "benchmarks.time_accuracy:compare", WORLD_SIZE, arguments, timeout=TIMEOUT
        )[0]
    except NetworkUnavailableError as error:
        return [{"name": group.name, "reason": str(error)}]
    except WorkerError as error:
        return [{"name": group.name, "error": str(error)}]
    training = Training(local_batch=group.local_batch)
    expected = reference_losses(CASES[group.case], training, WORLD_SIZE, found["steps"])[-1]
    rows = []
    for name, predicted in found["predicted"].items():
        row = _row(f"{group.name}: {name}", median(predicted), found["seconds"][name])
        row |= {
            "predictions": predicted,
            "group": group.name,
            "units": found["units"][name],
            "doubts": found["doubts"],
        }
        row["error_before"] = predicted[0] / row["measured"] - 1
        row["loss_difference"] = abs(found["losses"][name] - expected) / abs(expected)
        if not row["loss_difference"] <= LOSS_TOLERANCE:
            row["error"] = f"loss {found['losses'][name]:.6f} is {expected:.6f} in a single process"
        rows.append(row)
    return rows


def alone(case: str, world_size: int, strategy: str, rounds: int) -> Row:
    """Predict and measure one model on one GPU, where nothing is communicated."""
    with fake_group(world_size):
        mesh = init_device_mesh("cuda", (world_size,))
        setting = make_setting(CASES[case], Training(local_batch=4), device="cuda", mesh=mesh)
        # What a unit costs besides moving data is measured as it would be on a live group.
        devices = DeviceInfo.detect(UNLIMITED, device="cuda", cache_dir=None)
        plan = setting.plan(devices, strategy=strategy)
        step = setting.candidate(devices, plan).build_step(mesh)
        seconds = alternate({case: step}, rounds=rounds, warmup=3, synchronize=torch.cuda.synchronize)[case]
    return _row(f"{case} {strategy} N={world_size}", plan.predicted.step_seconds, seconds)


def _row(name: str, predicted: float, seconds: list[float]) -> Row:
    measured = median(seconds)
    return {
        "name": name,
        "predicted": predicted,
        "measured": measured,
        "seconds": seconds,
        "relative_error": predicted / measured - 1,
    }


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Agreement of two orders, from -1 to 1, over the pairs whose measured times differ enough.

    Kendall's tau (Biometrika 30, 1938): the share of pairs in the same order less that in the other one.
    """
    signs = [
        _sign(predicted[i] - predicted[j]) * _sign(measured[i] - measured[j])
        for i, j in combinations(range(len(measured)), 2)
        if abs(measured[i] - measured[j]) > DIFFERENT * min(measured[i], measured[j])
    ]
    return fmean(signs) if signs else None


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def summarize(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """Mean absolute, worst and mean relative error, those before the steps, and the groups' mean tau.

    Rows whose losses are wrong do not count. On one device there are no groups, and nothing is said of them.
    """
    measured = [row for row in rows if "relative_error" in row and "error" not in row]
    if not measured:
        return dict.fromkeys(("points", "mape", "worst", "bias", "mean_tau_within_groups"))
    errors = [row["relative_error"] for row in measured]
    groups: dict[str, list[Row]] = {}
    for row in measured:
        if "group" in row:
            groups.setdefault(row["group"], []).append(row)
    errors_of_all = {
        "points": len(errors),
        "mape": fmean(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "bias": fmean(errors),
    }
    if not groups:
        return errors_of_all
    before = [row["error_before"] for row in measured]
    errors_of_all |= {"mape_before": fmean(map(abs, before)), "bias_before": fmean(before)}
    taus = [
        kendall_tau([row["predicted"] for row in group], [row["measured"] for row in group])
        for group in groups.values()
        if len(group) >= ENOUGH
    ]
    ordered = [tau for tau in taus if tau is not None]
    return errors_of_all | {"mean_tau_within_groups": fmean(ordered) if ordered else None}


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    if options.device == "cuda":
        ways = ((1, "NO_SHARD"), (8, "FULL_SHARD"), (64, "FULL_SHARD"))
        cases, ways = (QUICK_FULL_SIZE, ways[:2]) if options.quick else (FULL_SIZE, ways)
        points = [(case, *way) for case in cases for way in ways]
        result = Result(options, world_size=64, backend="fake")
        for case, world_size, strategy in harness.progress(points, len(points), "time_accuracy"):
            result.add(alone(case, world_size, strategy, 5 if options.quick else 20))
    else:
        groups = GROUPS[::4] if options.quick else GROUPS
        result = Result(options, world_size=WORLD_SIZE, backend="gloo")
        for group in harness.progress(groups, len(groups), "time_accuracy"):
            result.add(*rows_of(group, 2 if options.quick else 5))
    result.summary = summarize(result.rows)
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("time_accuracy", __doc__, arguments))
    keys = ("name", "predicted", "measured", "relative_error", "units", "doubts")
    harness.table("seconds of a step", keys, ([row.get(key) for key in keys] for row in result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
