"""Pipeline stages: the original model with the modules of other stages removed.

The code around the modules (a transformer's own forward) runs in every stage, so each computes masks and
positions itself. A removed module takes no time and returns placeholder tensors
(:mod:`osdp.runtime.pipeline.placeholders`); its arguments are the values that this stage sends to others. A
module of this stage gets received tensors in place of placeholder arguments::

    stage 0    embed  block 0  [block 1]  [head]     [ ]: removed, returns placeholders
                              ↓ sent: the argument of block 1
    stage 1   [embed][block 0]  block 1    head      block 1 gets the received tensor

Containers are copied, so that a rank can have several stages; the modules of a stage are the model's own.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from osdp.model.dataflow import ArgumentSlot, Transfer
from osdp.runtime.pipeline.output_shapes import ShapeTwin
from osdp.runtime.pipeline.placeholders import Placeholder, placeholder_like
from osdp.runtime.stages import StageOutput
from osdp.torch_private.autograd import in_backward

#: Returns the placeholder for a parameter of another stage.
MakePlaceholder = Callable[[torch.Tensor], torch.Tensor]


class StageModule:
    """One stage of a model.

    Attributes:
        index: Index of the stage.
        model: The model, with other stages' modules removed; called only by :meth:`forward`.
        incoming: Transfers to this stage.
        outgoing: Transfers from this stage.
        is_last: Whether it returns the model's output.
    """

    def __init__(
        self,
        index: int,
        model: nn.Module,
        transfers: Sequence[Transfer],
        *,
        is_last: bool,
    ) -> None:
        self.index = index
        self.model = model
        self.is_last = is_last
        self.incoming = tuple(t for t in transfers if t.target == index)
        self.outgoing = tuple(t for t in transfers if t.source == index)
        #: Arguments of this stage's modules that are received: index of the incoming transfer, by slot.
        self._needed = {slot: index for index, t in enumerate(self.incoming) for slot in t.places}
        #: Arguments of removed modules that are sent.
        self._wanted = {t.taken for t in self.outgoing}
        #: Calls of each module, received tensors, and arguments to send, in the forward that runs.
        self._calls: Counter[str] = Counter()
        self._received: Sequence[torch.Tensor] = ()
        self._taken: dict[ArgumentSlot, torch.Tensor] = {}
        self._forward = model.forward
        model.forward = self._run

    def forward(
        self, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> StageOutput:
        """Run the stage; see :class:`osdp.runtime.stages.Stage`."""
        sent, result = self.model(*args, stage_inputs=tuple(received), **kwargs)
        return StageOutput(sent, result)

    def _run(
        self, *args: Any, stage_inputs: tuple[torch.Tensor, ...] = (), **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self._calls.clear()
        self._received, self._taken = stage_inputs, {}
        try:
            result = self._forward(*args, **kwargs)
            missing = [t.taken.module for t in self.outgoing if t.taken not in self._taken]
            if missing:
                raise RuntimeError(
                    f"stage {self.index} must send the arguments of {', '.join(sorted(set(missing)))}, which "
                    "the model did not call as with the sample batch: plan again with a batch like this one"
                )
            sent = tuple(self._taken[t.taken] for t in self.outgoing)
            return sent, tree_map(_none_if_placeholder, result) if self.is_last else None
        finally:
            self._received, self._taken = (), {}

    def enter(
        self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of a module of this stage: replace placeholder arguments by received tensors."""
        if in_backward():
            return None  # recomputation has the arguments already
        call = self._call(name)
        leaves, spec = tree_flatten((args, kwargs))
        changed = False
        for at, leaf in enumerate(leaves):
            number = self._needed.get(ArgumentSlot(name, call, at))
            if number is not None and isinstance(leaf, Placeholder):
                leaves[at], changed = self._received[number], True
        if not changed:
            return None
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def skip(self, name: str, twin: ShapeTwin, *args: Any, **kwargs: Any) -> Any:
        """The forward of a removed module: take its arguments for sending, return placeholders."""
        call = self._call(name)
        leaves, _ = tree_flatten((args, kwargs))
        for at, leaf in enumerate(leaves):
            place = ArgumentSlot(name, call, at)
            if place in self._wanted and not isinstance(leaf, Placeholder):
                self._taken[place] = leaf
        return twin.outputs(args, kwargs)

    def _call(self, name: str) -> int:
        call = self._calls[name]
        self._calls[name] += 1
        return call

    def watch(self, modules: Collection[str]) -> None:
        """Register :meth:`enter` on those of the stage's ``modules`` that receive tensors; after sharding."""
        targets = {place.module for place in self._needed}
        for name in modules:
            if name in targets:
                hook = torch.compiler.disable(partial(self.enter, name))
                self.model.get_submodule(name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def build_stage(
    model: nn.Module,
    index: int,
    kept: Collection[str],
    loose: Collection[str],
    twins: dict[str, ShapeTwin],
    transfers: Sequence[Transfer],
    *,
    is_last: bool,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> StageModule:
    """Stage ``index`` of ``model``, with copies of its containers; ``model`` stays unchanged.

    Args:
        model: The model.
        index: Index of the stage.
        kept: FQNs of the movable modules that belong to it.
        loose: FQNs of the parameters that belong to it but to none of the movable modules.
        twins: What computes the output shapes of each movable module, by FQN; not used for those in ``kept``.
        transfers: All transfers of the pipeline.
        is_last: Whether it is the last stage.
        device: The device it will run on; the model may be on ``meta``.
        dtype: Compute dtype of parameters; their own if ``None``.
    """
    movable = {*kept, *twins}
    make = partial(placeholder_like, device=device, dtype=dtype)
    tree = _copy_containers(model, "", movable, frozenset(kept), frozenset(loose), make)
    stage = StageModule(index, tree, transfers, is_last=is_last)
    for name, twin in twins.items():
        if name not in kept:
            tree.get_submodule(name).forward = partial(stage.skip, name, twin)
    return stage


def merge(model: nn.Module, homes: Mapping[str, StageModule], movable: Collection[str]) -> None:
    """Make ``model`` register exactly what the stages of this rank register at present.

    Args:
        model: The model that the stages were built from; changed in place.
        homes: The stage of each module of this rank's stages, by FQN.
        movable: FQNs of the modules of all stages.
    """
    trees = list({id(stage): stage.model for stage in homes.values()}.values())
    _merge(model, trees, "", homes, movable)


def _merge(
    module: nn.Module,
    trees: Sequence[nn.Module],
    name: str,
    homes: Mapping[str, StageModule],
    movable: Collection[str],
) -> None:
    for registry in ("_parameters", "_buffers"):
        own = getattr(module, registry)
        for key in own:
            held = (getattr(tree, registry)[key] for tree in trees)
            own[key] = next((value for value in held if value is not None), None)
    for key, child in module._modules.items():
        path = f"{name}.{key}".lstrip(".")
        if child is None:
            continue
        if path in homes:
            module._modules[key] = homes[path].model.get_submodule(path)
        elif path in movable:
            module._modules[key] = _emptied(child, placeholder_like)
        else:
            _merge(child, [tree.get_submodule(key) for tree in trees], path, homes, movable)


def _copy_containers(
    module: nn.Module,
    name: str,
    movable: Collection[str],
    kept: Collection[str],
    loose: Collection[str],
    make: MakePlaceholder,
) -> nn.Module:
    """A copy of a container with registries of its own; descendants in ``kept`` are shared, not copied."""
    if name in kept:
        return module
    if name in movable:
        return _emptied(module, make)
    twin = _shallow(module)
    for key, parameter in module._parameters.items():
        path = f"{name}.{key}".lstrip(".")
        if parameter is not None and path not in loose:
            _remove(twin, key, make(parameter))
    for key, child in module._modules.items():
        if child is not None:
            path = f"{name}.{key}".lstrip(".")
            twin._modules[key] = _copy_containers(child, path, movable, kept, loose, make)
    return twin


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for registry, value in vars(module).items():
        if registry.startswith("_") and isinstance(value, (dict, set)):
            twin.__dict__[registry] = copy.copy(value)
    return twin


def _emptied(module: nn.Module, make: MakePlaceholder) -> nn.Module:
    """A copy of ``module`` that registers no parameters and saves no buffers."""
    twin = _shallow(module)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            _remove(twin, key, make(parameter))
    for key in twin._buffers:
        if key not in twin._non_persistent_buffers_set:
            twin._buffers[key] = None
    for key, child in twin._modules.items():
        if child is not None:
            twin._modules[key] = _emptied(child, make)
    return twin


def _none_if_placeholder(leaf: Any) -> Any:
    return None if isinstance(leaf, Placeholder) else leaf


def _remove(module: nn.Module, key: str, placeholder: torch.Tensor) -> None:
    """Unregister parameter ``key``; a placeholder stays as attribute for code that asks for its dtype."""
    module._parameters[key] = None
    module.__dict__[key] = placeholder
