"""Stubs that replace the repeats of a block, so that a model runs with only a few of its blocks.

A stub returns what its exemplar returned: the same structure, new tensors of the same shapes, connected to
the autograd graph. A result with the shape and dtype of an input is a copy of it and passes its gradient on,
like a residual connection, so values stay in range; other results and gradients are zeros.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from osdp.profiler.repeats import Repeat
from osdp.tracing.tensors import flatten, tensors_by_path


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor among the results of an exemplar.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        differentiable: Whether a gradient may flow into it.
        source: Path of a similar tensor among the inputs; ``None`` if there is none.
        is_source: Whether it is that very tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    differentiable: bool
    source: str | None
    is_source: bool


@dataclass(frozen=True, slots=True)
class OutputTemplate:
    """Structure of the output of an exemplar.

    Attributes:
        leaves: Its pytree leaves; tensors as :class:`_Result`.
        build: Builds the same structure from other leaves.
    """

    leaves: tuple[Any, ...]
    build: Callable[[list[Any]], Any]

    @classmethod
    def of(cls, inputs: Any, output: Any) -> "OutputTemplate":
        """Make the template of one call."""
        paths = tensors_by_path(inputs)
        leaves, build = flatten(output)
        return cls(tuple(_result(leaf, paths) for leaf in leaves), build)

    def fill(self, inputs: Any) -> Any:
        """Make the same results for other ``inputs``."""
        paths = tensors_by_path(inputs)
        sources = list(paths)
        # One autograd function makes all new results of the call, so that gradients reach all its inputs.
        fresh = [leaf for leaf in self.leaves if isinstance(leaf, _Result) and not leaf.is_source]
        links = [sources.index(leaf.source) if leaf.source in paths else None for leaf in fresh]
        made: Iterator[torch.Tensor] = iter(())
        if fresh:
            made = iter(_CopyOrZeros.apply(fresh, links, *paths.values()))  # type: ignore[no-untyped-call]
        return self.build([self._leaf(leaf, paths, made) for leaf in self.leaves])

    @staticmethod
    def _leaf(leaf: Any, paths: dict[str, torch.Tensor], made: Iterator[torch.Tensor]) -> Any:
        if not isinstance(leaf, _Result):
            return leaf
        return paths[leaf.source] if leaf.is_source and leaf.source else next(made)


class _CopyOrZeros(torch.autograd.Function):
    """Makes new results: a copy of the input at each index in ``links``, zeros for each ``None``."""

    @staticmethod
    def forward(
        ctx: Any, results: Sequence[_Result], links: Sequence[int | None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = tuple(
            torch.zeros(result.shape, dtype=result.dtype, device=result.device)
            if link is None
            else inputs[link].clone()
            for result, link in zip(results, links, strict=True)
        )
        ctx.links = links
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        fixed = [t for t, result in zip(made, results, strict=True) if not result.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = []
        for index, (shape, dtype, device) in enumerate(ctx.like):
            if not ctx.needs_input_grad[index + 2]:
                found.append(None)
            elif index in ctx.links:
                found.append(gradients[ctx.links.index(index)])
            else:
                found.append(torch.zeros(shape, dtype=dtype, device=device))
        return (None, None, *found)


class Stubs:
    """The stubs of a model, which is a copy that may be changed.

    Args:
        model: The model.
        repeats: The blocks that are replaced, with their exemplars.
    """

    def __init__(self, model: nn.Module, repeats: Sequence[Repeat]) -> None:
        self._exemplars = {repeat.exemplar: model.get_submodule(repeat.exemplar) for repeat in repeats}
        self._templates: dict[str, OutputTemplate] = {}
        for repeat in repeats:
            model.get_submodule(repeat.block).forward = partial(self._fill, repeat.exemplar)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While the model runs once: from then on stubs return what their exemplars return here."""
        handles = [
            module.register_forward_hook(partial(self._watch, name), with_kwargs=True)
            for name, module in self._exemplars.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._templates[name] = OutputTemplate.of((args, kwargs), output)

    def _fill(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._templates[name].fill((args, kwargs))


def _result(leaf: Any, inputs: dict[str, torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    same = next((path for path, tensor in inputs.items() if tensor is leaf), None)
    # In a reentrant checkpoint nothing requires a gradient but in the recomputation, of which no hook tells.
    differentiable = leaf.requires_grad or (
        not torch.is_grad_enabled() and (leaf.is_floating_point() or leaf.is_complex())
    )
    like = (
        path
        for needs_gradient in (differentiable, leaf.requires_grad)
        for path, tensor in inputs.items()
        if (tensor.shape, tensor.dtype, tensor.requires_grad) == (leaf.shape, leaf.dtype, needs_gradient)
    )
    return _Result(
        leaf.shape, leaf.dtype, leaf.device, differentiable, same or next(like, None), same is not None
    )
