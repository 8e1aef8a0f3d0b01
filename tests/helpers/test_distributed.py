"""The process helper itself."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import BackendCrash, RankCrashedError, RankError, run


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
        time.sleep(30)


def test_results_come_back_by_rank_and_ranks_talk() -> None:
    results = run(3, _sum_of_ranks, 0.5)
    assert [rank for _, rank, _ in results] == [0, 1, 2]
    assert all(total.tolist() == [4.5, 4.5] and threads == 1 for total, _, threads in results)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised KeyError.*\n(.*\n)*.*on purpose") as caught:
        run(2, _fail_on_one)
    assert (caught.value.rank, caught.value.error) == (1, "KeyError")


def test_a_hanging_rank_ends_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] of 2"):
        run(2, _sleep_on_one, timeout=3.0)
    assert time.monotonic() - started < 10


def test_what_dies_by_a_signal_is_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(BackendCrash, match="_crash on 2 ranks"):
        assert run(2, _crash, str(tmp_path), 1) == [1, 1]
    with pytest.warns(BackendCrash), pytest.raises(RankCrashedError):
        run(2, _crash, str(tmp_path), 3)
