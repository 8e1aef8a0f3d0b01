"""Memory allocator of the C library: keeps what tensors on CPUs have freed, and tells what is in use.

A step frees its activations, gathered parameters and gradients and allocates them again in the next one.
glibc returns large freed blocks to the system, so that each page is faulted in and zeroed anew: steps with
sharded units took 15 to 25 % longer than their parts.
"""

import ctypes
import os
import platform
from functools import cache

# mallopt(3): parameters of glibc's malloc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes up to which freed memory is kept, and from which a single block is still returned when it is freed,
#: with an older glibc from fewer.
_KEPT, _HUGE, _LARGE = 2**31 - 1, 2**30, 2**25
#: What users set to choose for themselves (mallopt(3), ld.so(8)).
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Have glibc keep up to 2 GiB of freed memory in this process instead of returning it to the system.

    That is what lies at the end of the heap; holes between blocks in use stay as well. It counts for the
    resident size, not for the live bytes that limits are about. Where the environment sets
    glibc's allocator, and with any other C library, this does nothing.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _CHOSEN):
        return
    library = ctypes.CDLL(None)
    # Either ends glibc's own adjustment of the other. Before 2.35 it refuses more than 32 MiB.
    if not library.mallopt(_MMAP_THRESHOLD, _HUGE):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` (mallinfo(3)), of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip


@cache
def _mallinfo2() -> "ctypes._NamedFuncPointer | None":
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    function.restype, function.argtypes = _Mallinfo2, ()
    return function


def allocated_bytes() -> int | None:
    """Bytes in use of all threads, tensors on CPUs among them; ``None`` where the C library does not tell.

    Under another allocator, such as a preloaded jemalloc, it is what little the C library still gives out.
    """
    function = _mallinfo2()
    if function is None:
        return None
    found = function()
    return int(found.uordblks + found.hblkhd)
