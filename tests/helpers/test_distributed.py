"""The process helper itself."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import BackendCrash, RankCrashedError, RankError, run
from tests.helpers.load import MOST, slowdown


def _sum_of_ranks(offset: float) -> tuple[torch.Tensor, int, int]:
    total = torch.full((2,), dist.get_rank() + offset)
    dist.all_reduce(total)
    return total, dist.get_rank(), torch.get_num_threads()


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    dist.barrier()


def _crash(marker: str, times: int) -> int:
    before = len(list(Path(marker).iterdir()))
    dist.barrier()
    if dist.get_rank() == 1 and before < times:
        Path(marker, str(before)).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return before


def _sleep_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600)


def _what_it_finds(leave: str = "") -> tuple[int, float, str | None, str, bool]:
    """The process, a random number, a variable, the folder and a setting; then something of them changes."""
    found = os.getpid(), torch.rand(()).item(), os.environ.get("LEFT"), os.getcwd(), torch.is_grad_enabled()
    if leave == "what is set back":
        os.environ["LEFT"] = "behind"
        os.chdir("/")
    elif leave == "a setting":
        torch.set_grad_enabled(False)
    elif leave == "a patch":
        dist.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    elif leave == "silence":
        logging.disable()
    elif leave == "a thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return found


def test_results_come_back_by_rank_and_ranks_talk() -> None:
    results = run(3, _sum_of_ranks, 0.5)
    assert [rank for _, rank, _ in results] == [0, 1, 2]
    assert all(total.tolist() == [4.5, 4.5] and threads == 1 for total, _, threads in results)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised KeyError.*\n(.*\n)*.*on purpose") as caught:
        run(2, _fail_on_one)
    assert (caught.value.rank, caught.value.error) == (1, "KeyError")


def test_a_hanging_rank_ends_in_time() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] of 2"):
        run(2, _sleep_on_one, timeout=1.0)


@pytest.mark.parametrize(("cores", "load", "factor"), [(4, 1.0, 1.0), (4, 12.0, 3.0), (2, 1e3, MOST)])
def test_limits_grow_with_the_load_to_an_end(
    cores: int, load: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert slowdown() == factor


def test_the_next_call_finds_the_same_ranks_as_if_they_were_new() -> None:
    first = run(2, _what_it_finds, "what is set back")
    second = run(2, _what_it_finds)
    assert {pid for pid, *_ in first} == {pid for pid, *_ in second}
    assert sorted(found for _, *found in first) == sorted(found for _, *found in second)
    fresh = run(2, _what_it_finds, fresh=True)
    assert not {pid for pid, *_ in second} & {pid for pid, *_ in fresh}


@pytest.mark.parametrize("left", ["a setting", "a patch", "silence", "a thread"])
def test_ranks_that_leave_something_behind_are_not_used_again(left: str) -> None:
    first, second = run(2, _what_it_finds, left), run(2, _what_it_finds)
    assert not {pid for pid, *_ in first} & {pid for pid, *_ in second}
    assert [found for _, *found in first] == [found for _, *found in second]


def test_what_dies_by_a_signal_is_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(BackendCrash, match="_crash on 2 ranks"):
        assert run(2, _crash, str(tmp_path), 1) == [1, 1]
    with pytest.warns(BackendCrash), pytest.raises(RankCrashedError):
        run(2, _crash, str(tmp_path), 3)
