"""Memory that is freed on CPUs stays in the process, so that the next step need not fault it in anew."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from osdp.allocator import _CHOSEN, allocated_bytes

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is set")

#: Blocks of 24 MiB are touched and freed; prints how many resident MiB more than before are left of 96.
_PROGRAM = """
import ctypes, sys
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if "keep" in sys.argv:
    from osdp.allocator import keep_freed_memory
    keep_freed_memory()
blocks = [bytearray(24 * 2**20) for _ in range(4)]
for block in blocks:
    block[::4096] = b"1" * (len(block) // 4096)
before = resident()
del blocks, block
print(before - resident())
"""


def _returned(*arguments: str, **variables: str) -> float:
    """MiB that a process returned to the system, of 96 that it freed."""
    environment = {name: value for name, value in os.environ.items() if name not in _CHOSEN} | variables
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return float(done.stdout)


def test_freed_memory_is_kept() -> None:
    assert _returned() > 90
    assert _returned("keep") < 5


def test_what_the_user_set_is_left_alone() -> None:
    assert _returned("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 90


@pytest.mark.skipif(allocated_bytes() is None, reason="this C library does not tell what is in use")
@pytest.mark.parametrize("nbytes", [2**16, 2**24])
def test_bytes_in_use_follow_tensors(nbytes: int) -> None:
    before = allocated_bytes()
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    held = allocated_bytes()
    del tensor
    after = allocated_bytes()
    assert before is not None and held is not None and after is not None
    assert nbytes <= held - before < nbytes + 2**13
    assert abs(after - before) < 2**13
