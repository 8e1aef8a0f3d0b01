"""Claim: groups of ranks make slow networks between machines bearable, and the search knows when.

Emulated hosts with rate-limited uplinks (:mod:`benchmarks.support.testbed`; two of two ranks, and in full
four of one and two of four) train a GPT-2 with DDP, FSDP2, FSDP2 with a real reduce-scatter, HSDP by hand,
OSDP with group sharding and with communication with groups, and the plans that the search picks at 1.1 times
the group-sharded peak, 1.1 times FSDP2's, and without a limit; in turn (A B C, A B C, ...). Interface
counters tell what came into a host. With *N* hosts of *P* ranks, *R = N P*, and *M* bytes of parameters a
step should bring

    real reduce-scatter, flat     3 (R - 1) / R M
    communication with groups     3 (N - 1) / N M
    group sharding                2 (N - 1) / N M

into each host (two all-gathers and a reduce-scatter; an all-reduce of shards over the hosts). Peaks are
those of :mod:`benchmarks.support.live_peaks`; what exceeds a limit does not count there. The loss after
the last step must be that of a single process. All ranks are on this machine: where they are more than its
cores they share them, and compute takes as much longer, for every candidate alike.

    python -m benchmarks.group_sharding [--quick] [--json FILE]
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import harness
from benchmarks.support.baselines import TrainStep, reference_losses
from benchmarks.support.candidates import (
    UNLIMITED,
    Candidate,
    Setting,
    live_mesh,
    make_setting,
    make_setting_together,
)
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.live_bytes import NoCompilerError
from benchmarks.support.live_peaks import highest_peaks
from benchmarks.support.models import CASES
from benchmarks.support.testbed import NetworkUnavailableError, launch_over, received_bytes
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import DeviceInfo, Link, Plan, Training, codec, gen_fsdp_args
from osdp.hardware.device_info import COLLECTIVES
from osdp.hardware.profile import Profile
from osdp.text import format_bytes

CASE = CASES["gpt2-grouped"]
LOCAL_BATCH = 2
LOSS_TOLERANCE = 1e-3
#: How far above a peak a limit lies.
ROOM = 1.1

FLAT, FAIR, DDP, HSDP = "fsdp2", "fsdp2-ring", "ddp", "hsdp"
#: The same program once more: what the machine alone makes of a ratio.
AGAIN = "fsdp2 again"
#: What is forced on every operator.
FORCED = {"group sharding": "group_sharding", "communication with groups": "communication_with_groups"}
GROUPS, STEPS = FORCED
#: Limits by what they are a multiple of; the last one never binds.
LIMITS = (GROUPS, FLAT, "none")


@dataclass(frozen=True, slots=True)
class Testbed:
    """Hosts and what connects them.

    Attributes:
        hosts: How many.
        per_host: Ranks on each.
        megabits: Rate of each uplink, in millions of bits per second.
        rounds: Timed turns of each candidate.
        warmup: Untimed turns before; fast links take several until their connections are at speed.
    """

    hosts: int
    per_host: int
    megabits: int
    rounds: int
    warmup: int = 3

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.hosts}x{self.per_host} {self.megabits} Mbit/s"

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.per_host

    @property
    def grouped(self) -> bool:
        """Whether hosts have several ranks."""
        return self.per_host > 1

    def expected(self, candidate: str) -> float | None:
        """Bytes into one host a step, in multiples of the parameters; ``None`` where it depends on gloo."""
        ranks, hosts = (self.world_size - 1) / self.world_size, (self.hosts - 1) / self.hosts
        return {FAIR: 3 * ranks, STEPS: 3 * hosts, GROUPS: 2 * hosts}.get(candidate)


TESTBEDS = (
    Testbed(2, 2, 100, 4, warmup=1),
    Testbed(2, 2, 500, 7),
    Testbed(2, 2, 2000, 9),
    Testbed(4, 1, 500, 5),
    Testbed(2, 4, 500, 5),
)
QUICK = (Testbed(2, 2, 100, 2, warmup=1),)


def training() -> Training:
    return Training(local_batch=LOCAL_BATCH)


def by_hand(setting: Setting, testbed: Testbed) -> dict[str, Candidate]:
    """The baselines that these hosts allow."""
    kinds = (DDP, FLAT, FAIR, *((HSDP,) if testbed.grouped else ()))
    found = {kind: setting.by_hand(kind, testbed.per_host) for kind in kinds}
    return found | {AGAIN: setting.by_hand(FLAT)}


def forced(setting: Setting, device: DeviceInfo, testbed: Testbed) -> dict[str, Plan]:
    """The plans with one use of groups everywhere."""
    if not testbed.grouped:
        return {}
    return {
        name: setting.plan(device, **gen_fsdp_args(testbed.hosts, testbed.per_host, kind))
        for name, kind in FORCED.items()
    }


def given_links(testbed: Testbed) -> DeviceInfo:
    """Devices whose times nobody measured, for peaks of forced plans."""
    size, inside = testbed.world_size, testbed.per_host
    groups = {"world": size}
    if testbed.grouped:
        groups |= {f"inside {inside}": inside, f"across {inside}": testbed.hosts, f"two_step {inside}": size}
    links = tuple(
        Link(name, group, ranks, 5e-4, 2e8, by_exchange=name == "reduce_scatter")
        for group, ranks in groups.items()
        for name in COLLECTIVES
    )
    return DeviceInfo(
        memory_limit=UNLIMITED, nodes=testbed.hosts, devices_per_node=inside, links=links, flops=1e10,
        memory_bandwidth=1e10, copies_messages=True,
    )  # fmt: skip


def known_peaks(testbed: Testbed) -> dict[str, int]:
    """True peaks of the baselines and of the forced plans."""
    setting, device = make_setting(CASE, training()), given_links(testbed)
    candidates = by_hand(setting, testbed)
    candidates |= {
        name: setting.candidate(device, plan) for name, plan in forced(setting, device, testbed).items()
    }
    return dict(zip(candidates, highest_peaks(list(candidates.values()), testbed.world_size), strict=True))


def compare(rank: int, world_size: int, *, testbed: dict[str, int], limits: dict[str, int]) -> dict[str, Any]:
    """Worker: plan for the live network, then time every candidate and count what crosses."""
    del rank, world_size
    where, mesh = Testbed(**testbed), live_mesh()
    setting = make_setting_together(CASE, training(), mesh)
    device = DeviceInfo.detect(UNLIMITED, cache_dir=None)
    plans = forced(setting, device, where)
    plans |= {f"plan at {name}": setting.plan(device, limit) for name, limit in limits.items()}
    candidates = by_hand(setting, where)
    candidates |= {name: setting.candidate(device, plan) for name, plan in plans.items()}
    steps = {name: candidate.prepare(mesh) for name, candidate in candidates.items()}
    turns = take_turns(steps, rounds=where.rounds, warmup=where.warmup)
    return {
        "seconds": turns.seconds,
        "losses": turns.losses,
        "steps": turns.steps,
        "crossing": {name: crossing(step, turns.steps) for name, step in steps.items()},
        "plans": {name: codec.to_json(plan) for name, plan in plans.items()},
        "device": codec.to_json(device),
        "profile": codec.to_json(setting.profile),
    }


def crossing(step: TrainStep, index: int) -> float:
    """Bytes that came into this host in one step, averaged over the hosts."""
    dist.barrier()
    before = received_bytes()
    step(index)
    dist.barrier()
    total = torch.tensor(float(received_bytes() - before))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def rows_of(testbed: Testbed) -> list[Row]:
    """A row for every candidate on one testbed; one with a reason if it cannot be measured."""
    try:
        peaks = known_peaks(testbed)
    except NoCompilerError as error:
        return [{"name": testbed.name, "testbed": testbed.name, "reason": str(error)}]
    limits = {name: int(ROOM * peaks[name]) for name in LIMITS if name in peaks}
    limits["none"] = UNLIMITED
    shape = {name: getattr(testbed, name) for name in Testbed.__slots__}
    try:
        measured = launch_over(
            testbed.megabits * 10**6,
            "benchmarks.group_sharding:compare",
            testbed.world_size,
            {"testbed": shape, "limits": limits},
            timeout=1500,
            num_hosts=testbed.hosts,
        )[0]
    except NetworkUnavailableError as error:
        return [{"name": testbed.name, "testbed": testbed.name, "reason": str(error)}]
    except WorkerError as error:
        return [{"name": testbed.name, "testbed": testbed.name, "error": str(error)}]
    peaks |= plan_peaks(testbed, measured)
    expected = reference_losses(CASE, training(), testbed.world_size, measured["steps"])[-1]
    nbytes = sum(parameter.nbytes for parameter in CASE.model(device="meta").parameters())
    return [
        _row(testbed, name, measured, peaks, limits, nbytes)
        | _faults(name, measured, peaks, limits, expected)
        for name in measured["seconds"]
    ]


def plan_peaks(testbed: Testbed, measured: Mapping[str, Any]) -> dict[str, int]:
    """True peaks of the plans that were made on the testbed."""
    device = codec.from_json(DeviceInfo, measured["device"])
    setting = make_setting(CASE, training(), codec.from_json(Profile, measured["profile"]))
    plans = {name: codec.from_json(Plan, text) for name, text in measured["plans"].items()}
    candidates = [setting.candidate(device, plan) for plan in plans.values()]
    return dict(zip(plans, highest_peaks(candidates, testbed.world_size), strict=True))


def _row(
    testbed: Testbed,
    name: str,
    measured: Mapping[str, Any],
    peaks: Mapping[str, int],
    limits: Mapping[str, int],
    nbytes: int,
) -> Row:
    seconds = measured["seconds"]
    over = {kind: paired_ratio(seconds[kind], seconds[name]) for kind in (FLAT, FAIR)}
    row: Row = {
        "name": f"{testbed.name} {name}",
        "testbed": testbed.name,
        "megabits": testbed.megabits,
        "candidate": name,
        "seconds": seconds[name],
        "over_fsdp2": over[FLAT].median,
        "over_fsdp2_interval": [over[FLAT].low, over[FLAT].high],
        "over_fair_flat": over[FAIR].median,
        "over_fair_flat_interval": [over[FAIR].low, over[FAIR].high],
        "crossing": measured["crossing"][name] / nbytes,
        "crossing_expected": testbed.expected(name),
        "peak": peaks[name],
        "loss": measured["losses"][name],
    }
    if not name.startswith("plan at "):
        return row
    limit = limits[name.removeprefix("plan at ")]
    fitting = [kind for kind in seconds if not kind.startswith("plan at ") and peaks[kind] <= limit]
    best = min(fitting, key=lambda kind: median(seconds[kind]), default=None)
    plan = codec.from_json(Plan, measured["plans"][name])
    ratio = paired_ratio(seconds[best], seconds[name]) if best else None
    return row | {
        "limit": limit,
        "best": best,
        "over_best": ratio.median if ratio else None,
        "over_best_interval": [ratio.low, ratio.high] if ratio else None,
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_peak": plan.predicted.peak_bytes,
        "plan": measured["plans"][name],
    }


def _faults(
    name: str,
    measured: Mapping[str, Any],
    peaks: Mapping[str, int],
    limits: Mapping[str, int],
    expected: float,
) -> Row:
    """How far the loss is from the single process's, and under ``error`` what is wrong."""
    loss, limit = measured["losses"][name], limits.get(name.removeprefix("plan at "), UNLIMITED)
    difference = abs(loss - expected) / abs(expected)
    wrong = []
    if not difference <= LOSS_TOLERANCE:
        wrong.append(f"ends at loss {loss:.6f}, the single process at {expected:.6f}")
    if name.startswith("plan at ") and peaks[name] > limit:
        wrong.append(f"needs {format_bytes(peaks[name])}, the limit is {format_bytes(limit)}")
    return {"loss_difference": difference} | ({"error": "; ".join(wrong)} if wrong else {})


def summarize(rows: list[Row]) -> dict[str, float | int | None]:
    """The figures of the claim; ``None`` where a row that they need is missing."""
    whole = all("candidate" in row for row in rows)
    slowest = {row["candidate"]: row for row in rows if row.get("testbed") == TESTBEDS[0].name and whole}

    def speedup(candidate: str, over: str) -> float | None:
        return slowest[candidate][over] if candidate in slowest else None

    errors = [
        abs(row["crossing"] / row["crossing_expected"] - 1) for row in rows if row.get("crossing_expected")
    ]
    planned = [row["over_best"] for row in rows if row.get("best")]
    return {
        "crossing_bytes_error": max(errors, default=None) if whole else None,
        "speedup_group_over_fsdp2": speedup(GROUPS, "over_fsdp2"),
        "speedup_hierarchical_over_fsdp2": speedup(STEPS, "over_fsdp2"),
        "speedup_group_over_fair_flat": speedup(GROUPS, "over_fair_flat"),
        "speedup_hierarchical_over_fair_flat": speedup(STEPS, "over_fair_flat"),
        "planned_over_best": min(planned, default=None) if whole else None,
    }


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    testbeds = QUICK if options.quick else TESTBEDS
    result = Result(options, world_size=max(each.world_size for each in testbeds), backend="gloo")
    for testbed in harness.progress(testbeds, len(testbeds), "group_sharding"):
        result.add(*rows_of(testbed))
    result.summary = summarize(result.rows)
    return result


def _cells(row: Row) -> list[object]:
    def interval(key: str) -> str | None:
        bounds = row.get(f"{key}_interval")
        return f"{row[key]:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else None

    limit = row.get("limit")
    return [
        row["testbed"], row.get("candidate"),
        median(row["seconds"]) if row.get("seconds") else None, row.get("predicted_seconds"),
        interval("over_fsdp2"), interval("over_fair_flat"), row.get("crossing"), row.get("crossing_expected"),
        format_bytes(row["peak"]) if row.get("peak") else None,
        format_bytes(limit) if limit and limit < UNLIMITED else None,
        row.get("best"), interval("over_best"),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("group_sharding", __doc__, arguments))
    columns = [
        "hosts x ranks, uplinks", "candidate", "s/step", "predicted", "over FSDP2", "over fair flat",
        "into a host, M", "expected", "peak", "limit", "best that fits", "plan over it",
    ]  # fmt: skip
    title = "group sharding: bytes into a host and step times (emulated hosts, gloo)"
    harness.table(title, columns, map(_cells, result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
