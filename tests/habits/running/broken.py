"""Habits that fail on purpose: what runs habits must tell how."""

import os
import signal

import torch

from tests.habits.running.context import Context
from tests.habits.running.habit import habit


@habit(seconds=1.0)
def hangs(ctx: Context) -> None:
    """Waits on one rank for a collective that the other never begins."""
    if not ctx.alone and ctx.ranks[0] == 0:
        torch.distributed.barrier()


@habit()
def dies(ctx: Context) -> None:
    """Ends the process of one rank."""
    if not ctx.alone and ctx.ranks[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@habit()
def differs(ctx: Context) -> None:
    """Computes something else on one rank."""
    ctx.value("number", 1.0 + (not ctx.alone and ctx.ranks[0] == 1))


@habit()
def raises(ctx: Context) -> None:
    """Raises what no framework said."""
    if not ctx.alone:
        raise KeyError("of the user")


@habit()
def works(ctx: Context) -> None:
    """Records the mean of the ranks' numbers."""
    parts = torch.tensor([float(rank) for rank in ctx.ranks])
    ctx.value("mean", ctx.mean(parts.mean()))
