"""Saving while training goes on: a copy of this rank's shards, written by a thread of its own."""

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from osdp.comm.objects import has_process_group, is_first
from osdp.plan.plan import Plan
from osdp.text import format_bytes

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


class _HostMemory:
    """Where the shards of a model are copied to: it is kept for the next copy, if that is of like shapes.

    Fresh memory takes longer to get, page by page, than to fill.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        # A copy that was interrupted, as by Ctrl-C, goes on in its thread.
        self._lock = Lock()
        #: Whether steps of optimizers need not wait for a copy of their states.
        self.is_settled = Event()
        self.is_settled.set()
        self._handle: RemovableHandle | None = None

    def copy(self, tensors: list[torch.Tensor], places: Iterable[int]) -> list[torch.Tensor]:
        """Copies of those of ``tensors`` at ``places``, over those made before, in place of all of them."""
        with self._lock:
            if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self._tensors]:
                self._tensors.clear()  # before there are others
                with torch.inference_mode(False):
                    self._tensors.extend(_on_large_pages(tensors))
            pairs = [(self._tensors[place], tensors[place]) for place in places]
            if pairs:
                # In one call: between two, another thread that runs Python would make it wait.
                torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
            return list(self._tensors)

    def hold_steps(self) -> None:
        """Let steps wait from now on, until :attr:`is_settled` is set."""
        # A save that failed may have left a copy under way, which would set it for this one.
        self.is_settled.wait()
        self._handle = self._handle or _hold_steps(self)
        self.is_settled.clear()

    def close(self) -> None:
        """Hold no more steps; called between two."""
        if self._handle is not None:
            self._handle.remove()


def _hold_steps(memory: _HostMemory) -> RemovableHandle:
    """Let steps of optimizers, which alone change their states, wait until these are copied."""
    reference = weakref.ref(memory)

    def wait(*_: object) -> None:
        living = reference()
        if living is not None:
            living.is_settled.wait()

    # Dynamo cannot trace it, and need not: it decides nothing about the step.
    uncompiled: Any = torch.compiler.disable(wait)
    return register_optimizer_step_pre_hook(uncompiled)


class Copying:
    """A copy that is being made.

    Attributes:
        result: All copies, or what went wrong.
    """

    def __init__(self) -> None:
        self.result: Future[list[torch.Tensor]] = Future()
        self._has_values, self._may_go_on = Event(), Event()

    def make(
        self,
        memory: _HostMemory,
        tensors: list[torch.Tensor],
        later: frozenset[int],
        watched: list[torch.Tensor],
    ) -> None:
        """Copy ``tensors``, those at the places ``later`` last; meanwhile nobody is to change ``watched``."""
        try:
            versions = [tensor._version for tensor in watched]
            made = memory.copy(tensors, (place for place in range(len(tensors)) if place not in later))
            self._has_values.set()
            if later:
                # Not before training goes on, which it would take the core from.
                self._may_go_on.wait()
                made = memory.copy(tensors, sorted(later))
            if [tensor._version for tensor in watched] != versions:
                raise RuntimeError(
                    "optimizer states were changed in place while they were copied, which only steps wait "
                    "for: call wait() of the save before"
                )
            self.result.set_result(made)
        except BaseException as error:  # the other ranks wait
            self.result.set_exception(error)
        finally:
            watched.clear()
            memory.is_settled.set()
            self._has_values.set()

    def go_on(self) -> None:
        """Copy optimizer states, too; called when training goes on."""
        self._may_go_on.set()

    def wait_for_values(self) -> BaseException | None:
        """Wait until all but optimizer states are copied; what went wrong, if that is known by then."""
        self._has_values.wait()
        return self.result.exception() if self.result.done() else None


def _on_large_pages(like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Uninitialized tensors in host memory, like those given, on large pages where the system has them.

    Copies into them take about a tenth less (copies of 825 MB on two ranks, on two cores; Linux 6.18).
    """
    sizes = [-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for tensor in like]
    memory = mmap.mmap(-1, sum(sizes) or mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = 0
    for tensor, size in zip(like, sizes, strict=True):
        if tensor.is_contiguous() and tensor.numel():
            # With a storage of its own: torch copies what is a part of a larger one before it writes it.
            alone = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            yield alone.view(tensor.shape)
        else:
            yield torch.empty_like(tensor, device="cpu")
        start += size


@cache
def _host_memory() -> WeakKeyDictionary[nn.Module, _HostMemory]:
    return WeakKeyDictionary()


def forget_copy(model: nn.Module) -> None:
    """Give back the host memory of the last copy of ``model``, once it is saved."""
    wait_for_saves()
    memory = _host_memory().pop(model, None)
    if memory is not None:
        memory.close()


def start_copy(
    model: nn.Module,
    tensors: list[torch.Tensor],
    copying: Copying,
    states: Collection[int] = frozenset(),
    optimizers: Iterable[Optimizer] = (),
) -> None:
    """Start to copy ``tensors`` to host memory.

    On CPUs a thread does it: optimizer states after all else, since nothing but the next step changes them,
    which waits for that (as in DataStates-LLM: Maurya et al., HPDC 2024). What is on an accelerator is copied
    at once, in the order of the stream that is current here, which is not that of another thread. No copy of
    the same model may be in use.

    Args:
        model: The model, whose memory for copies is kept.
        tensors: What is to be copied.
        copying: Holds what is made; nothing is made of ``states`` before its :meth:`~Copying.go_on`.
        states: Places of those that are optimizer states.
        optimizers: The optimizers that have them.
    """
    memory = _host_memory().get(model)
    if memory is None:
        memory = _host_memory()[model] = _HostMemory()
    if any(tensor.device.type != "cpu" for tensor in tensors):
        copying.make(memory, tensors, frozenset(), [])
        interruption = copying.result.exception()
        if interruption is not None and not isinstance(interruption, Exception):
            raise interruption
        return
    # Single numbers, such as a learning rate, others change as well; inference tensors do not tell.
    later = frozenset(place for place in states if _tells_changes(tensors[place]))
    # Operations of DTensors are counted by these, not by their shards.
    held = [value for each in optimizers for state in each.state.values() for value in state.values()]
    watched = [value for value in held if isinstance(value, torch.Tensor) and _tells_changes(value)]
    watched += [tensors[place] for place in later]
    thread = Thread(target=copying.make, args=(memory, tensors, later, watched), name="osdp-copy")
    memory.hold_steps()
    try:
        thread.start()
    except BaseException:
        if not thread.is_alive():
            memory.is_settled.set()
        raise


def _tells_changes(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not tensor.is_inference()


def room_fault(model: nn.Module, nbytes: int) -> ValueError | None:
    """What is wrong with a copy of ``nbytes`` if, on CPUs, it exceeds the plan's limit."""
    plan: Plan | None = getattr(model, "plan", None)
    if plan is None or plan.predicted.peak_bytes + nbytes <= plan.memory_limit:
        return None
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    forget_copy(model)
    return ValueError(
        f"a copy of this rank's shards takes {format_bytes(nbytes)} beside the plan's peak of "
        f"{format_bytes(plan.predicted.peak_bytes)}, and the limit is {format_bytes(plan.memory_limit)}: "
        "save() needs no copy"
    )
