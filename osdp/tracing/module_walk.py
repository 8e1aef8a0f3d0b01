"""Divides one forward and backward into intervals, in the same way on fake and on real tensors.

A boundary is the entry or the exit of a module's forward; an interval is what runs between two successive
boundaries. An interval belongs to the module whose own code is running; intervals outside the model's forward
(the loss) belong to the root, as one more call of it. Empty intervals are numbered, too, so the key
(module, call, part) of an interval depends on the module calls alone. For a root that calls ``a`` and ``b``::

    root      |==0==|     |==2==|     |==4==| loss, 5
    a, b            |==1==|     |==3==|
    backward    5 -> 4 -> 3 -> 2 -> 1 -> 0

In backward, autograd runs the ready node with the highest sequence number first, and every consumer of a node
has a higher number than the node: so nodes run strictly in descending order (except for those that accumulate
gradients, which run as soon as they can). An interval owns the numbers assigned while it ran; the node with
the highest of them therefore marks the exact moment at which its backward begins, and the backwards of
intervals run in reverse order.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from osdp.tracing.loss import LossFn, scalar_loss
from osdp.tracing.sample_batch import SampleBatch

Key = tuple[str, int, int]
#: Nodes that accumulate gradients have no place in the sequence: their numbers are at least this.
_NO_SEQUENCE = 2**63
#: In the names of nodes of reentrant checkpoints: torch's, and those of libraries that have copied it.
_CHECKPOINT = "CheckpointFunction"


@dataclass(frozen=True, slots=True)
class Interval:
    """Execution between two successive boundaries.

    Attributes:
        module: FQN of the module whose own code runs; empty for the root and for the loss.
        call: Index of the call of the module, from 0.
        part: Index of the interval within that call, from 0.
        stack: FQNs of the modules whose forward is running, outermost first.
        first_number: Autograd's next sequence number when the interval began.
        has_graph: Whether gradients were enabled then.
    """

    module: str
    call: int
    part: int
    stack: tuple[str, ...]
    first_number: int
    has_graph: bool

    @property
    def key(self) -> Key:
        """Key by which intervals and segments are joined: module, call and part."""
        return self.module, self.call, self.part


class Observer(Protocol):
    """Callbacks at the boundaries of intervals."""

    def enter_forward(self, index: int, interval: Interval, outputs: Any) -> None:
        """Interval ``index`` begins; the one before it passed on ``outputs``."""

    def leave_forward(self, loss: torch.Tensor) -> None:
        """Forward is over; the outputs have been freed except for ``loss``."""

    def start_backward(self) -> None:
        """Backward is about to be called; it begins with the last interval."""

    def enter_backward(self, index: int) -> None:
        """The backward of interval ``index`` begins."""


class ModuleWalk:
    """Context in which the intervals of ``model``'s forward are numbered."""

    def __init__(
        self, model: nn.Module, observer: Observer, inside: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        """Prepare to walk.

        Args:
            model: The model whose forward will run once.
            observer: Called at every boundary.
            inside: For modules whose forward has been replaced: the number of calls of each module that the
                original would have made, so that later calls keep their index.
        """
        self.intervals: list[Interval] = []
        self._model = model
        self._observer = observer
        self._inside = inside or {}
        self._handles: list[RemovableHandle] = []
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int]] = []
        self._parts: list[int] = []

    def __enter__(self) -> "ModuleWalk":
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks: it runs as a part of the module around it
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True),
                module.register_forward_hook(partial(self._leave, name)),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._push(name)
        self._begin((args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._parts.pop()
        self._calls.update(self._inside.get(name, {}))
        if not self._stack:  # the root has returned: what follows is the loss
            self._push("")
        self._begin(output)

    def _push(self, name: str) -> None:
        self._stack.append((name, self._calls[name]))
        self._parts.append(0)
        self._calls[name] += 1

    def _begin(self, outputs: Any) -> None:
        name, call = self._stack[-1]
        stack = tuple(frame for frame, _ in self._stack)
        number, has_graph = next_sequence_number(), torch.is_grad_enabled()
        interval = Interval(name, call, self._parts[-1], stack, number, has_graph)
        self._parts[-1] += 1
        self.intervals.append(interval)
        self._observer.enter_forward(len(self.intervals) - 1, interval, outputs)


def walk_modules(
    model: nn.Module,
    batch: SampleBatch,
    observer: Observer,
    *,
    loss_fn: LossFn | None = None,
    inside: Mapping[str, Mapping[str, int]] | None = None,
) -> list[Interval]:
    """Run forward, loss and backward of ``model`` once, calling ``observer`` at every boundary.

    Returns:
        All intervals of the forward, in order.
    """
    with ModuleWalk(model, observer, inside) as walker:
        # The outputs are not kept: in a training loop nothing but the loss outlives the forward either.
        loss = scalar_loss(batch.run(model), loss_fn)
    observer.leave_forward(loss)
    if loss.requires_grad:
        with backward_marks(loss, walker.intervals, observer.enter_backward):
            observer.start_backward()
            loss.backward()
    return walker.intervals


@contextmanager
def backward_marks(
    loss: torch.Tensor, intervals: Sequence[Interval], enter: Callable[[int], None]
) -> Iterator[None]:
    """Context in which ``enter`` is called with the index of each interval whose backward begins."""

    def mark(index: int, grad_outputs: Any) -> None:
        enter(index)

    # Nodes own the saved tensors: a reference to a node kept here would delay the release of their memory.
    handles = [
        node.register_prehook(partial(mark, index)) for index, node in _first_nodes(loss, intervals).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_nodes(loss: torch.Tensor, intervals: Sequence[Interval]) -> dict[int, Node]:
    """The node with the highest sequence number of each interval, by the index of the interval."""
    starts = [interval.first_number for interval in intervals]
    nodes = sorted(autograd_nodes(loss), key=sequence_number)
    numbers = [*map(sequence_number, nodes), _NO_SEQUENCE]
    first: dict[int, Node] = {}
    for node, number, following in zip(nodes, numbers, numbers[1:], strict=False):
        index = bisect_right(starts, number) - 1
        if number >= _NO_SEQUENCE or index < 0:
            continue
        if _CHECKPOINT in node.name():
            index = _last_checkpointed(index, following, intervals)
        first[index] = node
    return first


def _last_checkpointed(index: int, following: int, intervals: Sequence[Interval]) -> int:
    """The last interval inside of a reentrant checkpoint that was begun in interval ``index``.

    All of its backward, the recomputation included, is in one node, which was made before the modules in it
    ran without gradients. It is ``index`` itself if there are no modules in it.

    Args:
        index: The interval in which its node was made.
        following: The sequence number of the next node of the graph, which was made after it.
        intervals: All intervals.
    """
    caller = len(intervals[index].stack)
    found = index
    for place in range(index + 1, len(intervals)):
        interval = intervals[place]
        if interval.has_graph or interval.first_number > following or len(interval.stack) < caller:
            break
        if len(interval.stack) > caller:
            found = place
    return found


def autograd_nodes(loss: torch.Tensor) -> list[Node]:
    """All nodes of the autograd graph that ``loss.backward()`` would run."""
    root = loss.grad_fn
    if root is None:
        return []
    seen, queue = {root}, [root]
    for node in queue:
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return queue


def shared_gradients(loss: torch.Tensor) -> list[tuple[Node, int, int]]:
    """Sources of the gradients of those parameters whose gradient has several contributions.

    Returns:
        Triples of a node, the index of its result that goes to the parameter, and the parameter's number.
    """
    sources: dict[Node, list[tuple[Node, int]]] = {}
    for node in autograd_nodes(loss):
        for index, (child, _) in enumerate(node.next_functions):
            if child is not None and sequence_number(child) >= _NO_SEQUENCE:
                sources.setdefault(child, []).append((node, index))
    return [
        (node, index, number)
        for number, nodes in enumerate(sources.values())
        for node, index in nodes
        if len(nodes) > 1
    ]


def sequence_number(node: Node) -> int:
    """Autograd's sequence number of ``node``; higher numbers run earlier in backward."""
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """The sequence number that autograd will assign to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())
