"""Output structure, shapes and dtypes of modules that were removed from a stage.

A copy of the module without memory (its twin) runs on fake tensors, once for each combination of input
shapes; equal modules share a twin.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from osdp.nn.fake_tensors import FakeTensors
from osdp.runtime.pipeline.placeholders import placeholder_like


@dataclass(frozen=True, slots=True)
class _Template:
    """The outputs for one combination of inputs.

    Attributes:
        leaves: Leaves of the output: a meta tensor for each tensor, :class:`_Handed` for an input that is
            returned unchanged, and other values themselves.
        spec: Their structure.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec


@dataclass(frozen=True, slots=True)
class _Handed:
    """An output that is one of the inputs.

    Attributes:
        leaf: Index of the input leaf.
    """

    leaf: int


class ShapeTwin:
    """A copy without memory that stands in for equal modules; created by :func:`twins_of`."""

    def __init__(self, module: nn.Module, mode: FakeTensors, dtype: torch.dtype | None) -> None:
        self._mode = mode
        self._templates: dict[object, _Template] = {}
        with mode:
            # On the device of the inputs (:meth:`_run`), as parameters are: a model's own may be ``meta``.
            memo: dict[int, Any] = {
                id(buffer): buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
                for buffer in module.buffers()
            }
            for parameter in module.parameters():
                computed = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=computed)
                memo[id(parameter)] = nn.Parameter(like, requires_grad=False)
            self._module = copy.deepcopy(module, memo)

    def outputs(self, args: Any, kwargs: Any, *, training: bool = True) -> Any:
        """The module's output for inputs of these shapes in a mode, with placeholders for tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        key = (training, spec, tuple(_kind(leaf) for leaf in leaves))
        if key not in self._templates:
            self._module.train(training)
            self._templates[key] = self._run(leaves, spec)
        template = self._templates[key]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        filled = [
            leaves[leaf.leaf]
            if isinstance(leaf, _Handed)
            else placeholder_like(leaf, device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in template.leaves
        ]
        return tree_unflatten(filled, template.spec)

    def _run(self, leaves: list[Any], spec: TreeSpec) -> _Template:
        with torch.no_grad(), torch.random.fork_rng([]):
            with self._mode:
                fakes = [
                    torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                    if isinstance(leaf, torch.Tensor)
                    else leaf
                    for leaf in leaves
                ]
                args, kwargs = tree_unflatten(fakes, spec)
                output = self._module(*args, **kwargs)
            places = {id(leaf): place for place, leaf in enumerate(fakes) if isinstance(leaf, torch.Tensor)}
            found, structure = tree_flatten(output)
            return _Template(tuple(_template(leaf, places) for leaf in found), structure)


def _template(leaf: Any, places: dict[int, int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) in places:
        return _Handed(places[id(leaf)])
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _kind(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, (str, int, float, bool, type(None))) else type(leaf)


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Plain attributes of a module and its submodules, such as an attention window, without layer indices."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (key, value)
        for inner in module.modules()
        for key, value in vars(inner).items()
        if isinstance(value, plain) and key not in ("layer_idx", "training")
    )


def twins_of(
    model: nn.Module, modules: tuple[str, ...], dtype: torch.dtype | None = None
) -> dict[str, ShapeTwin]:
    """A twin for each of ``modules``, shared by modules of one container with equal ``repr`` and settings.

    Args:
        model: The model.
        modules: FQNs.
        dtype: Compute dtype of parameters; their own if ``None``.
    """
    mode = FakeTensors()
    made: dict[object, ShapeTwin] = {}
    found = {}
    for name in modules:
        module = model.get_submodule(name)
        specs = tuple((key, tuple(p.shape), p.dtype) for key, p in module.named_parameters())
        kind = (name.rpartition(".")[0], type(module), repr(module), specs, _settings(module))
        if kind not in made:
            made[kind] = ShapeTwin(module, mode, dtype)
        found[name] = made[kind]
    return found
