"""Claim: the best layout of a transformer on a cluster is found in seconds, proven best or to within a gap.

The spaces of two published planners come first: ZeROSearch's Llama-2-13B on 16 nodes with 4 A10 and 16 with
4 A6000 (4,128 candidates there) and FASOP's GPT-2 XL on 1 node with 4 A100 and 7 with 4 A10 (592), then 1,024
and 16,384 devices of two kinds. Each contains all degrees, microbatches and ZeRO stages of theirs, with every
order of the nodes, and schedules and recomputation beside them. Then all 6,911 parts of a cluster of five
kinds of nodes are searched for GPT-3, for the least time, the least cost and the Pareto front of both, until
the time limit of ``osdp cluster plan``, with the gap to what is proven. Last, ``osdp cluster plan --out`` as
it is typed, which traces the model and writes a plan that runs: Llama-2-7B on 128 H100, GPT-3 on 384 A100.

No device is needed: "simulated" in every row. The time is that of pricing and searching, best of several
runs (of the parts and of ``--out``: one run). On a small space the proof is checked against the price of
every layout with every cut in every order of the nodes.

    python -m benchmarks.planner_time [--quick] [--json FILE]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from pathlib import Path

from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from osdp.cli.cluster.goal import GoalOptions
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.stage_table import StagePricer
from osdp.cluster.cost.step import price
from osdp.cluster.file import known_gpus, make_gpu
from osdp.cluster.hardware import Cluster, NetworkLink, NodeGroup, NodeType, Price
from osdp.cluster.known_transformers import SHAPES
from osdp.cluster.plan import ClusterPlan, Workload
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.objectives import best_plans, pareto
from osdp.cluster.search.space import LayoutSpace, families
from osdp.cluster.transformer import TransformerShape
from osdp.plan.deadline import Deadline

#: FASOP's: 16 heads where GPT-2 XL has 25, so that 2 and 4 ranks can share a layer.
GPT2_XL = replace(SHAPES["gpt2-xl"], heads=16)
LLAMA_13B = SHAPES["llama2-13b"]
LLAMA_70B = SHAPES["llama3-70b"]
GPT3 = SHAPES["gpt3-175b"]


@dataclass(frozen=True)
class Problem:
    """A model and a cluster.

    Attributes:
        name: What the row is called.
        shape: The model.
        global_batch: Samples of a step.
        nodes: GPU, nodes, devices of each, bytes/s inside (of one device) and outside (of the node).
        theirs: Candidates that the published planner has.
        their_seconds: What it took, on a quiet machine of this kind.
    """

    name: str
    shape: TransformerShape
    global_batch: int
    nodes: tuple[tuple[str, int, int, float, float], ...]
    theirs: int = 0
    their_seconds: float | None = None

    def cluster(self) -> Cluster:
        """The cluster."""
        groups = []
        for name, count, devices, inside, outside in self.nodes:
            gpu = make_gpu(name, known_gpus()[name])
            # Costs decide nothing but which part is cheap: round figures in the range of cloud offers.
            dollars = DOLLARS.get(name)
            per_hour = None if dollars is None else Price(devices * dollars, "2026-11", "assumed")
            links = NetworkLink(inside, 6e-6), NetworkLink(outside, 6e-6)
            node = NodeType(name, gpu, devices, *links, per_hour)
            groups.append(NodeGroup(node, count))
        return Cluster(tuple(groups))


GB = 1e9
#: Dollars of a device and hour.
DOLLARS = {"H100": 2.5, "A100-80GB": 1.5, "A100": 1.1, "L40S": 0.9, "A6000": 0.5}
#: Time limit of a search of parts: the default of ``osdp cluster plan``.
SEARCH_SECONDS = GoalOptions.search_seconds
ZEROSEARCH = Problem(
    "zerosearch", LLAMA_13B, 64,
    (("A10", 16, 4, 0.6 * 32 * GB, 0.6 * 25 * GB), ("A6000", 16, 4, 0.6 * 32 * GB, 0.6 * 25 * GB)),
    4128, 133.0,
)  # fmt: skip
FASOP = Problem(
    "fasop", GPT2_XL, 64, (("A100", 1, 4, 230 * GB, 5 * GB), ("A10", 7, 4, 16 * GB, 5 * GB)), 592, 7.8
)
THOUSAND = Problem(
    "1024", LLAMA_70B, 1024,
    (("H100", 64, 8, 342 * GB, 360 * GB), ("A100-80GB", 64, 8, 228 * GB, 180 * GB)),
)  # fmt: skip
SIXTEEN_THOUSAND = Problem(
    "16384", GPT3, 4096,
    (("H100", 1024, 8, 342 * GB, 360 * GB), ("A100-80GB", 1024, 8, 228 * GB, 180 * GB)),
)  # fmt: skip
FIVE_KINDS = Problem(
    "five kinds", GPT3, 1024,
    (
        ("H100", 3, 8, 342 * GB, 360 * GB), ("A100-80GB", 5, 8, 228 * GB, 180 * GB),
        ("A100", 7, 8, 228 * GB, 90 * GB), ("L40S", 2, 8, 16 * GB, 25 * GB),
        ("A6000", 11, 8, 16 * GB, 25 * GB),
    ),
)  # fmt: skip
#: Model, samples of a step, and nodes of 8 devices, for ``--out``.
WRITTEN = (
    ("llama2-7b", 256, "{gpu: H100, count: 16, devices: 8, network: 3200 Gbit/s}"),
    ("gpt3-175b", 1536, "{gpu: A100-80GB, count: 48, devices: 8, network: 1600 Gbit/s}"),
)
PROBLEMS = (ZEROSEARCH, FASOP, THOUSAND, SIXTEEN_THOUSAND)

SMALL = Problem(
    "small",
    replace(SHAPES["gpt2"], layers=3),
    8,
    (("A100", 1, 4, 230 * GB, 5 * GB), ("A10", 2, 4, 16 * GB, 5 * GB)),
)


def _choices_of(plan: ClusterPlan) -> Row:
    """What was chosen, and what it takes."""
    layout = plan.layout
    return {
        "step_seconds": plan.step_seconds,
        "tp": layout.degrees.tp,
        "pp": layout.degrees.pp,
        "dp": layout.degrees.dp,
        "samples": layout.samples,
        "schedule": layout.schedule,
        "sharding": layout.sharding,
        "recompute": layout.recomputation,
        "optimal": plan.optimal,
    }


def row_of(problem: Problem, repeats: int) -> Row:
    """Search, best of several runs."""
    seconds, answers = [], []
    for _ in range(repeats):
        began, computed = time.perf_counter(), time.process_time()
        load = Workload(shape=problem.shape, global_batch=problem.global_batch)
        prices = ClusterPrices(problem.cluster(), load)
        answers.append(best_layouts(prices, LayoutSpace()))
        seconds.append((time.perf_counter() - began, time.process_time() - computed))
    found = answers[0]
    row: Row = {
        "name": problem.name,
        "simulated": True,
        "model": problem.shape.name,
        "devices": problem.cluster().num_devices,
        "seconds": min(wall for wall, _ in seconds),
        "cpu_seconds": min(cpu for _, cpu in seconds),
        "candidates": found.candidates,
        "placements": found.placements,
        "arranged": found.arranged,
        "their_candidates": problem.theirs or None,
        "their_seconds": problem.their_seconds,
    }
    if not found.plans:
        return row | {"error": "nothing fits"}
    row |= _choices_of(found.plans[0]) | {"bounds": found.plans[0].bounds}
    if any(answer.plans != found.plans for answer in answers):
        row["error"] = "the same problem had different answers"
    return row


def parts_row(objective: str) -> Row:
    """Search all parts of the cluster of five kinds of nodes for one objective."""
    problem = FIVE_KINDS
    prices = ClusterPrices(
        problem.cluster(), Workload(shape=problem.shape, global_batch=problem.global_batch)
    )
    began = time.perf_counter()
    deadline = Deadline.after(SEARCH_SECONDS)
    if objective == "pareto":
        found = pareto(prices, LayoutSpace(), deadline=deadline)
    else:
        goal = GoalOptions(objective=objective, subsets=True).goal()
        found = best_plans(prices, LayoutSpace(), goal, deadline=deadline)
    row: Row = {
        "name": f"five kinds, {objective}",
        "simulated": True,
        "model": problem.shape.name,
        "devices": problem.cluster().num_devices,
        "seconds": time.perf_counter() - began,
        "candidates": found.candidates,
        "placements": found.placements,
        "arranged": found.arranged,
        "parts": found.parts,
    }
    if not found.plans:
        return row | {"error": "nothing fits"}
    plan = found.plans[0]
    return row | _choices_of(plan) | {
        "rows": len(found.plans), "step_dollars": plan.dollars_per_step, "gap": plan.gap,
    }  # fmt: skip


def written_row(model: str, global_batch: int, nodes: str) -> Row:
    """Run ``osdp cluster plan --out``, from the start of Python to the files."""
    with tempfile.TemporaryDirectory() as folder:
        cluster, out = Path(folder, "cluster.yaml"), Path(folder, "plan.json")
        cluster.write_text(f"nodes: [{nodes}]\n", encoding="utf8")
        command = [
            sys.executable, "-m", "osdp", "cluster", "plan", "--model", model, "--cluster", str(cluster),
            "--global-batch", str(global_batch), "--out", str(out),
        ]  # fmt: skip
        began = time.perf_counter()
        # As the other rows on one core.
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=alone)
        row: Row = {
            "name": f"--out, {model}",
            "written": True,
            "simulated": True,
            "model": model,
            "seconds": time.perf_counter() - began,
        }
        if done.returncode:
            return row | {"error": done.stderr.strip()}
        return row | _choices_of(ClusterPlan.load(out.with_name("plan.layout.json")))


def proof_row() -> Row:
    """The best of a small space, and the least price of everything in it."""
    prices = ClusterPrices(SMALL.cluster(), Workload(shape=SMALL.shape, global_batch=SMALL.global_batch))
    found = best_layouts(prices, LayoutSpace())
    began = time.perf_counter()
    listed = [plan.step_seconds for plan in everything(prices) if plan.fits]
    row: Row = {
        "name": "small, everything priced",
        "simulated": True,
        "candidates": found.candidates,
        "placements": len(listed),
        "seconds": time.perf_counter() - began,
        "step_seconds": min(listed),
        "optimal": abs(found.plans[0].step_seconds / min(listed) - 1) < 1e-12,
    }
    if not row["optimal"]:
        row["error"] = f"the search found {found.plans[0].step_seconds} s, the list has {min(listed)} s"
    return row


def everything(prices: ClusterPrices) -> Iterator[ClusterPlan]:
    """Every layout of the space with every cut in every order of the nodes."""
    num_items = len(prices.items)
    for family in families(prices.cluster, prices.cluster.counts, prices.workload, LayoutSpace()):
        cells = family.cells
        priced = [{slot: StagePricer(prices, way, slot) for slot in cells.slots} for way in family.layouts]
        kinds = [kind for kind, count in enumerate(cells.counts) for _ in range(count)]
        for order in sorted(set(permutations(kinds))):
            slots = [cells.slots[kind] for kind in order for _ in range(cells.stages[kind])]
            for inside in combinations(range(1, num_items), family.plain.degrees.pp - 1):
                bounds = (0, *inside, num_items)
                least = min(stop - start for start, stop in pairwise(bounds))
                for way, stages in zip(family.layouts, priced, strict=True):
                    if least >= way.stages_per_rank:
                        yield price(prices, way, bounds, slots, stages=stages)


def measure(options: Options) -> Result:
    result = Result(options)
    for problem in harness.progress(PROBLEMS, len(PROBLEMS), "planner_time"):
        result.add(row_of(problem, 2 if options.quick else 5))
    for objective in ("time", "cost", "pareto"):
        result.add(parts_row(objective))
    result.add(proof_row())
    for written in WRITTEN:
        result.add(written_row(*written))
    result.world_size = max(row.get("devices", 1) for row in result.rows)
    by_name = {row["name"]: row for row in result.rows}
    result.summary = {
        "seconds_zerosearch_space": by_name["zerosearch"]["seconds"],
        "seconds_fasop_space": by_name["fasop"]["seconds"],
        "seconds_1024": by_name["1024"]["seconds"],
        "seconds_16384": by_name["16384"]["seconds"],
        "candidates": by_name["zerosearch"]["placements"],
        "seconds_five_kinds": max(row["seconds"] for row in result.rows if "parts" in row),
        "gap_five_kinds": max(row.get("gap", 1.0) for row in result.rows if "parts" in row),
        "seconds_out_llama2_7b": by_name["--out, llama2-7b"]["seconds"],
        "seconds_out_gpt3_175b": by_name["--out, gpt3-175b"]["seconds"],
        "proven_optimal": all(
            row.get("optimal", False) for row in result.rows if "parts" not in row and "written" not in row
        ),
    }
    return result


def _cells(row: Row) -> list[object]:
    degrees = [row.get(name) for name in ("tp", "pp", "dp", "samples", "schedule", "sharding", "recompute")]
    return [
        row["name"], row.get("devices"), row.get("candidates"), row.get("placements"), row.get("arranged"),
        row["seconds"], row.get("gap"), row.get("their_candidates"), row.get("their_seconds"),
        row.get("step_seconds"),
        *degrees,
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("planner_time", __doc__, arguments))
    columns = [
        "space", "devices", "layouts", "placements", "arranged", "search, s", "gap", "theirs", "theirs, s",
        "s/step", "tp", "pp", "dp", "mbs", "schedule", "sharding", "recompute",
    ]  # fmt: skip
    harness.table("the best layout on a cluster (simulated)", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
