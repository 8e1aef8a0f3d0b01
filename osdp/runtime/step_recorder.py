"""Records what steps of a running model take: compute by stretch of the trace, collectives, the optimizer.

Of modules that cannot be traced it records what they keep, too. Hooks read two clocks where modules return,
and where gradients of what they returned arrive::

    forward    begin | ... h.0 returns | ... h.1 returns | ... end
    backward   end | ... gradient of h.0 | ... gradient of h.1 | ... begin      (from right to left)

What lies between two marks is the compute of a stretch, less the collectives in it; of all stretches between
them where some mark is not read, since no gradient arrives in what needs none and a compiled block runs no
hooks. On CPUs with one thread compute is counted in CPU time, which stands still while a rank waits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from osdp.allocator import allocated_bytes
from osdp.runtime.microbatch import batch_shape, num_samples, shape_of_sample
from osdp.runtime.module.outputs import tensors_with_grad
from osdp.runtime.ranks.participants import GATHER
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.torch_private.autograd import in_backward, queue_backward_callback
from osdp.torch_private.compiling import not_compiled
from osdp.torch_private.distributed import storage_id
from osdp.torch_private.optimizers import is_stepping

#: Forwards without a step after which what was recorded of it is dropped: nothing may step any more.
_MOST_FORWARDS = 1000


class ClockMark(NamedTuple):
    """A moment: seconds of the wall clock, and of the clock of compute."""

    wall: float
    compute: float


@dataclass
class RecordedStep:
    """What one step took on this rank, seconds.

    Attributes:
        samples: Samples of a forward.
        shapes: Shapes of the largest tensors of forwards, without their samples.
        forwards: Forwards with gradients.
        scheduled: Microbatches that ``train_step`` cut the batch into; 0 in a loop of one's own.
        reductions: Backwards that reduced gradients.
        forward: Compute by the modules that end the stretches it is of; ``""`` ends the model.
        backward: The same in backward.
        collectives: Of each unit, by its first operator, bytes and seconds of gathers and of reductions, but
            for those that ran beside reductions of replicated gradients.
        forward_seconds: All forwards.
        backward_seconds: All backwards.
        optimizer_seconds: Steps of the optimizers.
        gather_seconds: Gathering what they have made of parameters that each rank steps in part.
        in_cpu_time: Whether compute is counted in CPU time.
        opaque: Bytes that calls of opaque modules left alive, at most; by their FQNs. There are none where
            nothing tells what is in use.
        kept: Bytes that a forward left alive, at most; 0 where nothing tells or nobody asked.
        returned: Bytes of what that forward returned, which it may have left alive besides.
    """

    samples: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    forwards: int = 0
    scheduled: int = 0
    reductions: int = 0
    forward: dict[tuple[str, ...], float] = field(default_factory=dict)
    backward: dict[tuple[str, ...], float] = field(default_factory=dict)
    collectives: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    gather_seconds: float = 0.0
    in_cpu_time: bool = False
    opaque: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    returned: int = 0

    @property
    def seconds(self) -> float:
        """All of it: a step without what the loop does besides."""
        passes = self.forward_seconds + self.backward_seconds
        return passes + self.optimizer_seconds + self.gather_seconds

    @property
    def batch(self) -> tuple[int, int]:
        """Samples of a microbatch, and microbatches."""
        return self.samples, self.scheduled or self.forwards


class StepRecorder:
    """Records the steps of a model from its next forward on, until :meth:`close`.

    Args:
        running: The model.
        ends: FQNs of the modules that end stretches, in the order of the trace.
        optimizers: What steps on it, the first of which ends a step.
        opaque: FQNs of opaque modules, the memory of which is recorded.
        counts: Whether what forwards leave alive is recorded.

    Attributes:
        steps: What was recorded.
        scheduled: Microbatches that ``train_step`` cuts the next batch into; 0 in a loop of one's own.
    """

    def __init__(
        self,
        running: ShardedModel,
        ends: Sequence[str],
        optimizers: Sequence[Optimizer],
        opaque: Sequence[str] = (),
        *,
        counts: bool = False,
    ) -> None:
        self.steps: list[RecordedStep] = []
        self.scheduled = 0
        self._running = running
        self._in_cpu_time = torch.get_num_threads() == 1
        self._clock: Callable[[], float] = time.thread_time if self._in_cpu_time else time.perf_counter
        self._now = RecordedStep(in_cpu_time=self._in_cpu_time)
        self._names = (*ends, "")
        #: Marks of the pass under way: the forward that each is of, and the place in ``_names`` of the
        #: stretch that it ends in forward, and begins in backward. The first mark begins the pass.
        self._marks: list[tuple[int, int, ClockMark]] = []
        self._begun: set[tuple[int, int]] = set()
        self._num_forwards = 0
        #: Begin and end of each collective in the pass; the last one may be a gather that is copied out yet.
        self._spans: list[tuple[ClockMark, ClockMark]] = []
        self._copied: tuple[list[tuple[int, float]], ClockMark] | None = None
        self._runs_backward = False
        #: The optimizer that steps, when it began, and the seconds of what may run in its step by then. It
        #: may step others, as Lookahead does.
        self._stepping: tuple[Optimizer, ClockMark, float] | None = None
        #: Whether the optimizer that ends steps has stepped, maybe inside of the one that still does.
        self._ended = False
        #: Bytes in use when each opaque module that runs was called.
        self._entered: list[int] = []
        self._counts = counts
        #: Bytes in use when the forward began, if they are counted.
        self._in_use: int | None = None
        self._handles: list[RemovableHandle] = []
        self._install(ends, optimizers, opaque)

    def _install(self, ends: Sequence[str], optimizers: Sequence[Optimizer], opaque: Sequence[str]) -> None:
        model, keep = self._running.model, self._handles.append
        keep(model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True))
        for unit in self._running.parameters.sharded.units:
            for name in unit.modules:
                keep(model.get_submodule(name).register_forward_pre_hook(self._called))
        for place, name in enumerate(ends):
            keep(model.get_submodule(name).register_forward_hook(partial(self._returned, place)))
        for name in opaque:
            module = model.get_submodule(name)
            # When its unit is gathered, and before it is resharded.
            keep(module.register_forward_pre_hook(self._enter_opaque))
            keep(module.register_forward_hook(partial(self._leave_opaque, name), prepend=True))
        keep(model.register_forward_hook(self._end_forward))
        for optimizer in optimizers:
            keep(optimizer.register_step_pre_hook(self._before_step))
            keep(optimizer.register_step_post_hook(partial(self._after_step, optimizer is optimizers[0])))
        self._running.observe(self)

    def close(self) -> None:
        """Record no more."""
        self._running.observe(None)
        for handle in self._handles:
            handle.remove()

    # Collectives, as osdp.runtime.ranks.participants tells of them

    def begin(self) -> ClockMark:
        """The present moment."""
        return ClockMark(time.perf_counter(), self._clock())

    def end(self, unit: str, code: int, nbytes: int, begin: ClockMark) -> None:
        """Note a collective that began at ``begin`` and has ended."""
        if not self._marks and not in_backward():
            return  # of an evaluation
        now = self.begin()
        self._spans.append((begin, now))
        if self._running.is_reducing:
            # Behind buckets it takes as long as those: that is nothing of its own.
            self._copied = None
            return
        found = self._now.collectives.setdefault((unit, code), [])
        found.append((nbytes, now.wall - begin.wall))
        self._copied = (found, begin) if code == GATHER and not in_backward() else None

    @not_compiled
    def _called(self, _module: nn.Module, _args: Any) -> None:
        """What was gathered for a module has been copied out of its buffer, too."""
        if self._copied is not None:
            found, begin = self._copied
            now = self.begin()
            found[-1] = found[-1][0], now.wall - begin.wall
            self._spans[-1] = begin, now
            self._copied = None

    # Passes

    @not_compiled
    def _begin_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        self._runs_backward = False
        self._num_forwards += 1
        if self._now.forwards >= _MOST_FORWARDS:
            self._now = RecordedStep(in_cpu_time=self._in_cpu_time)
        samples = num_samples((args, kwargs))
        self._now.samples = max(self._now.samples, samples)
        self._now.shapes.add(shape_of_sample(batch_shape((args, kwargs)), samples))
        self._in_use = allocated_bytes() if self._counts else None
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._spans, self._begun, self._copied, self._entered = [], set(), None, []
        self._marks = [(-1, -1, self.begin())]

    @not_compiled
    def _returned(self, place: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if in_backward() or not self._marks:
            return
        self._marks.append((self._num_forwards, place, self.begin()))
        self._watch(output, place)

    def _watch(self, output: Any, place: int) -> None:
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:
                tensor.register_hook(partial(self._arrived, self._num_forwards, place))

    @not_compiled
    def _end_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward() or not self._marks:
            return
        last = len(self._names) - 1
        self._marks.append((self._num_forwards, last, self.begin()))
        self._now.forwards += 1
        self._now.forward_seconds += self._marks[-1][2].wall - self._marks[0][2].wall
        places = [place for _, place, _ in self._marks]
        parts = [self._names[before + 1 : place + 1] for before, place in pairwise(places)]
        self._add(self._now.forward, parts)
        if self._in_use is not None:
            kept = (allocated_bytes() or 0) - self._in_use
            if kept > self._now.kept:
                self._now.kept, self._now.returned = kept, _bytes_of(output)
        self._marks, self._entered = [], []
        self._watch(output, last)

    def _arrived(self, forward: int, place: int, _gradient: torch.Tensor) -> None:
        if not self._runs_backward:
            self._runs_backward = True
            self._begin_pass()
            queue_backward_callback(self._end_graph)
        if (forward, place) not in self._begun:
            self._begun.add((forward, place))
            self._marks.append((forward, place, self.begin()))

    def _end_graph(self) -> None:
        """All nodes of the backward have run; what is left are reductions."""
        self._marks.append((-1, -1, self.begin()))

    def end_reductions(self) -> None:
        """The backward has reduced its gradients; users' hooks are to come."""
        if not self._runs_backward:
            return
        self._runs_backward = False
        self._now.reductions += any(parameter.path.syncs for parameter in self._running.parameters)
        begin = self._marks[0][2]
        self._now.backward_seconds += self.begin().wall - begin.wall
        # What came before the first gradient is none of the model's.
        del self._marks[0]
        if len(self._marks) > 1:
            self._add(self._now.backward, self._begun_parts())
        self._marks, self._entered = [], []

    def _begun_parts(self) -> list[tuple[str, ...]]:
        """The stretches between each mark of a backward and the next one.

        Several forwards may share a backward, one after the other: the last mark of each begins all that is
        left of it.
        """
        runs = [[place for _, place, _ in run] for _, run in groupby(self._marks[:-1], lambda mark: mark[0])]
        forwards = {forward for forward, _, _ in self._marks[:-1]}
        if len(runs) != len(forwards) or any(a <= b for run in runs for a, b in pairwise(run)):
            return []  # they ran beside each other: nothing says what belongs to which
        return [self._names[b + 1 : a + 1] for run in runs for a, b in pairwise([*run, -1])]

    def _add(self, found: dict[tuple[str, ...], float], parts: Sequence[tuple[str, ...]]) -> None:
        """Add the compute between marks, each of the stretches ``parts``; all together if they are in none.

        A pass whose marks are not in the order of the trace says nothing of single stretches.
        """
        marks = [mark for _, _, mark in self._marks]
        if not parts or not all(parts):
            marks, parts = [marks[0], marks[-1]], [self._names]
        for part, (start, end) in zip(parts, pairwise(marks), strict=True):
            inside = [(a, b) for a, b in self._spans if start.wall <= a.wall < end.wall]
            waited = sum(b.compute - a.compute for a, b in inside)
            found[part] = found.get(part, 0.0) + max(end.compute - start.compute - waited, 0.0)

    # Memory

    @not_compiled
    def _enter_opaque(self, _module: nn.Module, _args: Any) -> None:
        if self._marks and torch.is_grad_enabled():  # also where it is recomputed
            self._entered.append(self._allocated())

    @not_compiled
    def _leave_opaque(self, name: str, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._entered and self._marks and torch.is_grad_enabled():
            left = self._allocated() - self._entered.pop()
            if left > 0:
                self._now.opaque[name] = max(left, self._now.opaque.get(name, 0))

    def _allocated(self) -> int:
        """Bytes in use; that takes a while, which is no compute."""
        begin = self.begin()
        found = allocated_bytes()
        if self._copied is None:  # else the last span is to be that of a gather
            self._spans.append((begin, self.begin()))
        return found or 0

    # Steps

    @not_compiled
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # One whose step has raised is in none any more.
        if self._stepping is None or not is_stepping(self._stepping[0]):
            self._stepping = optimizer, self.begin(), self._seconds_besides

    @not_compiled
    def _after_step(self, ends: bool, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._ended |= ends
        if self._stepping is not None:
            outermost, begin, besides = self._stepping
            if is_stepping(outermost):
                return
            self._stepping = None
            if outermost is optimizer:
                inside = self._seconds_besides - besides
                self._now.optimizer_seconds += self.begin().wall - begin.wall - inside
        if self._ended and self._now.forwards:
            self._now.scheduled = self.scheduled
            self.steps.append(self._now)
            self._now = RecordedStep(in_cpu_time=self._in_cpu_time)
        self._ended = False

    @property
    def _seconds_besides(self) -> float:
        """What is counted by itself where it runs in a step: passes of a closure, gathers of one inside."""
        return self._now.forward_seconds + self._now.backward_seconds + self._now.gather_seconds

    def gathered(self, begin: ClockMark) -> None:
        """What an optimizer has made of parameters has been gathered since ``begin``."""
        # Torch calls an optimizer's own hooks before those of all optimizers.
        step = self._now if self._now.forwards or not self.steps else self.steps[-1]
        step.gather_seconds += self.begin().wall - begin.wall


def _bytes_of(output: Any) -> int:
    """Bytes of the memory that the tensors of an output lie in."""
    memory = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_with_grad(output)}
    return sum(memory.values())
