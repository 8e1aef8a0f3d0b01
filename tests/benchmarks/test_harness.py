"""The harness itself: options, exit statuses, intervals, launching and ending processes, the rate limit."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import planner_heterogeneous
from benchmarks.search_time import row_of_small
from benchmarks.support import harness, testbed
from benchmarks.support.harness import Options, Result
from benchmarks.support.launch import WorkerError, launch
from benchmarks.support.models import CASES, FULL_SIZE, loss_of
from benchmarks.support.timing import Ratio, alternate, paired_ratio
from benchmarks.support.turns import COMPARED_STEPS, LEAST_ROUNDS, ROUNDS, take_turns_until_narrow
from osdp.hardware.device_info import Link, PointToPointLink
from tests.helpers.distributed import run
from tests.helpers.load import slowdown


def result(rows: list[harness.Row], summary: dict[str, float | int | None]) -> Result:
    return Result(Options("claim"), rows, summary)


@pytest.mark.parametrize(
    ("rows", "summary", "status"),
    [
        ([{"name": "a"}], {"x": 1.0}, harness.MEASURED),
        ([{"name": "a", "reason": "no GPU"}], {"x": 1.0}, harness.UNMEASURED),
        ([{"name": "a"}], {"x": None}, harness.UNMEASURED),
        ([{"name": "a", "reason": "no GPU"}, {"name": "b", "error": "loss"}], {"x": None}, harness.WRONG),
    ],
)
def test_a_wrong_row_outranks_an_unmeasured_one(rows, summary, status):
    assert result(rows, summary).status == status


def test_finish_writes_what_was_measured_and_where(tmp_path: Path, capsys):
    path = tmp_path / "deep" / "result.json"
    found = Result(Options("claim", quick=True, json=path), [{"name": "a", "reason": "no root"}], {"x": None})
    assert harness.finish(found) == harness.UNMEASURED
    written = json.loads(path.read_text())
    assert written["command"] == "python -m benchmarks.claim --quick"
    assert written["summary"] == {"x": None}
    assert set(written["environment"]) == {
        "torch", "python", "cores", "device", "backend", "world_size", "commit", "gpu_allocator", "ranks",
    }  # fmt: skip
    assert "not measured: a: no root" in capsys.readouterr().err


def test_a_run_goes_on_where_an_earlier_one_was_ended(tmp_path: Path, capsys) -> None:
    path = tmp_path / "result.json"
    rows = [{"name": "a"}, {"name": "b", "error": "too much"}, {"name": "c", "reason": "no root"}]
    Result(Options("claim", json=path), rows).write()
    options = harness.parse_options("claim", None, ["--json", str(path), "--resume"], resumes=True)
    later = Result(options)
    # What is wrong is not measured until it is right.
    assert later.keep() == {"a", "b"}
    later.add({"name": "c"})
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["a", "b", "c"]
    assert Result(Options("claim", json=path)).keep() == set()
    with pytest.raises(SystemExit):
        harness.parse_options("claim", None, ["--resume"], resumes=True)
    assert "--resume needs --json FILE" in capsys.readouterr().err


def test_paired_ratio_ignores_noise_that_both_share():
    noise = [1.0, 3.0, 1.5, 2.0, 9.0]
    assert paired_ratio([2 * n for n in noise], noise) == Ratio(2.0, 2.0, 2.0)


def test_interval_holds_the_median_and_widens_with_the_noise():
    ratio = paired_ratio([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8], [1.0] * 7)
    assert ratio.low < ratio.median < ratio.high


def test_every_round_times_each_candidate_and_none_always_follows_the_same_other():
    calls: list[str] = []
    seconds = alternate({name: partial(calls.append, name) for name in "abc"}, rounds=20, warmup=1, repeats=2)
    rounds = ["".join(calls[begin : begin + 6]) for begin in range(0, len(calls), 6)]
    assert len(rounds) == 21
    assert all(sorted(order) == list("aabbcc") and order[::2] == order[1::2] for order in rounds)
    assert {(before, after) for order in rounds for before, after in pairwise(order[::2])} == set(
        permutations("abc", 2)
    )
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 20)


def test_ranks_time_candidates_in_the_same_order():
    orders: list[list[str]] = [[], []]
    for order in orders:
        alternate({name: partial(order.append, name) for name in "abcd"}, rounds=5, warmup=0)
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", [name for name in CASES if name not in FULL_SIZE])
def test_every_case_trains_and_names_its_blocks(name: str):
    case = CASES[name]
    model = case.model()
    batch = case.sample(2)
    assert all(torch.equal(batch[key], case.sample(2)[key]) for key in batch)
    loss_of(model(**batch)).backward()
    blocks = case.find_blocks(model)
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    assert len(blocks) >= 2
    assert inside > 0.2 * sum(p.numel() for p in model.parameters())


def test_launch_gives_each_rank_one_core_and_one_thread():
    assert (
        launch("tests.benchmarks.workers:work", 2, {}, timeout=90 * slowdown())
        == [{"total": 1, "threads": 1, "cores": 1}] * 2
    )


def test_launch_reports_the_rank_that_failed():
    with pytest.raises(WorkerError, match=r"rank 1 ended with status 1(.|\n)*on purpose"):
        launch("tests.benchmarks.workers:work", 2, {"fail": 1}, timeout=90 * slowdown())


def test_launch_ends_ranks_that_take_too_long():
    with pytest.raises(WorkerError, match="did not end within"):
        launch("tests.benchmarks.workers:work", 1, {"hang": 3600}, timeout=2)


def test_ranks_are_gone_when_the_launcher_is_terminated(tmp_path: Path):
    path = tmp_path / "pid"
    script = (
        "from benchmarks.support.launch import launch\n"
        f"launch('tests.benchmarks.workers:hang', 1, {{'path': {str(path)!r}}}, timeout=90)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60 * slowdown()
        while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        rank = int(path.read_text())
        process.terminate()
        process.wait(30 * slowdown())
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


@pytest.mark.alone
def test_hosts_limit_the_rate():
    try:
        with testbed.hosts(2, 80_000_000) as hosts:
            seconds = _transfer(hosts, 2_000_000)
    except testbed.NetworkUnavailableError as error:
        pytest.skip(str(error))
    # 2 MB at 10 MB/s: the bucket lets a little through at once.
    assert 0.1 < seconds < 1.0
    assert not set(hosts.namespaces) & set(_namespaces())


def _transfer(hosts: testbed.Hosts, nbytes: int) -> float:
    """Seconds from the first to the last byte of one stream between the hosts."""
    receive = (
        "import socket, time\n"
        "listener = socket.create_server(('10.231.7.1', 5001)); print('ready', flush=True)\n"
        "peer, _ = listener.accept(); peer.recv(1); begin = time.monotonic()\n"
        "while peer.recv(65536): pass\n"
        "print(time.monotonic() - begin)"
    )
    send = f"import socket; socket.create_connection(('10.231.7.1', 5001), 10).sendall(bytes({nbytes}))"
    first, second = hosts.prefixes(2)
    with subprocess.Popen(
        [*first, sys.executable, "-c", receive], stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        try:
            assert receiver.stdout.readline() == "ready\n"
            subprocess.run([*second, sys.executable, "-c", send], check=True, timeout=120 * slowdown())
            return float(receiver.stdout.readline())
        finally:
            receiver.kill()


def _namespaces() -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=120 * slowdown()
    )
    return [line.split()[0] for line in listed.stdout.splitlines() if line]


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
def test_hosts_are_gone_after_ctrl_c(request_to_end: signal.Signals):
    try:
        testbed.check_available()
    except testbed.NetworkUnavailableError as error:
        pytest.skip(str(error))
    script = (
        # A shell that runs the tests in the background lets its children ignore the interrupt.
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from benchmarks import testbed\n"
        "with testbed.hosts(2, 10**9) as hosts:\n"
        "    print(*hosts.namespaces, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        if not names:
            pytest.skip("this machine does not let root make network namespaces")
        assert set(names) <= set(_namespaces())
        process.send_signal(request_to_end)
        process.wait(30 * slowdown())
    assert not set(names) & set(_namespaces())


def test_the_planned_layout_is_the_best_of_its_contest_by_its_price() -> None:
    inside = Link("all_reduce", "tensor", 2, 2e-4, 1e9)
    layers = {(slow, tp): (0.01 * (1 + 2 * slow) / tp,) * 2 for slow in (False, True) for tp in (1, 2)}
    prices = planner_heterogeneous.prices_of(PointToPointLink(1e-4, 6e7), inside, layers)
    entries = planner_heterogeneous.contest(prices)
    assert [entry.name for entry in entries[:2]] == ["planned", "even"]
    assert len(entries) > 5
    assert any(entry.plan.layout.degrees.tp > 1 for entry in entries[2:])
    assert entries[0].plan.step_seconds == min(entry.plan.step_seconds for entry in entries)


CLAIMS = sorted(path.stem for path in Path(harness.__file__).parents[1].glob("[a-z]*.py"))


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_benchmark_can_be_imported(claim: str) -> None:
    """One could not for a day: it took what another no longer had."""
    assert callable(importlib.import_module(f"benchmarks.{claim}").main)


def _turns_of_four() -> tuple[dict[str, int], dict[str, int], list[str]]:
    made: dict[str, int] = dict.fromkeys("abcd", 0)

    def make(name: str) -> Callable[[int], float]:
        made[name] += 1
        return lambda step: float(step)

    asked: list[str] = []

    def still_needed(seconds: Mapping[str, list[float]]) -> set[str]:
        asked.append(str({name: len(times) for name, times in seconds.items()}))
        # Ranks do not agree; the first one's word counts.
        return {"a", "b"} if len(seconds["a"]) < 30 else set("abc" if dist.get_rank() else "")

    makers = {name: partial(make, name) for name in "abcd"}
    turns = take_turns_until_narrow(makers, still_needed, clearly_slower=lambda seconds: {"d"})
    assert set(turns.losses.values()) == {COMPARED_STEPS - 1.0}
    return {name: len(times) for name, times in turns.seconds.items()}, made, asked


def test_candidates_are_made_anew_until_they_are_no_longer_needed() -> None:
    rounds, made = {"a": 30, "b": 30, "c": LEAST_ROUNDS, "d": ROUNDS}, {"a": 6, "b": 6, "c": 4, "d": 1}
    for found, making, asked in run(2, _turns_of_four):
        assert (found, making, len(asked)) == (rounds, made, 3)
    assert all(count == ROUNDS * made[name] for name, count in rounds.items())


def test_models_of_small_operators_are_planned_and_told_of_in_json() -> None:
    row = row_of_small(3)
    assert json.loads(json.dumps(row)) == row and row["parameters"] == 6 and row["units"] >= 1
