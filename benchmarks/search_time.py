"""Claim: a plan is found in seconds, and HiGHS finds hardly a better one.

Shapes up to GPT-3-175B (96 layers) with eight batch sizes, and the case the original OSDP reports (48
layers, hidden 1024, 8 GiB on 8 devices, batches 1-3), which took it 39.8 s on this kind of machine; each with
slices and recomputation ("wide") and with sharding alone. A row of sharding alone counts with all its
batches, a wide one with its slowest.
Profiles are estimated, so no device is needed: "simulated" in every row. The time is that of pricing and
searching all batch sizes of a row.

Each problem is solved a second time with the same cuts loop but HiGHS (``scipy.optimize.milp``, relative
gap 0) in place of the search's own solver, in a process of its own; HiGHS may take :data:`MILP_SECONDS` for
each of its problems and hands on the best it has by then. The gap is by how much more samples per second
its plan has, negative where it is worse; the proven gap is the search's own bound. A comparison that does
not end is left out, and the row says so.

The largest wide searches are made under time limits, too, and models of thousands of small operators are
described and planned.

    python -m benchmarks.search_time [--quick] [--json FILE]
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.models import Case, bert, gpt2, llama
from osdp import DeviceInfo, Link, ModelDesc, Training, make_plan
from osdp.cost.sharding.problem import ShardingProblem, build_problem
from osdp.hardware.device_info import COLLECTIVES
from osdp.plan.deadline import Deadline
from osdp.plan.search_options import SHARDING, SLICES, SearchOptions
from osdp.profiler.roofline import estimate
from osdp.search.sharding.solve import min_peak, solve, solve_bounded
from osdp.text import format_bytes

GIB = 2**30
#: Seconds HiGHS may take for each of its problems, and how many of them a row may take in time.
MILP_SECONDS, QUICK_MILP_SECONDS = 5, 2
MILP_ROUNDS = 16
#: Time limits of a wide search, seconds.
SEARCHED_FOR, QUICK_SEARCHED_FOR = (1.0, 10.0), (1.0,)
#: Numbers of ``Linear(4, 4)``, of two parameters each.
SMALL, QUICK_SMALL = (500, 2500), (500,)


@dataclass(frozen=True)
class Problem:
    """Plans to find: one for each batch size.

    Attributes:
        case: The model.
        world_size: Devices, eight to a node.
        memory_limit: Bytes per device.
        batches: Local batch sizes.
        param_dtype: Compute dtype, or ``None``.
        options: What the search may use; by default sharding alone.
    """

    case: Case
    world_size: int
    memory_limit: int
    batches: tuple[int, ...]
    param_dtype: str | None = None
    options: SearchOptions = SHARDING

    @property
    def name(self) -> str:
        """Model, devices, batches, and whether there are slices and recomputation."""
        wide = ", wide" if self.options.slices else ""
        return f"{self.case.name} on {self.world_size}, batches {self.batches[0]}-{self.batches[-1]}{wide}"

    def device(self) -> DeviceInfo:
        """Data-centre GPUs: 300 TFLOP/s, 2 TB/s, 25 GB/s between them."""
        links = tuple(Link(name, "world", self.world_size, 1e-4, 2.5e10) for name in COLLECTIVES)
        return DeviceInfo(
            memory_limit=self.memory_limit,
            kind="cuda",
            nodes=max(1, self.world_size // 8),
            devices_per_node=min(8, self.world_size),
            links=links,
            blocking=False,
            overlap=0.8,
            unit_overhead=2e-5,
            copy_bandwidth=1e12,
            flops=3e14,
            memory_bandwidth=2e12,
        )


def _gpt2(name: str, layers: int, width: int, heads: int, length: int = 1024) -> Case:
    return gpt2(name, layers=layers, width=width, heads=heads, length=length, vocab=50257)


EIGHT = tuple(range(1, 9))
GPT3 = _gpt2("gpt3-175b", 96, 12288, 96, 2048)
ORIGINAL = bert("original-48x1024", layers=48, width=1024, heads=16, length=512, vocab=30522)
LLAMA = llama("llama-7b", layers=32, width=4096, heads=32, length=2048, vocab=32000)

WIDE = SearchOptions(slices=SLICES, recompute=True)

PROBLEMS = (
    Problem(GPT3, 64, 80 * GIB, EIGHT, "bfloat16", WIDE),
    Problem(GPT3, 1024, 80 * GIB, EIGHT, "bfloat16", WIDE),
    Problem(ORIGINAL, 8, 8 * GIB, (1, 2, 3), None, WIDE),
    Problem(_gpt2("gpt2-deep-48", 48, 1600, 25), 16, 12 * GIB, EIGHT, None, WIDE),
    Problem(_gpt2("gpt2-wide-8", 8, 6144, 48), 16, 40 * GIB, EIGHT, None, WIDE),
    Problem(LLAMA, 64, 40 * GIB, EIGHT, "bfloat16", WIDE),
    Problem(_gpt2("gpt2-124m", 12, 768, 12), 8, 2 * GIB, (1, 2, 4), None, WIDE),
    # Without recomputation one sample's activations alone take 0.7 TiB: a device of 3 TiB is imagined.
    Problem(GPT3, 64, 3072 * GIB, EIGHT, "bfloat16"),
    Problem(GPT3, 1024, 3072 * GIB, EIGHT, "bfloat16"),
    Problem(ORIGINAL, 8, 8 * GIB, (1, 2, 3)),
    Problem(_gpt2("gpt2-deep-48", 48, 1600, 25), 16, 12 * GIB, EIGHT),
    Problem(_gpt2("gpt2-wide-8", 8, 6144, 48), 16, 40 * GIB, EIGHT),
    Problem(LLAMA, 64, 40 * GIB, EIGHT, "bfloat16"),
    Problem(_gpt2("gpt2-124m", 12, 768, 12), 8, 3 * GIB, (1, 2, 4)),
)
GPT2_ON_EIGHT = PROBLEMS[-1]
QUICK = tuple(
    problem for problem in PROBLEMS if problem.case in (GPT3, ORIGINAL) and problem.world_size < 1024
)


def solve_all(problem: Problem, model_desc: ModelDesc, *, milp_seconds: float | None = None) -> Row:
    """Search for the batch size and the plan with the most samples per second.

    Args:
        problem: The problem.
        model_desc: Its model.
        milp_seconds: If given, HiGHS solves instead, for so long each time.
    """
    options: dict[str, Any] = {}
    if milp_seconds is not None:
        from osdp.search.sharding.milp import solve_milp

        options["solver"] = partial(solve_milp, time_limit=milp_seconds)
    device = problem.device()
    best: Row | None = None
    slowest = 0.0
    begin = time.perf_counter()
    for batch in sorted(problem.batches, reverse=True):
        started = time.perf_counter()
        sharding = sharding_problem(problem, model_desc, device, batch)
        upper = batch / best["samples_per_second"] if best else float("inf")
        found = solve(sharding, problem.memory_limit, options=problem.options, upper=upper, **options)
        if found is not None:
            best = {
                "batch": batch,
                "step_seconds": found.outcome.seconds,
                "samples_per_second": batch / found.outcome.seconds,
                "peak_bytes": found.outcome.peak,
                "proven_gap": found.gap,
                "cuts": found.num_rows,
            }
        slowest = max(slowest, time.perf_counter() - started)
    return {"seconds": time.perf_counter() - begin, "slowest_batch_seconds": slowest, "plan": best}


def row_within(problem: Problem, seconds: float) -> Row:
    """The wide plans of each batch size that fits, each searched for under a time limit."""
    model_desc = ModelDesc.from_module(problem.case.model(device="meta"), problem.case.sample(1))
    device, found = problem.device(), {}
    for batch in problem.batches:
        sharding = sharding_problem(problem, model_desc, device, batch)
        begin = time.perf_counter()
        deadline = Deadline.after(seconds)
        plan, _ = solve_bounded(sharding, problem.memory_limit, options=problem.options, deadline=deadline)
        took = time.perf_counter() - begin
        if plan is not None:
            found[str(batch)] = {"seconds": took, "proven_gap": plan.gap, "step": plan.outcome.seconds}
    row: Row = {"name": f"{problem.name}, within {seconds:g} s", "simulated": True, "batches": found}
    if not found:
        return row | {"error": "no batch size fits"}
    return row | {
        "limit_seconds": seconds,
        "worst_proven_gap": max(each["proven_gap"] for each in found.values()),
        "worst_seconds": max(each["seconds"] for each in found.values()),
    }


def row_of_small(layers: int) -> Row:
    """Describe and plan a model of small operators, half way from the all-sharded to the replicated peak."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    device, training = GPT2_ON_EIGHT.device(), Training(local_batch=8)
    begin = time.perf_counter()
    model_desc = ModelDesc.from_module(model, torch.zeros(8, 4))
    described = time.perf_counter() - begin
    peaks = [
        make_plan(None, model_desc, device, training=training, strategy=strategy).predicted.peak_bytes
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ]
    limited = replace(device, memory_limit=sum(peaks) // 2)
    begin = time.perf_counter()
    plan = make_plan(None, model_desc, limited, training=training)
    return {
        "name": f"{layers} x Linear(4, 4)",
        "simulated": True,
        "parameters": 2 * layers,
        "describe_seconds": described,
        "plan_seconds": time.perf_counter() - begin,
        "units": len(plan.units),
        "proven": plan.optimal,
    }


def sharding_problem(
    problem: Problem, model_desc: ModelDesc, device: DeviceInfo, batch: int
) -> ShardingProblem:
    """What the search is given for one batch size."""
    training = Training(local_batch=batch, param_dtype=problem.param_dtype)
    return build_problem(model_desc, estimate(model_desc, device, training), device, training)


def milp_in_time(problem: Problem, index: int, description: Path, each: float) -> Row | None:
    """As :func:`solve_all` by HiGHS in a process of its own; ``None`` if that takes too long altogether."""
    module = [sys.executable, "-m", "benchmarks.search_time"]
    command = [*module, "--milp", str(index), str(description), str(each)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MILP_ROUNDS * each,
            check=True,
            cwd=Path(__file__).parent.parent,
        )
    except subprocess.TimeoutExpired:
        return None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"HiGHS failed on {problem.name}: {error.stderr[-2000:]}") from error
    return json.loads(done.stdout.splitlines()[-1])


def row_of(problem: Problem, *, repeats: int, milp_seconds: float) -> Row:
    """Describe, search (best of ``repeats``, the machine being noisy) and check with HiGHS."""
    model = problem.case.model(device="meta")
    begin = time.perf_counter()
    model_desc = ModelDesc.from_module(model, problem.case.sample(1))
    described = time.perf_counter() - begin
    runs = [solve_all(problem, model_desc) for _ in range(repeats)]
    best = min(runs, key=lambda run: run["seconds"])
    row: Row = {
        "name": problem.name,
        "simulated": True,
        "operators": len(model_desc.operators),
        "parameters": model_desc.num_parameters,
        "describe_seconds": described,
        "wide": bool(problem.options.slices),
        "seconds": best["seconds"],
        "slowest_batch_seconds": best["slowest_batch_seconds"],
        "all_seconds": [run["seconds"] for run in runs],
        "plan": best["plan"],
    }
    if any(run["plan"] != best["plan"] for run in runs):
        row["error"] = "the same problem had different answers"
    if best["plan"] is None:
        smallest = sharding_problem(problem, model_desc, problem.device(), min(problem.batches))
        least = min_peak(smallest, options=problem.options)
        row["error"] = (
            f"nothing fits {format_bytes(problem.memory_limit)}; the least peak is {format_bytes(least)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model_desc.json")
        model_desc.save(path)
        checked = milp_in_time(problem, PROBLEMS.index(problem), path, milp_seconds)
    return row | _comparison(best, checked, milp_seconds)


def _comparison(ours: Row, checked: Row | None, milp_seconds: float) -> Row:
    if checked is None:
        return {
            "milp_seconds": None,
            "gap": None,
            "milp": f"did not end within {MILP_ROUNDS} x {milp_seconds:g} s",
        }
    mine, theirs = ours["plan"], checked["plan"]
    if (mine is None) != (theirs is None):
        return {"error": f"the search says {mine}, HiGHS says {theirs}"}
    gap = theirs["samples_per_second"] / mine["samples_per_second"] - 1 if mine else 0.0
    return {
        "milp_plan": theirs,
        "milp_seconds": checked["seconds"],
        "gap": gap,
        "speedup": checked["seconds"] / ours["seconds"],
    }


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The worst time of all rows; gap and speedup of those where HiGHS ended.

    Rows of sharding alone count with all their batches, wide ones with the slowest batch.
    """
    narrow, wide = ([row for row in rows if row.get("wide") is flag] for flag in (False, True))
    small = [row["describe_seconds"] + row["plan_seconds"] for row in rows if "plan_seconds" in row]
    checked = [row for row in rows if row.get("gap") is not None]

    def worst_gap(of: list[Row]) -> float | None:
        # Differences below HiGHS's own feasibility tolerance are not a gap.
        gaps = [row["gap"] if row["gap"] > 1e-6 else 0.0 for row in of if row in checked]
        return max(gaps, default=None)

    return {
        "worst_seconds": max((row["seconds"] for row in narrow), default=None),
        "worst_gap": worst_gap(narrow),
        "speedup_over_milp": min((row["speedup"] for row in checked), default=None),
        "worst_wide_seconds": max((row["slowest_batch_seconds"] for row in wide), default=None),
        "worst_wide_gap": worst_gap(wide),
        "worst_small_seconds": max(small, default=None),
    } | {
        f"worst_proven_gap_in_{limit:g}_s": max(
            row["worst_proven_gap"] for row in rows if row.get("limit_seconds") == limit
        )
        for limit in sorted({row["limit_seconds"] for row in rows if "limit_seconds" in row})
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    problems = QUICK if options.quick else PROBLEMS
    limit = QUICK_MILP_SECONDS if options.quick else MILP_SECONDS
    result = Result(options)
    for problem in harness.progress(problems, len(problems), "search_time"):
        result.add(row_of(problem, repeats=2 if options.quick else 5, milp_seconds=limit))
    for problem in problems:
        if problem.case is GPT3 and problem.options is WIDE:
            for seconds in QUICK_SEARCHED_FOR if options.quick else SEARCHED_FOR:
                result.add(row_within(problem, seconds))
    for layers in QUICK_SMALL if options.quick else SMALL:
        result.add(row_of_small(layers))
    result.world_size = max(problem.world_size for problem in problems)
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    plan = row.get("plan") or {}
    return [
        row["name"],
        row["operators"],
        plan.get("batch"),
        row["describe_seconds"],
        row["seconds"],
        plan.get("proven_gap"),
        row.get("gap"),
        row.get("milp_seconds") or row.get("milp"),
        row.get("speedup"),
    ]


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--milp"]:
        index, path, seconds = words[1:]
        checked = solve_all(PROBLEMS[int(index)], ModelDesc.load(path), milp_seconds=float(seconds))
        print(json.dumps(checked))
        return harness.MEASURED
    result = measure(harness.parse_options("search_time", __doc__, arguments))
    columns = [
        "problem", "operators", "batch", "describe, s", "search, s", "proven gap", "gap to HiGHS", "HiGHS, s",
        "speedup",
    ]  # fmt: skip
    searched = [row for row in result.rows if "wide" in row]
    harness.table("search over all batch sizes of a row (simulated)", columns, map(_cells, searched))
    keys = ("name", "worst_seconds", "worst_proven_gap")
    harness.table(
        "wide searches under time limits, the worst batch size (simulated)",
        ["problem", "search, s", "proven gap"],
        [[row[key] for key in keys] for row in result.rows if "worst_seconds" in row],
    )
    keys = ("name", "parameters", "describe_seconds", "plan_seconds", "units", "proven")
    harness.table(
        "models of small operators (simulated)",
        ["model", "parameters", "describe, s", "plan, s", "units", "proven"],
        [[row[key] for key in keys] for row in result.rows if "plan_seconds" in row],
    )
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
