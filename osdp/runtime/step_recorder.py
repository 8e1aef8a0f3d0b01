"""Records what steps of a running model take: compute by stretch of the trace, collectives, the optimizer.

Hooks read two clocks where modules return, and where gradients of what they returned arrive::

    forward    begin | ... h.0 returns | ... h.1 returns | ... end
    backward   end | ... gradient of h.0 | ... gradient of h.1 | ... begin      (from right to left)

What lies between two marks is the compute of a stretch, less the collectives in it. On CPUs with one thread
compute is counted in CPU time, which stands still while a rank waits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from osdp.runtime.microbatch import num_samples
from osdp.runtime.module.outputs import tensors_with_grad
from osdp.runtime.ranks.participants import GATHER
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.torch_private.autograd import in_backward, queue_backward_callback


class ClockMark(NamedTuple):
    """A moment: seconds of the wall clock, and of the clock of compute."""

    wall: float
    compute: float


@dataclass
class RecordedStep:
    """What one step took on this rank, seconds.

    Attributes:
        samples: Samples of a microbatch.
        microbatches: Forwards.
        forward: Compute by the module that ends a stretch; under ``""`` what follows the last one.
        backward: The same in backward.
        collectives: Of each unit, by its first operator, bytes and seconds of gathers and of reductions.
        forward_seconds: All forwards.
        backward_seconds: All backwards.
        optimizer_seconds: Steps of the optimizers.
    """

    samples: int = 0
    microbatches: int = 0
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    collectives: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it: a step without what the loop does besides."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


class StepRecorder:
    """Records the steps of a model from its next forward on, until :meth:`close`.

    Args:
        running: The model.
        ends: FQNs of the modules that end stretches.
        optimizers: What steps on it, the first of which ends a step.

    Attributes:
        steps: What was recorded.
    """

    def __init__(self, running: ShardedModel, ends: Sequence[str], optimizers: Sequence[Optimizer]) -> None:
        self.steps: list[RecordedStep] = []
        self._running = running
        self._now = RecordedStep()
        self._clock: Callable[[], float] = (
            time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        )
        #: Marks of the pass under way: the stretch that each ends in forward, and begins in backward.
        self._marks: list[tuple[str | None, ClockMark]] = []
        self._begun: set[str] = set()
        #: Begin and end of each collective in the pass; the last one may be a gather that is copied out yet.
        self._spans: list[tuple[ClockMark, ClockMark]] = []
        self._copied: tuple[list[tuple[int, float]], ClockMark] | None = None
        self._runs_backward = False
        #: When the step began, and the seconds of passes by then.
        self._stepping: tuple[ClockMark, float] | None = None
        self._handles: list[RemovableHandle] = []
        self._install(ends, optimizers)

    def _install(self, ends: Sequence[str], optimizers: Sequence[Optimizer]) -> None:
        model, keep = self._running.model, self._handles.append
        keep(model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True))
        for unit in self._running.parameters.sharded.units:
            for name in unit.modules:
                keep(model.get_submodule(name).register_forward_pre_hook(self._called))
        for name in ends:
            keep(model.get_submodule(name).register_forward_hook(partial(self._returned, name)))
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
        now = self.begin()
        self._spans.append((begin, now))
        found = self._now.collectives.setdefault((unit, code), [])
        found.append((nbytes, now.wall - begin.wall))
        self._copied = (found, begin) if code == GATHER and not in_backward() else None

    def _called(self, _module: nn.Module, _args: Any) -> None:
        """What was gathered for a module has been copied out of its buffer, too."""
        if self._copied is not None:
            found, begin = self._copied
            now = self.begin()
            found[-1] = found[-1][0], now.wall - begin.wall
            self._spans[-1] = begin, now
            self._copied = None

    # Passes

    def _begin_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        self._runs_backward = False
        self._now.samples = max(self._now.samples, num_samples((args, kwargs)))
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._spans, self._begun, self._copied = [], set(), None
        self._marks = [(None, self.begin())]

    def _returned(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward() or not self._marks:
            return
        self._marks.append((name, self.begin()))
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:
                tensor.register_hook(partial(self._arrived, name))

    def _end_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward() or not self._marks:
            return
        self._marks.append(("", self.begin()))
        self._now.microbatches += 1
        self._now.forward_seconds += self._marks[-1][1].wall - self._marks[0][1].wall
        ends = [(name or "", mark) for name, mark in self._marks[1:]]
        self._add(self._now.forward, ends, self._marks[0][1])
        self._marks = []
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:
                tensor.register_hook(partial(self._arrived, ""))

    def _arrived(self, name: str, _gradient: torch.Tensor) -> None:
        if not self._runs_backward:
            self._runs_backward = True
            self._begin_pass()
            queue_backward_callback(self._end_graph)
        if name not in self._begun:
            self._begun.add(name)
            self._marks.append((name, self.begin()))

    def _end_graph(self) -> None:
        """All nodes of the backward have run; what is left are reductions."""
        self._marks.append((None, self.begin()))

    def end_backward(self) -> None:
        """The backward has handed out its gradients."""
        if not self._runs_backward:
            return
        self._runs_backward = False
        self._now.backward_seconds += self.begin().wall - self._marks[0][1].wall
        begins = [name for name, _ in self._marks[1:-1]]
        ends = [mark for _, mark in self._marks[2:]]
        pairs = [(name or "", mark) for name, mark in zip(begins, ends, strict=True)]
        if len(self._marks) > 1:
            self._add(self._now.backward, pairs, self._marks[1][1])
        self._marks = []

    def _add(self, found: dict[str, float], ends: Sequence[tuple[str, ClockMark]], start: ClockMark) -> None:
        """Add the compute of stretches that end one after the other, the first from ``start`` on."""
        for name, mark in ends:
            inside = [(a, b) for a, b in self._spans if start.wall <= a.wall < mark.wall]
            waited = sum(b.compute - a.compute for a, b in inside)
            found[name] = found.get(name, 0.0) + max(mark.compute - start.compute - waited, 0.0)
            start = mark

    # Steps

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping = self.begin(), self._now.forward_seconds + self._now.backward_seconds

    def _after_step(self, ends: bool, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._stepping is None:
            return
        begin, passes = self._stepping
        # A closure runs forward and backward inside the step.
        inside = self._now.forward_seconds + self._now.backward_seconds - passes
        self._now.optimizer_seconds += self.begin().wall - begin.wall - inside
        if ends and self._now.microbatches:
            self.steps.append(self._now)
            self._now = RecordedStep()
