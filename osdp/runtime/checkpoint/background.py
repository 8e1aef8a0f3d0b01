"""Saving while training goes on: a copy of this rank's shards, written by a thread of its own."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.objects import has_process_group, is_first
from osdp.plan.plan import Plan
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.text import format_bytes
from osdp.torch_private.dtensor import mesh_on_host, wrap_like

logger = logging.getLogger(__name__)


class AsyncSave:
    """A save that is under way."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._future: Future[None] = _writer().submit(write)
        self._future.add_done_callback(_tell_failure)

    @property
    def is_done(self) -> bool:
        """Whether this rank has written; the checkpoint is there when all have."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            RuntimeError: A rank could not write; the folder keeps its old checkpoint.
        """
        self._future.result()


def _tell_failure(future: Future[None]) -> None:
    """Log what went wrong: a training that saves every so often may never wait for a save."""
    error = future.exception()
    if error is not None and is_first():
        logger.error("a checkpoint was not saved in the background: %s", error)


def wait_for_saves() -> None:
    """Wait for the saves in the background that this process has started, however they end."""
    if _writer.cache_info().currsize:
        _writer().submit(lambda: None).result()


@cache
def _writer() -> ThreadPoolExecutor:
    # One thread: saves are written one after another, in the same order on all ranks.
    return ThreadPoolExecutor(1, thread_name_prefix="osdp-checkpoint")


def background_group() -> dist.ProcessGroup | None:
    """All ranks, in a group of its own, whose collectives may run beside those of training."""
    return _group_beside(dist.group.WORLD) if has_process_group() else None


@cache
def _group_beside(_world: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def start_copy(model: nn.Module, state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Start to copy the tensors of ``state`` to host memory, of DTensors this rank's shards.

    On CPUs a thread does it. What is on an accelerator is copied at once, in the order of the stream that is
    current here, which is not that of another thread.

    Returns:
        Waits for the copy, and returns ``state`` with it.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        made = _copied(state)
        return lambda: made
    thread = ThreadPoolExecutor(1, thread_name_prefix="osdp-copy")
    copying: Future[dict[str, Any]] = thread.submit(_copied, state)
    thread.shutdown(wait=False)
    return copying.result


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, DTensor):
        local = _copied(value.to_local())
        if value.device_mesh.device_type == "cpu":
            return wrap_like(local, value)
        return DTensor.from_local(
            local,
            mesh_on_host(value.device_mesh),
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        found = value.detach()
        return found.clone() if found.device.type == "cpu" else found.cpu()
    return value


def check_room_for_copy(model: nn.Module, state: dict[str, Any]) -> None:
    """Tell how much a copy takes, and refuse one that exceeds the plan's limit on CPUs; every rank calls it.

    Raises:
        ValueError: The plan's peak and the copy exceed its limit.
    """
    nbytes = _local_bytes(state)
    plan: Plan | None = getattr(model, "plan", None)
    fault = None
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if plan is not None and on_host and plan.predicted.peak_bytes + nbytes > plan.memory_limit:
        fault = ValueError(
            f"a copy of this rank's shards takes {format_bytes(nbytes)} beside the plan's peak of "
            f"{format_bytes(plan.predicted.peak_bytes)}, and the limit is {format_bytes(plan.memory_limit)}: "
            "save() needs no copy"
        )
    raise_together(fault, "nothing was saved")
    if is_first():
        logger.info(
            "until it is saved, a copy of this rank's shards takes %s of host memory", format_bytes(nbytes)
        )


def _local_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_local_bytes, value.values()))
    if isinstance(value, DTensor):
        return int(value.to_local().nbytes)
    return int(value.nbytes) if isinstance(value, torch.Tensor) else 0
