"""Claim: no kind of choice that the search has makes a step slower; where each makes one faster is told.

Models on networks, some of which a rival once won, are trained with the plan found among all choices and with
those found without one kind of them: without sharded optimizer states, slices and recomputation, groups of
ranks, or a batch in microbatches, and with a bucket of gradients for every block. They take turns, beside DDP
whose optimizer states are sharded (``ZeroRedundancyOptimizer``). Where the plan is the same without a kind,
that is not timed; where none fits without it, no time is needed. Each row counts the collectives and messages
of a step and tells where its time goes, as predicted.

The last rows are of FSDP2 alone, by block: its gathers block gloo's ranks, unless they are asynchronous and
the next block is gathered ahead.

    python -m benchmarks.choices [--quick] [--json FILE [--resume]]
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.contest import LOSS_TOLERANCE, SAMPLES, Contest, fastest, is_same_program, names_of
from benchmarks.support import harness
from benchmarks.support.baselines import (
    TrainStep,
    fsdp2,
    make_optimizer,
    rank_batches,
    reference_losses,
    train_step,
)
from benchmarks.support.candidates import Candidate, OsdpWrap, Setting, live_mesh
from benchmarks.support.contest.design import Round
from benchmarks.support.contest.rivals import Rival
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import NoCompilerError, preload
from benchmarks.support.models import CASES, Case
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import Ratio, in_common
from benchmarks.support.turns import COMPARED_STEPS, take_turns_until_narrow
from osdp import InfeasibleError, ModelDesc, Plan, Training, codec
from osdp.comm.objects import on_first_rank
from osdp.explain.step_time import unit_times
from osdp.model.fqn import unit_modules
from osdp.plan.sharding import Mode, Unit
from osdp.search.sharding import planner
from osdp.text import format_bytes

TIMEOUT = 900
MOST_ROUNDS, QUICK_ROUNDS = 30, 10
#: A kind wins, or loses, where the whole interval lies beyond this part of the time, and beyond that of the
#: same program twice.
NOTICEABLE = 0.01


#: Models, networks, ranks and limits; in the first two a rival once was faster than any plan.
PLACES = (
    Round("convnext", None, 2, (None,)),
    Round("llama-32k", None, 2, (None,)),
    Round("llama-32k", 10**9, 2, (0.3,)),
    Round("gpt2-deep", None, 4, (0.6,)),
    Round("transformer", None, 4, (0.3,)),
    Round("t5", 2 * 10**8, 2, (0.1,)),
    Round("moe", 2 * 10**8, 4, (0.3,)),
    Round("mamba", None, 2, (0.1,)),
    Round("vit-stem", None, 2, (0.1,)),
)
QUICK_PLACES = (PLACES[0], PLACES[-1])
#: Where FSDP2's gathers are compared with asynchronous ones.
GATHERED = (Round("gpt2-deep", None, 2, (None,)), Round("gpt2-deep", 2 * 10**8, 2, (None,)))

ALL, AGAIN, ZERO = "all choices", "all choices again", "DDP, sharded optimizer states"
STATES, SLICES, GROUPS = "sharded optimizer states", "slices and recomputation", "groups of ranks"
MICROBATCHES, BUCKETS = "microbatches", "shared buckets"
KINDS = (STATES, SLICES, GROUPS, MICROBATCHES, BUCKETS)
BLOCKING, AHEAD = "gathers that block", "gathers ahead"


def plan_without(kind: str, contest: Contest, whole: Plan) -> Plan:
    """The plan of fewest predicted seconds without a kind of choice, on all ranks.

    Args:
        kind: One of :data:`KINDS`.
        contest: The model with its profiles and devices.
        whole: The plan found among all choices.

    Raises:
        InfeasibleError: None fits.
    """
    if kind == BUCKETS:
        return with_buckets_of_blocks(whole, contest.settings[1].model_desc)
    settings = [contest.settings[1]] if kind == MICROBATCHES else list(contest.settings.values())
    device = replace(contest.device, memory_limit=whole.memory_limit)
    assert whole.basis is not None
    rules = whole.basis.options
    if kind == STATES:
        rules = replace(rules, allowed=tuple(mode for mode in Mode if mode is not Mode.SHARD_OPTIMIZER))
    elif kind == SLICES:
        rules = replace(rules, slices=(), recompute=False)
    elif kind == GROUPS:
        device = device.with_groups(())

    def find(setting: Setting) -> Plan:
        candidate = planner.Candidate(setting.training, setting.profile)
        return planner.best_plan(setting.model_desc, [candidate], device, rules)

    return on_first_rank(lambda: fastest(settings, find)[1])


def with_buckets_of_blocks(plan: Plan, desc: ModelDesc) -> Plan:
    """``plan`` with units of whole parameters that end where their block does."""
    operators = {operator.name: operator for operator in desc.operators}
    units: list[Unit] = []
    for unit in plan.units:
        if unit.root or unit.mode not in (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER):
            units.append(unit)
            continue
        for _, names in groupby(unit.operators, key=lambda name: operators[name].block):
            inside = tuple(names)
            its = [operators[name] for name in inside]
            modules = unit_modules(its, desc.operators, desc.modules)
            units.append(replace(unit, operators=inside, modules=modules))
    return plan.with_sharding(units=tuple(units))


def compete(
    rank: int, world_size: int, *, case: str, fraction: float | None, most_rounds: int
) -> dict[str, Any]:
    """Worker: one place."""
    del rank, world_size
    contest = Contest(CASES[case], [fraction])
    limit = contest.limits[fraction]
    whole = contest.plan(limit)[1]
    plans, same, infeasible = {ALL: whole}, [], []
    for kind in KINDS:
        try:
            plan = plan_without(kind, contest, whole)
        except InfeasibleError:
            infeasible.append(kind)
            continue
        if is_same_program(plan, whole):
            same.append(kind)
        else:
            plans[kind] = plan
    settings = {name: contest.settings[plan.training.microbatches] for name, plan in plans.items()}
    makers = {name: partial(contest.step_of, settings[name], plan) for name, plan in plans.items()}
    makers[AGAIN] = makers[ALL]
    makers[ZERO] = partial(contest.step_of_rival, Rival("zero", 25))
    peaks = {name: contest.measure(make)[0] for name, make in makers.items() if name != AGAIN}

    def wide(seconds: Mapping[str, list[float]]) -> set[str]:
        ratios = {name: in_common(seconds[name], seconds[ALL]) for name in makers if name != ALL}
        found = {name for name, ratio in ratios.items() if not ratio.is_narrow}
        return {ALL, *found} if found else set()

    turns = take_turns_until_narrow(makers, wide, most_rounds=most_rounds)
    return {
        "limit": limit,
        "peaks": peaks,
        "seconds": turns.seconds,
        "losses": turns.losses,
        "same": same,
        "infeasible": infeasible,
        "plans": {name: codec.to_json(plan) for name, plan in plans.items()},
    }


def rows_of(place: Round, most_rounds: int) -> list[Row]:
    """A row for each kind of choice at one place, and one for the rival."""
    names = [f"{_name(place)}, {kind}" for kind in (*KINDS, ZERO)]
    arguments = {"case": place.case, "fraction": place.fractions[0], "most_rounds": most_rounds}
    measured = _launched(place, "compete", arguments)
    if "seconds" not in measured:
        return [{"name": name} | measured for name in names]
    plans = {name: codec.from_json(Plan, plan) for name, plan in measured["plans"].items()}
    counts = {name: _collectives(place, plan) for name, plan in plans.items()}
    seconds, peaks, limit = measured["seconds"], measured["peaks"], measured["limit"]
    again = in_common(seconds[AGAIN], seconds[ALL])
    common: Row = {
        "place": _name(place),
        "limit": limit,
        "peak_of_all": peaks[ALL],
        "seconds_of_all": median(seconds[ALL]),
        "collectives_of_all": counts[ALL],
        "times_of_all": _times(plans[ALL]),
        "same_program": [again.low, again.median, again.high],
    }
    training = Training(local_batch=SAMPLES)
    expected = reference_losses(CASES[place.case], training, place.world_size, COMPARED_STEPS)[-1]
    faults = []
    for name in plans:
        if not abs(measured["losses"][name] - expected) <= LOSS_TOLERANCE * abs(expected):
            faults.append(f"{name}: loss {measured['losses'][name]:.6f}, {expected:.6f} in a single process")
        if peaks[name] > limit and name != BUCKETS:
            faults.append(f"{name}: {format_bytes(peaks[name])}, the limit is {format_bytes(limit)}")
    rows: list[Row] = []
    for name, kind in zip(names, (*KINDS, ZERO), strict=True):
        row: Row = {"name": name, "kind": kind} | common
        if kind in KINDS:
            row["used"] = kind not in measured["same"]
        if kind in measured["infeasible"]:
            row["infeasible"] = True
        if kind in seconds:
            row |= _compared(seconds[kind], seconds[ALL], again)
            row |= {"peak": peaks[kind], "fits": peaks[kind] <= limit}
        if kind in plans:
            row |= {"collectives": counts[kind], "times": _times(plans[kind])}
        rows.append(row | ({"error": "; ".join(faults)} if faults else {}))
    return rows


def _compared(without: Sequence[float], whole: Sequence[float], again: Ratio) -> Row:
    """The seconds without a choice over those with it, and whether the machine could tell them apart.

    Args:
        without: Seconds without it, by round.
        whole: Seconds with it.
        again: The ratio of a program to itself.
    """
    ratio = in_common(without, whole)
    return {
        "seconds": median(without),
        "without_over_all": ratio.median,
        "interval": [ratio.low, ratio.high],
        "wins": ratio.low > max(1 + NOTICEABLE, again.high),
        "loses": ratio.high < min(1 - NOTICEABLE, again.low),
    }


def _times(plan: Plan) -> dict[str, float]:
    """Where the seconds of a step go, as predicted."""
    units = unit_times(plan)
    return {
        "compute": sum(unit.forward + unit.backward - unit.recomputed for unit in units),
        "recomputed": sum(unit.recomputed for unit in units),
        "communication waited for": sum(unit.communication for unit in units),
        "hidden communication": sum(unit.hidden for unit in units),
        "optimizer": sum(unit.optimizer for unit in units),
    }


def _collectives(place: Round, plan: Plan) -> dict[str, int]:
    """Collectives of one step, by name."""
    assert plan.basis is not None
    wrap = OsdpWrap(plan.basis.model_desc, plan.basis.device, plan)
    return Candidate("osdp", CASES[place.case], plan.training, wrap).collectives(place.world_size)


def gather(rank: int, world_size: int, *, case: str, most_rounds: int) -> dict[str, list[float]]:
    """Worker: FSDP2 by block, with gathers that block and with asynchronous ones, ahead."""
    del rank, world_size
    mesh, chosen = live_mesh(), CASES[case]
    training = Training(local_batch=SAMPLES)
    batches = rank_batches(chosen, SAMPLES, dist.get_rank(), dist.get_world_size())

    def make(ahead: bool) -> TrainStep:
        model = fsdp2(chosen.model(), chosen, mesh)
        if ahead:
            _gather_ahead(model, chosen)
        return train_step(model, make_optimizer(model.parameters(), training), batches)

    makers = {BLOCKING: partial(make, False), AHEAD: partial(make, True), AGAIN: partial(make, False)}

    def wide(seconds: Mapping[str, list[float]]) -> set[str]:
        ratio = in_common(seconds[AHEAD], seconds[BLOCKING])
        return set() if ratio.is_narrow else {BLOCKING, AHEAD}

    return take_turns_until_narrow(makers, wide, most_rounds=most_rounds).seconds


def _gather_ahead(model: nn.Module, case: Case) -> None:
    """Let the next block in either direction be gathered while one computes."""
    blocks = [block for block in case.find_blocks(model) if isinstance(block, FSDPModule)]
    for block in blocks:
        block._set_unshard_async_op(True)
    for first, then in pairwise(blocks):
        first.set_modules_to_forward_prefetch([then])
        then.set_modules_to_backward_prefetch([first])


def _name(place: Round) -> str:
    (name,) = names_of(place)
    return name


def name_of_gathers(place: Round) -> str:
    """Name of its row."""
    return f"{_name(place)}, FSDP2, {AHEAD}"


def row_of_gathers(place: Round, most_rounds: int) -> Row:
    """FSDP2's gathers at one place."""
    row: Row = {"name": name_of_gathers(place)}
    seconds = _launched(place, "gather", {"case": place.case, "most_rounds": most_rounds})
    if BLOCKING not in seconds:
        return row | seconds
    again = in_common(seconds[AGAIN], seconds[BLOCKING])
    return (
        row
        | {"seconds_of_all": median(seconds[AHEAD]), "same_program": [again.low, again.median, again.high]}
        | _compared(seconds[BLOCKING], seconds[AHEAD], again)
    )


def _launched(place: Round, worker: str, arguments: dict[str, Any]) -> Any:
    """What the first rank returns; why there is nothing, if there is not."""
    try:
        return launch_over(
            place.network,
            f"benchmarks.choices:{worker}",
            place.world_size,
            arguments,
            timeout=TIMEOUT,
            environment=preload(),
        )[0]
    except (NetworkUnavailableError, NoCompilerError) as error:
        return {"reason": str(error)}
    except WorkerError as error:
        return {"error": str(error)}


def summarize(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """For each kind: where it is used and needed, how often it wins and loses, and by how much at the most.

    What does not fit the limit is not compared.
    """
    summary: dict[str, float | int | None] = {}
    for kind in KINDS:
        used = [row for row in rows if row.get("kind") == kind and row["used"]]
        fitting = [row for row in used if row.get("fits")]
        name = kind.replace(" ", "_")
        summary |= {
            f"{name}_used": len(used),
            f"{name}_needed_to_fit": len(used) - len(fitting),
            f"{name}_wins": sum(row["wins"] for row in fitting),
            f"{name}_loses": sum(row["loses"] for row in fitting),
        }
        if fitting:
            ratios = [row["without_over_all"] for row in fitting]
            summary |= {f"{name}_most": max(ratios), f"{name}_least": min(ratios)}
    return summary


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=4, backend="gloo")
    places = QUICK_PLACES if options.quick else PLACES
    rounds = QUICK_ROUNDS if options.quick else MOST_ROUNDS
    gathered = GATHERED[:1] if options.quick else GATHERED
    known = result.keep()
    places = [place for place in places if f"{_name(place)}, {ZERO}" not in known]
    for place in harness.progress(places, len(places), "choices"):
        result.add(*(row | {"commit": harness.commit()} for row in rows_of(place, rounds)))
    for place in gathered:
        if name_of_gathers(place) not in known:
            result.add(row_of_gathers(place, rounds) | {"commit": harness.commit()})
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    interval = row.get("interval")
    if "infeasible" in row:
        note = "nothing fits without it"
    elif not row.get("used", True):
        note = "not used"
    elif not row.get("fits", True):
        note = "above the limit"
    else:
        note = row.get("error") or row.get("reason")
    times = row.get("times", {})
    return [
        row["name"],
        row.get("seconds_of_all"),
        row.get("seconds"),
        row.get("without_over_all"),
        f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "-",
        row["same_program"][1] if "same_program" in row else None,
        sum(row["collectives_of_all"].values()) if "collectives_of_all" in row else None,
        sum(row["collectives"].values()) if "collectives" in row else None,
        times["communication waited for"] - row["times_of_all"]["communication waited for"]
        if times
        else None,
        times["optimizer"] - row["times_of_all"]["optimizer"] if times else None,
        note,
    ]


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("choices", __doc__, arguments, resumes=True))
    columns = [
        "model, network, ranks, limit, what is left out", "s/step", "without", "over all", "95 %",
        "against itself", "collectives", "without", "waited for, s", "optimizer, s", "",
    ]  # fmt: skip
    harness.table("what each kind of choice wins", columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
