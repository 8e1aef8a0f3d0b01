"""Claim: slices of sequences fill the pipeline where microbatches run out, with exact gradients.

One or two long sequences a step. Two stages of a GPT-2 compute on a core each. Four stages sleep twice as
long as one of the two was measured to compute (emulated compute; :mod:`benchmarks.support.token_stages`),
around real masks, caches and messages. Beside each other, step for step: whole sequences under GPipe and
under 1F1B, as many microbatches as sequences; the best equal slices and the optimal ones, both chosen by the
search (:mod:`osdp.search.token_slices.planner`) from slices of one stage that were timed alone before. Its
prediction stands beside each measured step; for stages that compute it is the mean of two, by slices that
were timed before and after the steps, since the machine's own speed drifts in between.

Gradients are those of a single process that takes the sequences whole, in float32 and in float64.

    python -m benchmarks.token_pipeline [--quick] [--json FILE]
"""

import sys
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline_schedules import known_link
from benchmarks.support import harness
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.models import Case, gpt2
from benchmarks.support.stages import agreed
from benchmarks.support.timing import paired_ratio
from benchmarks.support.token_stages import napping, norm_error, without_labels
from benchmarks.support.turns import take_turns
from osdp import OSDP, ModelDesc, TokenSlices, Training, codec
from osdp.cost.token_slices.latency_fit import fit
from osdp.cost.token_slices.step import SliceTables, simulate_slices, slice_tables
from osdp.hardware.device_info import PointToPointLink
from osdp.hardware.token_latency import BatchLatency, PassLatency, TokenLatency, TokenSamples
from osdp.integrations.huggingface import causal_lm_loss
from osdp.integrations.huggingface.decoder_stage import decoder_stage
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import Plan
from osdp.plan.schedule import make_schedule
from osdp.plan.search_options import SearchOptions
from osdp.profiler.links.axis_links import measure_stage_link
from osdp.profiler.roofline import estimate
from osdp.profiler.token_latency import measure_token_latency
from osdp.runtime.mesh import parallel_mesh
from osdp.search.pipeline.planner import plan_at
from osdp.search.sharding.planner import Candidate
from osdp.search.token_slices.planner import TokenSliceProblem, solve_tokens
from osdp.tracing.dataflow import trace_flow

LENGTH, GRANULARITY = 2048, 32
BATCHES = (1, 2)
SLICED = "1f1b"
GRADIENT_LIMITS = {"float32": 1e-5, "float64": 1e-12}
GPIPE, ONE_F_ONE_B, UNIFORM, OPTIMAL = "gpipe, whole", "1f1b, whole", "uniform slices", "optimal slices"


def decoder(layers: int, width: int, length: int = LENGTH) -> Case:
    """A GPT-2 with a small vocabulary: blocks are what it computes."""
    name, heads = f"gpt2-{layers}x{width}", max(width // 64, 4)
    case = gpt2(name, layers=layers, width=width, heads=heads, length=length, vocab=256)
    return without_labels(case)


#: Layers of each stage that computes, their width and heads; how many times as much a sleeping one holds.
LAYERS, WIDTH, HEADS, SLEEPING = 3, 512, 8, 1
#: The same stage for the latency model.
STAGE = {
    "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Contest:
    """Stages to compare ways on.

    Attributes:
        ranks: Stages.
        batch: Sequences of a step.
        rounds: Timed steps of each way.
        samples: For stages that sleep, slices of one that computes, as JSON.
    """

    ranks: int
    batch: int
    rounds: int
    samples: str | None = None


def staged_plan(case: Case, ranks: int, dtype: torch.dtype = torch.float32) -> Plan:
    """Stages of as many blocks; the embedding in the first, the head in the last."""
    training = Training(local_batch=1, microbatches=1)
    model, sample = case.model().to(dtype), case.sample(1)
    model_desc, flow = ModelDesc.from_module(model, sample), trace_flow(model, sample)
    device = known_link(PointToPointLink(1e-4, 1e9))
    candidate = Candidate(training, estimate(model_desc, device, training))
    blocks = [index for index, step in enumerate(flow.steps) if ".h." in step.module]
    each = len(blocks) // ranks
    cuts = (0, *(blocks[each * stage] for stage in range(1, ranks)), len(flow.steps))
    return plan_at(
        cuts, model_desc, flow, candidate, device, SearchOptions(), ParallelDims(ranks, 1, 1), SLICED
    )


def compare(rank: int, world_size: int, **given: Any) -> dict[str, Any]:
    """Worker: time slices of a stage, search, and time all ways in turn."""
    contest = Contest(**given)
    mesh = parallel_mesh(decoder(1, 32).model(device="meta"), ParallelDims(world_size, 1, 1))
    link = measure_stage_link(mesh["pp"].get_group(), torch.device("cpu"))
    if contest.samples is None:
        samples = measured_slices()
        latency, case = fit(samples), decoder(LAYERS * world_size, WIDTH)
    else:
        samples = codec.from_json(TokenSamples, contest.samples)
        latency, case = sleeping(fit(samples), world_size)

    def tables_of(latency: TokenLatency) -> SliceTables:
        return slice_tables(latency, 1, LENGTH, granularity=GRANULARITY, link=link)

    tables = tables_of(latency)
    found = solve_tokens(TokenSliceProblem({1: tables}, contest.batch, world_size, SLICED))
    assert found.uniform is not None
    ways = {
        GPIPE: ("gpipe", TokenSlices((LENGTH,))),
        ONE_F_ONE_B: ("1f1b", TokenSlices((LENGTH,))),
        UNIFORM: (SLICED, found.uniform.slices),
        OPTIMAL: (SLICED, found.best.slices),
    }
    ways = {
        name: (schedule, TokenSlices(tuple(agreed(slices.lengths))))
        for name, (schedule, slices) in ways.items()
    }
    model = OSDP(case.model(), plan=staged_plan(case, world_size), mesh=mesh)
    tokens = case.sample(contest.batch)["input_ids"]

    def step(way: str) -> Any:
        schedule, slices = ways[way]

        def run(index: int) -> float:
            del index
            model.zero_grad(set_to_none=True)
            return float(
                model.train_step(
                    tokens, tokens, causal_lm_loss, num_microbatches=contest.batch, schedule=schedule,
                    token_slices=slices if slices.num_slices > 1 else None,
                )
            )  # fmt: skip

        return run

    turns = take_turns({name: step(name) for name in ways}, rounds=contest.rounds, warmup=1)
    # Stages that compute are measured once more: the machine's own speed drifts while they run.
    by = [tables, *([tables_of(fit(measured_slices()))] if contest.samples is None else [])]
    return {
        "seconds": turns.seconds,
        "predicted": {
            name: [predicted(each, way, contest, world_size) for each in by] for name, way in ways.items()
        },
        "slices": {name: slices.lengths for name, (_, slices) in ways.items()},
        "errors": {name: gradient_error(case, model, step(name), tokens) for name in (UNIFORM, OPTIMAL)},
        "gap": found.gap,
        "residual": max(max(b.forward.residual, b.backward.residual) for b in latency.batches),
        "samples": codec.to_json(samples),
    }


def measured_slices() -> TokenSamples:
    """Slices of a stage; all ranks measure at a time, as they will compute, and one's figures are taken."""
    stage = decoder_stage("gpt2", STAGE, num_layers=LAYERS, length=LENGTH)
    measured = measure_token_latency(stage, LENGTH, granularity=GRANULARITY, repeats=3, progress=False)
    return codec.from_json(TokenSamples, agreed(codec.to_json(measured)))


def predicted(tables: SliceTables, way: tuple[str, TokenSlices], contest: Contest, ranks: int) -> float:
    """Seconds of a step as simulated."""
    schedule, slices = way
    order = make_schedule(schedule, ranks, contest.batch, num_slices=slices.num_slices)
    return simulate_slices(tables, slices, order).seconds


def sleeping(latency: TokenLatency, ranks: int) -> tuple[TokenLatency, Case]:
    """What stages that sleep cost, and a decoder of one block a stage that sleeps so."""
    entry = latency.of(1)
    slow = BatchLatency(1, times(entry.forward, SLEEPING), times(entry.backward, SLEEPING))
    narrow = decoder(ranks, 32)
    return replace(latency, batches=(slow,), token_bytes=4 * 32), napping(narrow, "sleeping", slow)


def times(latency: PassLatency, factor: float) -> PassLatency:
    """A pass that takes so many times as long."""
    return replace(
        latency,
        seconds=tuple(factor * s for s in latency.seconds),
        context=tuple(factor * a for a in latency.context),  # type: ignore[arg-type]
    )


def gradient_error(case: Case, model: OSDP, step: Any, tokens: torch.Tensor) -> float:
    """The worst rank's largest error of a gradient by its norm, against whole sequences in one process."""
    step(0)
    alone = napping_off(case).to(next(model.parameters()).dtype)
    total, count = causal_lm_loss(alone(input_ids=tokens), tokens)
    total.backward()
    wanted = dict(alone.named_parameters(remove_duplicate=False))
    pairs = [(p.grad, wanted[name].grad / count) for name, p in model.named_parameters()]
    worst = torch.tensor(norm_error(*zip(*pairs, strict=True)), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def napping_off(case: Case) -> torch.nn.Module:
    """The model of ``case``, awake."""
    model = case.model()
    for module in model.modules():
        if hasattr(module, "latency"):
            module.latency = None
    return model


def exactness(rank: int, world_size: int, *, length: int) -> float:
    """Worker: the largest error of gradients in float64."""
    del rank
    case = decoder(2 * world_size, 64, length)
    mesh = parallel_mesh(case.model(device="meta"), ParallelDims(world_size, 1, 1))
    plan = staged_plan(case, world_size, torch.float64)
    model = OSDP(case.model().double(), plan=plan, mesh=mesh)
    tokens = case.sample(2)["input_ids"]

    def step(index: int) -> None:
        del index
        model.zero_grad(set_to_none=True)
        model.train_step(tokens, tokens, causal_lm_loss, num_microbatches=2, token_slices=5)

    return gradient_error(case, model, step, tokens)


def contest_rows(contest: Contest) -> tuple[list[Row], str | None]:
    """A row for each way, and the samples of the stage that was measured."""
    name = f"{contest.ranks} stages, batch {contest.batch}"
    try:
        found = launch("benchmarks.token_pipeline:compare", contest.ranks, vars(contest), timeout=900)[0]
    except WorkerError as error:
        return [{"name": name, "error": str(error)}], contest.samples
    fastest = min((GPIPE, ONE_F_ONE_B), key=lambda way: median(found["seconds"][way]))
    rows = []
    for way, seconds in found["seconds"].items():
        ratio = paired_ratio(found["seconds"][fastest], seconds)
        row = {
            "name": f"{name}: {way}",
            "ranks": contest.ranks,
            "batch": contest.batch,
            "way": way,
            "compute": "real" if contest.samples is None else "emulated",
            "slices": found["slices"][way],
            "seconds": seconds,
            "predicted_seconds": mean(found["predicted"][way]),
            "predicted_before_and_after": found["predicted"][way],
            "time_error": mean(found["predicted"][way]) / median(seconds) - 1,
            "speedup": ratio.median,
            "interval": [ratio.low, ratio.high],
            "gradient_error": found["errors"].get(way),
            "fit_residual": found["residual"],
        }
        if not found["errors"].get(way, 0.0) <= GRADIENT_LIMITS["float32"]:
            row["error"] = f"gradients differ by {found['errors'][way]:.2g} of their norm"
        rows.append(row)
    for row in rows:
        if row["way"] == OPTIMAL:
            row["over_uniform"] = paired_ratio(found["seconds"][UNIFORM], found["seconds"][OPTIMAL]).median
    return rows, found["samples"]


def exact_row(length: int) -> Row:
    """Gradients in float64."""
    row: Row = {"name": "2 stages, float64", "limit": GRADIENT_LIMITS["float64"]}
    try:
        found = launch("benchmarks.token_pipeline:exactness", 2, {"length": length}, timeout=300)[0]
    except WorkerError as error:
        return row | {"error": str(error)}
    row["float64_error"] = found
    if not found <= GRADIENT_LIMITS["float64"]:
        row["error"] = f"gradients in float64 differ by {found:.2g} of their norm"
    return row


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 7
    result = Result(options, world_size=4, backend="gloo")
    result.add(exact_row(128 if options.quick else 512))
    samples = None
    for ranks in (2, 4):
        for batch in BATCHES[:1] if options.quick else BATCHES:
            if ranks == 2 or samples is not None:
                # What sleeps hardly varies.
                turns, given = (rounds, None) if ranks == 2 else (3, samples)
                rows, measured = contest_rows(Contest(ranks, batch, turns, given))
                samples = samples or measured
                result.add(*rows)
    result.summary = summary(result.rows)
    return result


def summary(rows: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim: speed-ups of the optimal slices, with one sequence a step."""
    whole = not any(row.get("error") for row in rows)

    def best(ranks: int) -> float | None:
        ones = [row for row in rows if row.get("ranks") == ranks and row["batch"] == 1]
        found = [row["speedup"] for row in ones if row["way"] == OPTIMAL]
        return found[0] if found and whole else None

    over = [row["over_uniform"] for row in rows if "over_uniform" in row and row["batch"] == 1]
    errors = [row["gradient_error"] for row in rows if row.get("gradient_error") is not None]
    times = [abs(row["time_error"]) for row in rows if "time_error" in row and "slices" in row["way"]]
    return {
        "speedup_two_stages": best(2),
        "speedup_four_stages": best(4),
        "optimal_over_uniform": min(over) if over and whole else None,
        "max_gradient_error": max(errors, default=None),
        "prediction_error": max(times) if times and whole else None,
    }


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("token_pipeline", __doc__, arguments))
    columns = (
        "stages", "batch", "way", "compute", "slices", "s/step", "predicted", "time error", "speedup",
        "gradient error",
    )  # fmt: skip
    cells = [
        [
            row["ranks"], row["batch"], row["way"], row["compute"], short(row["slices"]),
            median(row["seconds"]), row["predicted_seconds"], row["time_error"],
            f"{row['speedup']:.3f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]",
            row["gradient_error"],
        ]
        for row in result.rows
        if "way" in row
    ]  # fmt: skip
    harness.table(f"steps on sequences of {LENGTH} tokens", columns, cells)
    return harness.finish(result)


def short(slices: list[int]) -> str:
    """Slice lengths for tables, repeats counted."""
    runs: list[list[int]] = []
    for length in slices:
        if runs and runs[-1][0] == length:
            runs[-1][1] += 1
        else:
            runs.append([length, 1])
    return " ".join(f"{length}" if count == 1 else f"{length}x{count}" for length, count in runs)


if __name__ == "__main__":
    sys.exit(main())
