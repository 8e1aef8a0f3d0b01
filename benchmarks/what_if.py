"""Claim: what another setting would bring is known without measuring.

Thirty changes of limit, batch, optimizer, network and number of ranks, for three models: the plan that
``what_if`` finds from one plan's own measurements, beside the plan of a measurement made anew under the
change. Time and peak are those that the fresh measurement predicts for the answer's decisions, so that errors
are those of what was not measured, and those of measuring twice: a row without any change for each model,
which is not counted, shows how far two measurements of one machine are apart.

On a machine that shares its host the speed changes by a fifth within seconds, for whatever is measured then.
So for each change the segments of the plan that is asked and those under the change are measured in turns,
run by run; the optimizer and the links of both one after the other, but for another network, whose session
has no other. All of that three times, of which the one with the middle error of time counts. One rank alone
and both measure in turns, of which the fastest of each counts: what else the machine does slows one of two
ranks more often than one alone. Peaks of another batch are those of a model that is traced with it.

    python -m benchmarks.what_if [--quick] [--json FILE]
"""

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.support import harness
from benchmarks.support.candidates import live_mesh, on_routes_of
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from osdp import DeviceInfo, InfeasibleError, Mode, ModelDesc, Plan, Training, make_plan, what_if
from osdp.comm.objects import broadcast_object
from osdp.cost.evaluate import evaluate
from osdp.hardware.profile import Profile
from osdp.plan.choices import choice_of_operators
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.measure import profile_model, profile_trainings
from osdp.profiler.optimizer import profile_optimizer

MODELS = ("gpt2-wide", "bert-128", "convnext")
BATCH, FRACTION = 8, 0.5
FRACTIONS = (0.15, 0.8, None)
BATCHES = (4, 16)
OPTIMIZERS = ("SGD", "RMSprop")
#: Networks between two hosts, in Mbit/s.
NETWORKS = (200, 1000)
#: Times that a change and what is asked of are measured; for another number of ranks, turns within one time.
TIMES = 3
TURNS = 5
TIMEOUT = 2700
UNCHANGED = "nothing changed"


def base(rank: int, world_size: int, *, case: str, path: str) -> dict[str, int]:
    """Worker: the plan that everything is asked of, saved; and the limits of its model."""
    from benchmarks.support.models import CASES

    del world_size
    model, sample = CASES[case].model(), CASES[case].sample(BATCH)
    training = Training(local_batch=BATCH)
    peaks = [
        make_plan(model, sample, "1TiB", training=training, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ]
    limits = {str(f): limit_of(f, *peaks) for f in (*FRACTIONS, FRACTION)}
    plan = make_plan(model, sample, limits[str(FRACTION)], training=training, cache_dir=None)
    if rank == 0:
        plan.save(path)
    return limits


def limit_of(fraction: float | None, low: int, high: int) -> int:
    """A limit as part of the way from everything sharded to everything replicated."""
    return 2**40 if fraction is None else int(low + fraction * (high - low))


def compare(
    rank: int, world_size: int, *, case: str, path: str, changes: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Worker: for each change the answer, and what is measured anew."""
    del rank, world_size
    first, mesh = Plan.load(path), live_mesh()
    rows = []
    for change in changes:
        times = 1 if "ranks" in change else TIMES
        found = [beside_fresh(case, first, mesh, change) for _ in range(times)]
        fitted = sorted((row for row in found if "time_error" in row), key=lambda row: row["time_error"])
        others = [row for row in found if "time_error" not in row]
        middle = fitted[len(fitted) // 2] if len(fitted) > len(others) else others[0]
        rows.append(middle | {"time_errors": [row.get("time_error") for row in found]})
    return rows


def beside_fresh(case: str, first: Plan, mesh: DeviceMesh, change: dict[str, Any]) -> dict[str, Any]:
    """The answer to one change, beside the plan of what is measured under it.

    Args:
        case: Name of the model.
        first: The plan that was measured at first.
        mesh: The ranks of this session.
        change: Arguments of ``what_if``.
    """
    from benchmarks.support.models import CASES

    was = first.basis
    assert was is not None
    batch, ranks = change.get("local_batch", BATCH), change.get("ranks", mesh.size())
    training = Training(local_batch=batch, optimizer=change.get("optimizer", "AdamW"))
    model, desc = CASES[case].model(), was.model_desc

    def profiled(model_desc: ModelDesc, *trainings: Training) -> list[Profile]:
        found = profile_trainings(model, model_desc, trainings=trainings, mesh=mesh, progress=False)
        return broadcast_object(found)

    # Under the change, and as before, when the change was not known.
    as_before, there = Training(local_batch=BATCH), was.device
    device = DeviceInfo.detect(change.get("memory_limit", first.memory_limit), cache_dir=None)
    if "bandwidth" not in change:
        there = DeviceInfo.detect(first.memory_limit, cache_dir=None)
    if ranks == mesh.size():
        here, before = profiled(desc, training, replace(training, local_batch=BATCH))
        optimizer = profile_optimizer(as_before, device="cpu", mesh=mesh)
        before = replace(before, optimizer=broadcast_object(optimizer))
    else:
        device = DeviceInfo(memory_limit=first.memory_limit, measured=True)
        turns = [(alone(model, desc, training, mesh), *profiled(desc, as_before)) for _ in range(TURNS)]
        here, before = (min(found, key=compute) for found in zip(*turns, strict=True))
    plan = make_plan(None, desc, there, training=as_before, profile=before)
    answer = or_none(what_if, plan, **change)
    fresh = or_none(make_plan, None, desc, device, training=training, profile=here)
    if answer is None or fresh is None:
        return {"same_decisions": answer is fresh, "fits": [answer is not None, fresh is not None]}
    basis = fresh.basis
    assert basis is not None
    same = on_routes_of(basis.device, answer)
    judged = evaluate(same, basis.profiles[0], basis.device, answer.training, basis.model_desc)
    peak = judged.peak_bytes
    if batch != BATCH:
        traced = ModelDesc.from_module(model, CASES[case].sample(batch))
        (own,) = profiled(traced, training)
        peak = evaluate(same, own, basis.device, answer.training, traced).peak_bytes
    wanted, got = (decisions(each, ranks) for each in (fresh, answer))
    differ = {f"{got[name]} for {wanted[name]}" for name in got if got[name] != wanted[name]}
    return {
        "same_decisions": not differ,
        "differ": sorted(differ),
        "time_error": answer.predicted.step_seconds / judged.step_seconds - 1,
        "peak_error": answer.predicted.peak_bytes / peak - 1,
        "over_fresh": judged.step_seconds / fresh.predicted.step_seconds - 1,
        "doubts": list(basis.device.doubts),
    }


def alone(model: nn.Module, model_desc: ModelDesc, training: Training, mesh: DeviceMesh) -> Profile:
    """What the first rank measures while the others wait; all of them get it."""
    single = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("ranks", "alone"))["alone"]
    found = None
    if mesh.get_rank() == 0:
        cache = MeasurementCache(None, single.get_group())
        found = profile_model(model, model_desc, training=training, mesh=single, cache=cache, progress=False)
    return cast(Profile, broadcast_object(found))


def compute(profile: Profile) -> float:
    """Seconds of all distinct segments."""
    return sum(each.forward.seconds + each.backward.seconds for each in profile.by_signature.values())


def or_none(plan: Callable[..., Plan], *arguments: Any, **options: Any) -> Plan | None:
    """What ``plan`` returns for these, or ``None`` if nothing fits."""
    try:
        return plan(*arguments, **options)
    except InfeasibleError:
        return None


def decisions(plan: Plan, ranks: int) -> dict[str, str]:
    """What is decided for each operator; on one rank nothing is sharded, whatever its mode."""
    found = choice_of_operators(plan.sharding)
    if ranks > 1:
        return found
    sharded = re.compile("|".join(mode.value for mode in Mode if mode is not Mode.NO_SHARD))
    return {name: sharded.sub(Mode.NO_SHARD.value, word) for name, word in found.items()}


def rows_of(case: str, options: Options, folder: Path) -> list[Row]:
    """All changes of one model."""
    path = str(folder / f"{case}.json")
    limits = launch("benchmarks.what_if:base", 2, {"case": case, "path": path}, timeout=TIMEOUT)[0]
    # Each group of changes, and the network that it is measured on.
    here: list[dict[str, Any]] = [{}] + [{"memory_limit": limits[str(f)]} for f in FRACTIONS]
    here += [{"local_batch": batch} for batch in BATCHES]
    here += [{"optimizer": name} for name in OPTIMIZERS]
    groups: list[tuple[int | None, list[dict[str, Any]]]] = [(None, here)]
    if not options.quick:
        here.append({"ranks": 1})
        groups += [(mbit * 10**6, [{"bandwidth": mbit * 1e6 / 8}]) for mbit in NETWORKS]
    rows: list[Row] = []
    for network, changes in groups:
        arguments = {"case": case, "path": path, "changes": changes}
        names = [
            f"{case}, {', '.join(f'{k}={v}' for k, v in change.items()) or UNCHANGED}" for change in changes
        ]
        worker = "benchmarks.what_if:compare"
        try:
            found = launch_over(network, worker, 2, arguments, timeout=TIMEOUT)[0]
        except NetworkUnavailableError as error:
            rows += [{"name": name, "reason": str(error)} for name in names]
        except WorkerError as error:
            rows += [{"name": name, "error": str(error)} for name in names]
        else:
            rows += [{"name": name, **row} for name, row in zip(names, found, strict=True)]
    return rows


def measure(options: Options) -> Result:
    result = Result(options, world_size=2, backend="gloo")
    models = MODELS[:1] if options.quick else MODELS
    with tempfile.TemporaryDirectory() as folder:
        for case in harness.progress(models, len(models), "what_if"):
            result.add(*rows_of(case, options, Path(folder)))
    changed = [row for row in result.rows if not row["name"].endswith(UNCHANGED)]
    measured = [row for row in changed if "time_error" in row]
    result.summary = {
        "cases": len(changed),
        "same_decisions": sum(row.get("same_decisions", False) for row in changed),
        "worst_time_error": max((abs(row["time_error"]) for row in measured), default=None),
        "worst_peak_error": max((abs(row["peak_error"]) for row in measured), default=None),
        "worst_over_fresh": max((row["over_fresh"] for row in measured), default=None),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("what_if", __doc__, arguments))
    columns = ["", "same", "time error", "peak error", "over fresh", ""]
    keys = ("same_decisions", "time_error", "peak_error", "over_fresh", "error")
    cells = ([row["name"], *(row.get(key) for key in keys)] for row in result.rows)
    harness.table("what_if beside planning from a fresh measurement", columns, cells)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
