"""Live bytes are counted in the process itself, the buffers of gloo included."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.launch import launch
from benchmarks.support.live_bytes import LiveBytes, preload

MIB = 2**20


def _counted(run: Callable[[], object]) -> list[int]:
    """Bytes that ``run`` had alive at most, and that it left, beyond those before."""
    dist.barrier()
    live = LiveBytes()
    before = live.now
    live.start()
    kept = run()
    found = [live.peak - before, live.now - before]
    del kept
    return found


def collectives(rank: int, world_size: int) -> dict[str, list[int]]:
    """Worker: the bytes of a tensor and of each collective of 8 MiB."""
    full, shard = torch.zeros(2 * MIB), torch.zeros(2 * MIB // world_size)
    return {
        "tensor": _counted(lambda: torch.zeros(MIB)),
        "sum": _counted(lambda: (full + 1).sum()),
        "all_gather": _counted(lambda: dist.all_gather_into_tensor(full, shard)),
        "reduce_scatter": _counted(lambda: dist.reduce_scatter_tensor(shard, full)),
        "all_reduce": _counted(lambda: dist.all_reduce(full)),
    }


@pytest.mark.skipif(shutil.which("cc") is None, reason="the counter is built by a C compiler")
def test_tensors_and_the_copies_of_gloo_are_counted() -> None:
    """Gloo copies what it gathers and what it reduces to shards, which the ``fake`` group does not show."""
    worker = "tests.benchmarks.test_live_bytes:collectives"
    for counted in launch(worker, 2, {}, timeout=100, environment=preload()):
        expected = {"tensor": (4, 4), "sum": (8, 0), "all_gather": (8, 0), "reduce_scatter": (8, 0)}
        for name, (peak, left) in (expected | {"all_reduce": (0, 0)}).items():
            assert counted[name] == pytest.approx([peak * MIB, left * MIB], abs=64 * 1024), name


def test_a_process_without_the_counter_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"live_bytes.preload\(\)"):
        LiveBytes()
