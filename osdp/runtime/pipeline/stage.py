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
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from osdp.model.dataflow import ArgumentSlot, Transfer
from osdp.runtime.pipeline.output_shapes import ShapeTwin
from osdp.runtime.pipeline.placeholders import Placeholder, placeholder_like
from osdp.runtime.stages import StageOutput
from osdp.torch_private.autograd import in_backward
from osdp.torch_private.modules import HOOK_REGISTRIES

#: What containers and their copies do not share: registries, and what stages put in place of it.
_OF_COPIES = frozenset(vars(nn.Module())) | {"forward"}
_MISSING = object()

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
        copied: Sequence[tuple[nn.Module, nn.Module]] = (),
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
        #: Containers of the model with this stage's copies of them, and what the former's attributes were
        #: last; the latter's before a forward; ids of the former's hooks.
        self._copied = tuple((own, container, dict(vars(own))) for own, container in copied)
        self._before: list[dict[str, Any]] = []
        #: The other stages of this rank.
        self.beside: tuple[StageModule, ...] = ()
        self._users: set[int] = {
            key for own, _ in copied for registry in HOOK_REGISTRIES for key in getattr(own, registry)
        }
        self._forward = model.forward
        model.forward = self._run

    def forward(
        self, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> StageOutput:
        """Run the stage; see :class:`osdp.runtime.stages.Stage`."""
        # Before the call, which looks for hooks first. What a user has set all take before one counts on.
        for stage in (*self.beside, self):
            stage._take_over()
        try:
            sent, result = self.model(*args, stage_inputs=tuple(received), **kwargs)
        finally:
            self._hand_back()
        return StageOutput(sent, result)

    def _run(
        self, *args: Any, stage_inputs: tuple[torch.Tensor, ...] = (), **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self._calls.clear()
        # Modules may write into what they are given, which torch allows for no leaf.
        self._received = tuple(
            _Received.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
            for tensor in stage_inputs
        )
        self._taken = {}
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

    def _take_over(self) -> None:
        """Let the copied containers have the attributes and hooks that the model's own have by now."""
        for own, container, seen in self._copied:
            _copy_changes(own, container, seen)
            seen.update(vars(own))
            for registry in HOOK_REGISTRIES:
                hooks, users = getattr(container, registry), getattr(own, registry)
                for key in [key for key in hooks if key in self._users and key not in users]:
                    del hooks[key]
                self._users |= users.keys()
                hooks.update({key: hook for key, hook in users.items() if key not in hooks})
        self._before = [dict(vars(container)) for _, container, _ in self._copied]

    def _hand_back(self) -> None:
        """The model's own containers get what a forward has set on the copies."""
        for (own, container, _), before in zip(self._copied, self._before, strict=True):
            changed = _copy_changes(container, own, before)
            for stage in self.beside:
                stage.leave_out(own, changed)
        self._before = []

    def leave_out(self, own: nn.Module, changed: Mapping[str, Any]) -> None:
        """Take over nothing of what the forward of another stage has set: this one's sets it by itself."""
        for known, _, seen in self._copied:
            if known is own:
                seen.update(changed)

    def enter(
        self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of a module of this stage: replace placeholder arguments by received tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        changed = False
        if in_backward():
            # The plan's recomputation has the arguments already, a user's has what the container passed.
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Placeholder) and leaf.received is not None:
                    leaves[at], changed = leaf.received, True
        else:
            call = self._call(name)
            for at, leaf in enumerate(leaves):
                number = self._needed.get(ArgumentSlot(name, call, at))
                if number is not None and isinstance(leaf, Placeholder):
                    leaves[at] = leaf.received = self._received[number]
                    changed = True
                    _check_is_recorded(name, leaves[at])
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
        return twin.outputs(args, kwargs, training=self.model.get_submodule(name).training)

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
    copied: list[tuple[nn.Module, nn.Module]] = []
    tree = _copy_containers(model, "", movable, frozenset(kept), frozenset(loose), make, copied)
    stage = StageModule(index, tree, transfers, copied, is_last=is_last)
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
    copied: list[tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """A copy of a container with registries of its own; descendants in ``kept`` are shared, not copied."""
    if name in kept:
        return module
    if name in movable:
        return _emptied(module, make)
    twin = _shallow(module)
    copied.append((module, twin))
    for key, parameter in module._parameters.items():
        path = f"{name}.{key}".lstrip(".")
        if parameter is not None and path not in loose:
            _remove(twin, key, make(parameter))
    for key, child in module._modules.items():
        if child is not None:
            path = f"{name}.{key}".lstrip(".")
            twin._modules[key] = _copy_containers(child, path, movable, kept, loose, make, copied)
    return twin


def _copy_changes(source: nn.Module, target: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Give ``target`` the plain attributes of ``source`` that are others than ``before``; returns them."""
    changed = {
        key: value
        for key, value in vars(source).items()
        if key not in _OF_COPIES and before.get(key, _MISSING) is not value
    }
    target.__dict__.update(changed)
    return changed


class _Received(torch.autograd.Function):
    """A received tensor that is no leaf, and no view of one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        del ctx
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient


def _check_is_recorded(name: str, received: torch.Tensor) -> None:
    """Refuse a reentrant checkpoint, whose backward begins at arguments that require no gradient."""
    if not received.requires_grad or torch.is_grad_enabled():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{name!r} is in a reentrant checkpoint, which passes on no gradient of what another stage "
                "has computed: call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        frame = frame.f_back


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
