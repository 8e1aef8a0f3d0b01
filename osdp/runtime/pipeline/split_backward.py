"""Backward in two parts, for zero-bubble schedules: gradients of the inputs first, of the weights later.

The first part records the gradients that reach the operations where weights join the path from an input to an
output; the second starts there, once for each set of weights that share such operations, so that nothing on
that path is computed twice::

    input ──▶ join ──▶ ... ──▶ output      part 1: output → input, recording the gradient at each join
               ▲
    weight ────┘                           part 2: join → weight

torch's own zero-bubble schedules do the same
(``torch.distributed.pipelining._backward``), but lose outputs that depend on no input, such as a bias that a
later stage adds to its attention, and count a weight twice that joins in several places.

Gradients of weights are accumulated into ``grad`` directly, so only a parameter's own hooks run: for stages
that reduce nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

Roots = list[tuple[torch.Tensor, torch.Tensor | None]]
_Gradients = tuple[torch.Tensor | None, ...]


@dataclass(eq=False)
class _Group:
    """Weights that join the path from inputs to outputs at shared operations.

    Attributes:
        weights: The weights.
        joins: The operations.
    """

    weights: list[nn.Parameter]
    joins: set[Node]


@dataclass
class WeightPass:
    """The second part of a backward.

    Attributes:
        roots: Outputs that depend on no input, with their gradients.
        groups: Weights, and the operations where they join the path.
        recorded: The gradients that reached these operations in the first part.
    """

    roots: Roots
    groups: list[_Group] = field(default_factory=list)
    recorded: dict[Node, _Gradients] = field(default_factory=dict)

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        if self.roots:
            tensors, gradients = zip(*self.roots, strict=True)
            # The graphs of these outputs may contain joins too, so they must survive for the groups.
            torch.autograd.backward(tensors, gradients, retain_graph=bool(self.groups))
        # Memory that is others' already: of gradients that were recorded, and of those given to weights.
        held = {_memory(g) for found in self.recorded.values() for g in found if g is not None}
        for group in self.groups:
            self._accumulate(group, held)
        self.groups, self.recorded, self.roots = [], {}, []

    def _accumulate(self, group: _Group, held: set[int]) -> None:
        edges = [
            (GradientEdge(node, index), gradient)
            for node in group.joins
            for index, gradient in enumerate(self.recorded.get(node, ()))
            if gradient is not None
        ]
        if not edges:
            return
        # Where the graph of one join contains another, the other's recorded gradient is already complete:
        # the pre-hook restores it, so that the path between them does not count twice.
        joins = dict.fromkeys(edge.node for edge, _ in edges)
        handles = [node.register_prehook(partial(_clamped, self.recorded[node])) for node in joins]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in edges],
                group.weights,
                [gradient for _, gradient in edges],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        with torch.no_grad():
            for weight, gradient in zip(group.weights, found, strict=True):
                if gradient is None:
                    continue
                # An addition hands the same gradient to all its terms; others are added to each in place.
                shared = _memory(gradient) in held or not gradient.is_contiguous()
                if weight.grad is not None:
                    weight.grad.add_(gradient)
                else:
                    weight.grad = (
                        gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
                    )
                    held.add(_memory(weight.grad))
                for hook in (weight._post_accumulate_grad_hooks or {}).values():
                    hook(weight)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _clamped(recorded: _Gradients, _: _Gradients) -> _Gradients:
    return recorded


def backward_inputs(
    roots: Roots, inputs: Sequence[torch.Tensor], weights: Sequence[nn.Parameter]
) -> tuple[list[torch.Tensor | None], WeightPass]:
    """Gradients of ``inputs``, which require them, and the pass that remains for those of ``weights``."""
    # 1. The path: all operations between an input and an output.
    users = _users(_node_of(tensor) for tensor, _ in roots)
    path = _reachable([_node_of(tensor) for tensor in inputs], users)
    through = [root for root in roots if _node_of(root[0]) in path]
    rest = [root for root in roots if _node_of(root[0]) not in path]
    if not through:
        return [None for _ in inputs], WeightPass(rest)
    # 2. The operations where weights join it.
    groups = _groups([weight for weight in weights if weight.requires_grad], users, path)
    left = WeightPass(rest, groups)
    # 3. Gradients of the inputs, recording those that reach the joins.
    handles = [
        node.register_prehook(partial(_record, left.recorded, node))
        for group in groups
        for node in group.joins
    ]
    tensors, gradients = zip(*through, strict=True)
    try:
        found = torch.autograd.grad(
            tensors, list(inputs), list(gradients), retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(found), left


def _record(recorded: dict[Node, _Gradients], node: Node, gradients: _Gradients) -> None:
    recorded[node] = gradients


def _node_of(tensor: torch.Tensor) -> Node:
    """The operation that made ``tensor``, or the one that accumulates its gradient if it is a leaf."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    # A leaf has no grad_fn; a view of it leads to the node that accumulates its gradient.
    view: Any = tensor.view_as(tensor).grad_fn
    node: Node = view.next_functions[0][0]
    return node


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """The users of the result of each operation in the graph of ``roots``."""
    found: dict[Node, list[Node]] = defaultdict(list)
    todo = list(dict.fromkeys(roots))
    seen = set(todo)
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions:
            if source is not None:
                found[source].append(node)
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
    return found


def _reachable(starts: Iterable[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """``starts`` and all operations that depend on them."""
    found = set(starts)
    todo = list(found)
    while todo:
        for user in users.get(todo.pop(), ()):
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _groups(weights: Sequence[nn.Parameter], users: dict[Node, list[Node]], path: set[Node]) -> list[_Group]:
    groups: list[_Group] = []
    for weight in weights:
        group = _Group([weight], _joins(_node_of(weight), users, path))
        if not group.joins:
            continue
        # One more weight may connect groups that had nothing in common before.
        for other in [other for other in groups if other.joins & group.joins]:
            group = _Group([*other.weights, *group.weights], other.joins | group.joins)
            groups.remove(other)
        groups.append(group)
    return groups


def _joins(start: Node, users: dict[Node, list[Node]], path: set[Node]) -> set[Node]:
    """Operations on ``path`` that use ``start``, directly or through operations outside the path."""
    found: set[Node] = set()
    seen, todo = {start}, [start]
    while todo:
        for user in users.get(todo.pop(), ()):
            if user in path:
                found.add(user)
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return found
