"""Claim: the best plan is found in less than a second, and HiGHS finds no better one.

Shapes up to GPT-3-175B (96 layers) with eight batch sizes, and the case the original OSDP reports (48
layers, hidden 1024, 8 GiB on 8 devices, batches 1-3), which took it 39.8 s on this kind of machine.
Profiles are estimated, so no device is needed: "simulated" in every row. The time is that of pricing and
searching all batch sizes of a row.

Each problem is solved a second time with the same cuts loop but HiGHS (``scipy.optimize.milp``, relative
gap 0) in place of the search's own solver, in a process of its own that may take :data:`MILP_SECONDS`. The
gap is the search's step time over the one that HiGHS found; a comparison that does not end is left out of
it and the row says so.

    python -m benchmarks.search_time [--quick] [--json FILE]
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Options, Result, Row
from benchmarks.models import Case, bert, gpt2, llama
from osdp import DeviceInfo, Link, ModelDesc, Training
from osdp.cost.situation import Situation, build_situation
from osdp.device_info import COLLECTIVES
from osdp.profiler.estimate import estimate
from osdp.search.sharding import least_peak, solve
from osdp.units import format_bytes

GIB = 2**30
#: Seconds the search may take.
BAR = 1.0
MILP_SECONDS, QUICK_MILP_SECONDS = 300, 20


@dataclass(frozen=True)
class Problem:
    """Plans to find: one for each batch size.

    Attributes:
        case: The model.
        world_size: Devices, eight to a node.
        memory_limit: Bytes per device.
        batches: Local batch sizes.
        param_dtype: Compute dtype, or ``None``.
    """

    case: Case
    world_size: int
    memory_limit: int
    batches: tuple[int, ...]
    param_dtype: str | None = None

    @property
    def name(self) -> str:
        """Model, devices and batches."""
        return f"{self.case.name} on {self.world_size}, batches {self.batches[0]}-{self.batches[-1]}"

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

PROBLEMS = (
    Problem(GPT3, 64, 80 * GIB, EIGHT, "bfloat16"),
    Problem(GPT3, 1024, 80 * GIB, EIGHT, "bfloat16"),
    Problem(ORIGINAL, 8, 8 * GIB, (1, 2, 3)),
    Problem(_gpt2("gpt2-deep-48", 48, 1600, 25), 16, 12 * GIB, EIGHT),
    Problem(_gpt2("gpt2-wide-8", 8, 6144, 48), 16, 40 * GIB, EIGHT),
    Problem(LLAMA, 64, 40 * GIB, EIGHT, "bfloat16"),
    Problem(_gpt2("gpt2-124m", 12, 768, 12), 8, 3 * GIB, (1, 2, 4)),
)
QUICK = (PROBLEMS[0], PROBLEMS[2], PROBLEMS[-1])


def solve_all(problem: Problem, model_desc: ModelDesc, *, with_milp: bool = False) -> Row:
    """Price and search every batch size; seconds, and the predicted seconds and peak of each plan."""
    from osdp.search.milp import solve_milp

    device = problem.device()
    plans = []
    begin = time.perf_counter()
    for batch in problem.batches:
        situation = situation_of(problem, model_desc, device, batch)
        options = {"solver": solve_milp} if with_milp else {}
        found = solve(situation, problem.memory_limit, **options)
        outcome = None if found is None else [found.outcome.seconds, found.outcome.peak]
        plans.append({"batch": batch, "outcome": outcome, "cuts": None if found is None else found.cuts})
    return {"seconds": time.perf_counter() - begin, "plans": plans}


def situation_of(problem: Problem, model_desc: ModelDesc, device: DeviceInfo, batch: int) -> Situation:
    """What the search is given for one batch size."""
    training = Training(local_batch=batch, param_dtype=problem.param_dtype)
    return build_situation(model_desc, estimate(model_desc, device, training), device, training)


def milp_in_time(problem: Problem, index: int, description: Path, seconds: float) -> Row | None:
    """As :func:`solve_all` by HiGHS in a process of its own; ``None`` if it takes longer than ``seconds``."""
    command = [sys.executable, "-m", "benchmarks.search_time", "--milp", str(index), str(description)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
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
        "seconds": best["seconds"],
        "all_seconds": [run["seconds"] for run in runs],
        "plans": best["plans"],
    }
    if any(run["plans"] != best["plans"] for run in runs):
        row["error"] = "the same problem had different answers"
    feasible = [plan for plan in best["plans"] if plan["outcome"]]
    row["feasible"] = f"{len(feasible)}/{len(problem.batches)}"
    if not feasible:
        least = least_peak(situation_of(problem, model_desc, problem.device(), problem.batches[0]))
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
        return {"milp_seconds": None, "gap": None, "milp": f"did not end within {milp_seconds:g} s"}
    gaps = [0.0]
    for mine, theirs in zip(ours["plans"], checked["plans"], strict=True):
        if (mine["outcome"] is None) != (theirs["outcome"] is None):
            return {"error": f"batch {mine['batch']}: the search says {mine}, HiGHS says {theirs}"}
        if mine["outcome"]:
            gaps.append(mine["outcome"][0] / theirs["outcome"][0] - 1)
    return {
        "milp_seconds": checked["seconds"],
        "gap": max(gaps),
        "least_gap": min(gaps),
        "speedup": checked["seconds"] / ours["seconds"],
    }


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The worst time of all rows; gap and speedup of those where HiGHS ended."""
    checked = [row for row in rows if row.get("gap") is not None]
    # Differences below HiGHS's own feasibility tolerance are not a gap.
    gaps = [row["gap"] if row["gap"] > 1e-6 else 0.0 for row in checked]
    return {
        "worst_seconds": max(row["seconds"] for row in rows),
        "worst_gap": max(gaps, default=None),
        "speedup_over_milp": min((row["speedup"] for row in checked), default=None),
    }


def measure(options: Options) -> Result:
    problems = QUICK if options.quick else PROBLEMS
    limit = QUICK_MILP_SECONDS if options.quick else MILP_SECONDS
    result = Result(options)
    for problem in harness.progress(problems, len(problems), "search_time"):
        result.rows.append(row_of(problem, repeats=2 if options.quick else 5, milp_seconds=limit))
    result.world_size = max(problem.world_size for problem in problems)
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    keys = ("name", "operators", "feasible", "describe_seconds", "seconds", "gap")
    return [*(row.get(key) for key in keys), row.get("milp_seconds") or row.get("milp"), row.get("speedup")]


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--milp"]:
        checked = solve_all(PROBLEMS[int(words[1])], ModelDesc.load(words[2]), with_milp=True)
        print(json.dumps(checked))
        return harness.MEASURED
    result = measure(harness.parse_options("search_time", __doc__, arguments))
    columns = ["problem", "operators", "feasible", "describe, s", "search, s", "gap", "HiGHS, s", "speedup"]
    harness.table("search over all batch sizes of a row (simulated)", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
