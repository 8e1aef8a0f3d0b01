"""What counts as a rank that was refused memory."""

import pytest

from benchmarks.support import live_peaks
from benchmarks.support.candidates import Candidate
from benchmarks.support.launch import WorkerError
from benchmarks.support.models import CASES
from osdp import Training

REFUSED = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: not enough memory: you tried to"
LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:4242"
CANDIDATE = Candidate("ddp", CASES["mlp"], Training(local_batch=1))


@pytest.mark.parametrize(("message", "kind"), [(REFUSED, MemoryError), (LOST, RuntimeError)])
def test_a_rank_that_lost_its_connection_was_not_refused_memory(
    message: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object) -> None:
        if limited:
            raise RuntimeError(message)

    limited: list[object] = []
    monkeypatch.setattr(live_peaks, "_candidate", lambda order: CANDIDATE)
    monkeypatch.setattr(live_peaks, "live_mesh", lambda: None)
    monkeypatch.setattr(live_peaks, "_train", train)
    monkeypatch.setattr(live_peaks.resource, "setrlimit", lambda *limit: limited.append(limit))
    with pytest.raises(kind) as raised:
        live_peaks.train_within(0, 2, order={}, limit=2**20)
    assert isinstance(raised.value, MemoryError) == (kind is MemoryError)


def test_one_rank_must_have_been_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise WorkerError("\n".join(reports))

    monkeypatch.setattr(live_peaks, "launch", launch)
    reports = [f"rank 0 ended with status 1:\nRuntimeError: {LOST}"]
    with pytest.raises(WorkerError):
        live_peaks.run_within(CANDIDATE, 2, 2**20)
    reports.append(f"rank 1 ended with status 1:\nMemoryError: beyond 1 MiB a rank may take 2: {REFUSED}")
    outcome = live_peaks.run_within(CANDIDATE, 2, 2**20)
    assert not outcome.survived and REFUSED in outcome.why
