"""A slower host on this machine: processes that may run a part of the time only (control groups, quotas)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.launch import ended_cleanly

_ROOT = Path("/sys/fs/cgroup")
#: Microseconds within which the share is used up: well below a layer's time.
_PERIOD = 20000


class ShareUnavailableError(RuntimeError):
    """This machine cannot limit the time of processes; the message says why in one line."""


@contextmanager
def limited(share: float) -> Iterator[list[str]]:
    """The command in front of another one that lets it run ``share`` of a core's time.

    Raises:
        ShareUnavailableError: No root, or no control groups.
    """
    unified = (_ROOT / "cgroup.controllers").exists()
    group = (_ROOT if unified else _ROOT / "cpu") / f"osdp{os.getpid()}"
    quota = round(share * _PERIOD)
    limits = (
        {"cpu.max": f"{quota} {_PERIOD}"}
        if unified
        else {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": str(quota)}
    )
    with ended_cleanly():
        try:
            group.mkdir()
            for name, value in limits.items():
                (group / name).write_text(value)
        except OSError as error:
            raise ShareUnavailableError(f"slower hosts need root and control groups: {error}") from error
        try:
            yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
        finally:
            # Whoever is left would keep it; all ranks have ended by now.
            group.rmdir()
