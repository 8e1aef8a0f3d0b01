"""Gradients by weights that torch.autograd.grad is asked for, before or without ``loss.backward()``.

Modules compute with other parameters than the optimizer sees: the stored ones, which are registered between
forward and backward wherever a plan reshards, are in no graph. Losses that are balanced by their gradients at
a weight (GradNorm, VQGAN's adaptive weight) would then work under some plans only. So every output of a
forward passes through a node that leads to the stored parameters as well::

    loss ── … ── output ──┬── the model's graph ── compute parameters
                          └── token ── stored parameters

An ordinary backward finds nothing at the token. If torch.autograd.grad asks for a stored parameter, the
gradient by its compute parameter is found in the model's graph and given out instead: whole, and of this
rank's batch alone, as under DistributedDataParallel.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from osdp.nn.sliced_weight import collect_gradient, runs_in_slices
from osdp.runtime.module.outputs import replace_tensors
from osdp.torch_private.autograd import GradientRequest, apply_function, asked_of, is_by_functorch, next_nodes


class Weight(Protocol):
    """A parameter of a planned model."""

    @property
    def name(self) -> str:
        """The first of its FQNs."""

    @property
    def stored(self) -> nn.Parameter:
        """The parameter that the optimizer sees."""

    @property
    def compute(self) -> nn.Parameter | None:
        """The parameter that forward and backward use; ``None`` before the first forward."""


class WeightGradients:
    """Leads from the outputs of a model to its stored parameters.

    Args:
        weights: The parameters that gradients may be asked for by.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        self._weights = tuple(weights)
        self._linked: tuple[Weight, ...] = ()
        # Nobody has it to ask for, so a backward that runs it was asked for nothing.
        self._unasked = torch.zeros((), requires_grad=True)
        self._token = self._unasked
        self._nodes: tuple[Node, ...] = ()
        self._found: dict[int, torch.Tensor] = {}
        self._given: set[int] = set()

    def prepare(self) -> None:
        """Make the token for the forward that begins.

        Autograd runs nodes in the reverse order of their creation. So the token runs after the model's graph,
        when the hooks of stored parameters are held back: it would call them with nothing.
        """
        # What a backward that raised has left.
        self._found.clear()
        self._given.clear()
        linked = tuple(weight for weight in self._weights if weight.stored.requires_grad)
        if linked != self._linked and torch.is_grad_enabled() and not is_by_functorch():
            self._linked = linked
            stored = (weight.stored for weight in linked)
            self._token = apply_function(_Token, weakref.ref(self), self._unasked, *stored)
            self._nodes = next_nodes(self._token)

    def link(self, output: Any) -> Any:
        """``output`` with tensors that lead to the stored parameters as well."""
        if not self._linked or is_by_functorch():
            return output
        return replace_tensors(
            output, lambda tensor: apply_function(_Output, tensor, self._token, weakref.ref(self))
        )

    def is_giving(self, weight: Weight) -> bool:
        """Whether the gradient that arrives at ``weight.stored`` is one that was asked for; true once."""
        given = id(weight) in self._given
        self._given.discard(id(weight))
        return given

    def find(self, output: GradientEdge, gradient: torch.Tensor) -> bool:
        """Find the gradients that this backward was asked for, as far as they come through ``output``.

        Returns:
            Whether it was asked for any; never in an ordinary backward.

        Raises:
            RuntimeError: It is to accumulate gradients in some parameters only, or to give one by a weight
                that is tensor parallel.
        """
        if asked_of(self._nodes[0]) is not GradientRequest.NOTHING:
            return False
        asked = []
        for weight, node in zip(self._linked, self._nodes[1:], strict=True):
            match asked_of(node):
                case GradientRequest.TO_ACCUMULATE:
                    raise RuntimeError(
                        f"backward(inputs=...) asks for the gradient of {weight.name!r} alone, which would "
                        "not be reduced over ranks: call backward() without inputs=, and freeze the others"
                    )
                case GradientRequest.TO_GIVE if weight.compute is not None:
                    if weight.compute.shape != weight.stored.shape and not runs_in_slices(weight.stored):
                        raise RuntimeError(
                            f"torch.autograd.grad asks for the gradient by {weight.name!r}, of which this "
                            "rank computes with a tensor-parallel part alone: ask by a weight that is whole"
                        )
                    asked.append(weight)
        if asked:
            self._find(output, gradient, asked)
        return bool(asked)

    def _find(self, output: GradientEdge, gradient: torch.Tensor, asked: Sequence[Weight]) -> None:
        computes = [weight.compute for weight in asked if weight.compute is not None]
        with _whole(asked) as collected:
            found = torch.autograd.grad(
                [output],
                computes,
                [gradient],
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        for weight, its in zip(asked, found, strict=True):
            if its is not None:
                its = collected.get(id(weight), its)
                earlier = self._found.get(id(weight))
                self._found[id(weight)] = its if earlier is None else earlier + its

    def take(self) -> list[torch.Tensor | None]:
        """The gradients by all linked weights that were found; ``None`` for the others."""
        found, self._found = self._found, {}
        self._given = set(found)
        return [found.get(id(weight)) for weight in self._linked]


@contextmanager
def _whole(weights: Sequence[Weight]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the whole gradients by those ``weights`` that run in slices, which reduce them on the way."""
    collected = {}
    for weight in weights:
        if weight.compute is not None and runs_in_slices(weight.stored):
            collected[id(weight)] = weight.compute.new_zeros(weight.stored.shape)
            collect_gradient(weight.compute, collected[id(weight)])
    try:
        yield collected
    finally:
        for weight in weights:
            if id(weight) in collected and weight.compute is not None:
                collect_gradient(weight.compute, None)


class _Output(torch.autograd.Function):
    """An output of the model, in the same memory; leads to the token as well."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, token: torch.Tensor, owner: "weakref.ref[WeightGradients]"
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        owner = ctx.owner()
        if gradient is None or owner is None:
            return gradient, None, None
        (node, index), _ = ctx.next_functions
        asked = owner.find(GradientEdge(node, index), gradient)
        return gradient, torch.zeros(()) if asked else None, None


class _Token(torch.autograd.Function):
    """Stands for all stored parameters."""

    @staticmethod
    def forward(
        ctx: Any, owner: "weakref.ref[WeightGradients]", unasked: torch.Tensor, *stored: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.nothing = owner, (None,) * (2 + len(stored))
        return unasked.detach().clone()

    @staticmethod
    def backward(ctx: Any, asked: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        owner = ctx.owner()
        return ctx.nothing if asked is None or owner is None else (None, None, *owner.take())
