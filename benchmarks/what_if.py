"""Claim: what another setting would bring is known without measuring.

Thirty changes of limit, batch, optimizer, network and number of ranks, for three models: the plan that
``what_if`` finds from one plan's own measurements, beside the plan of a measurement made anew under the
change. Time and peak are those that the fresh measurement predicts for the answer's decisions, so that errors
are those of what was not measured, and those of measuring twice: a row without any change for each model,
which is not counted, shows how far two measurements of one machine are apart. What is asked is measured again
before every second change, as the machine's speed drifts; not for another network or number of ranks.

    python -m benchmarks.what_if [--quick] [--json FILE]
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from osdp import DeviceInfo, InfeasibleError, Mode, Plan, Training, make_plan, what_if
from osdp.cost.evaluate import evaluate
from osdp.cost.sharding.shard_groups import shard_groups_of
from osdp.plan.choices import choice_of_operators
from osdp.plan.sharding import Route, Unit

MODELS = ("gpt2-wide", "bert-128", "convnext")
BATCH, FRACTION = 8, 0.5
FRACTIONS = (0.15, 0.8, None)
BATCHES = (4, 16)
OPTIMIZERS = ("SGD", "RMSprop")
#: Networks between two hosts, in Mbit/s.
NETWORKS = (200, 1000)
TIMEOUT = 900
UNCHANGED = "nothing changed"


def asked(case: str, limit: int | str, **options: Any) -> Plan:
    """The plan that changes are asked of, measured now."""
    from benchmarks.support.models import CASES

    model, sample = CASES[case].model(), CASES[case].sample(BATCH)
    return make_plan(model, sample, limit, training=Training(local_batch=BATCH), cache_dir=None, **options)


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
    plan = asked(case, limits[str(FRACTION)])
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
    from benchmarks.support.models import CASES

    del rank
    plan = Plan.load(path)
    found = []
    for index, change in enumerate(changes):
        if len(changes) > 1 and not index % 2:
            plan = asked(case, plan.memory_limit)
        try:
            answer: Plan | None = what_if(plan, **change)
        except InfeasibleError:
            answer = None
        batch = change.get("local_batch", BATCH)
        training = Training(local_batch=batch, optimizer=change.get("optimizer", "AdamW"))
        model, sample = CASES[case].model(), CASES[case].sample(batch)
        limit = change.get("memory_limit", plan.memory_limit)
        try:
            fresh: Plan | None = make_plan(model, sample, limit, training=training, cache_dir=None)
        except InfeasibleError:
            fresh = None
        if answer is None or fresh is None:
            found.append({"same_decisions": answer is fresh, "fits": [answer is not None, fresh is not None]})
            continue
        basis = fresh.basis
        assert basis is not None
        same = on_routes_of(basis.device, answer)
        judged = evaluate(same, basis.profiles[0], basis.device, answer.training, basis.model_desc)
        wanted, got = (decisions(each, world_size) for each in (fresh, answer))
        differ = {f"{got[name]} for {wanted[name]}" for name in got if got[name] != wanted[name]}
        found.append(
            {
                "same_decisions": not differ,
                "differ": sorted(differ),
                "time_error": answer.predicted.step_seconds / judged.step_seconds - 1,
                "peak_error": answer.predicted.peak_bytes / judged.peak_bytes - 1,
                "over_fresh": judged.step_seconds / fresh.predicted.step_seconds - 1,
                "doubts": list(basis.device.doubts),
            }
        )
    return found


def decisions(plan: Plan, ranks: int) -> dict[str, str]:
    """What is decided for each operator; on one rank nothing is sharded, whatever its mode."""
    found = choice_of_operators(plan.sharding)
    return (
        found if ranks > 1 else {name: word.replace("FULL_SHARD", "NO_SHARD") for name, word in found.items()}
    )


def on_routes_of(device: DeviceInfo, plan: Plan) -> Plan:
    """The plan with the routes that were found to be the fastest ones here, for which there are links."""
    whole = shard_groups_of(device)[0].route

    def route(unit: Unit) -> Route:
        if unit.mode is Mode.NO_SHARD or unit.group_size:
            return unit.route
        # What steps in shards gathers nothing by messages.
        return Route.EXCHANGE if unit.mode is Mode.SHARD_OPTIMIZER and whole.by_exchange else whole

    return plan.with_sharding(units=tuple(replace(unit, route=route(unit)) for unit in plan.units))


def rows_of(case: str, options: Options, folder: Path) -> list[Row]:
    """All changes of one model."""
    path = str(folder / f"{case}.json")
    limits = launch("benchmarks.what_if:base", 2, {"case": case, "path": path}, timeout=TIMEOUT)[0]
    # Each group of changes, the network and the ranks that it is measured on.
    here: list[dict[str, Any]] = [{}] + [{"memory_limit": limits[str(f)]} for f in FRACTIONS]
    here += [{"local_batch": batch} for batch in BATCHES]
    here += [{"optimizer": name} for name in OPTIMIZERS]
    groups: list[tuple[int | None, int, list[dict[str, Any]]]] = [(None, 2, here)]
    if not options.quick:
        groups += [(mbit * 10**6, 2, [{"bandwidth": mbit * 1e6 / 8}]) for mbit in NETWORKS]
        groups.append((None, 1, [{"ranks": 1}]))
    rows: list[Row] = []
    for network, ranks, changes in groups:
        arguments = {"case": case, "path": path, "changes": changes}
        names = [
            f"{case}, {', '.join(f'{k}={v}' for k, v in change.items()) or UNCHANGED}" for change in changes
        ]
        worker = "benchmarks.what_if:compare"
        try:
            found = launch_over(network, worker, ranks, arguments, timeout=TIMEOUT)[0]
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
