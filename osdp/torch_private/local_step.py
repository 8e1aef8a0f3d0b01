"""Optimizer steps on the local tensors of DTensors.

An elementwise optimizer computes the same with local tensors as with DTensors, in a fraction of the time:
each of the ten or so operations of AdamW on a small parameter costs several times as much on a DTensor.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

#: A hook before or after a step, called with optimizer and arguments.
Hook = Callable[[Optimizer, Any, Any], Any]

#: States that are one number for each parameter, of any shape: torch keeps them as plain tensors.
_NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))


class _Member:
    """A parameter in a step, and what the optimizer is given in its place.

    Attributes:
        parameter: The parameter.
        given: Its local tensor, with its gradient and a version of its own; the parameter itself if plain.
        states: The states, as local tensors.
    """

    __slots__ = ("_before", "_kept", "given", "parameter", "states")

    def __init__(self, parameter: torch.Tensor, kept: dict[str, Any]) -> None:
        self.parameter, self._kept = parameter, kept
        self.given, self.states, self._before = parameter, kept, kept
        if isinstance(parameter, DTensor):
            # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
            self.given = parameter._local_tensor.data
            self.given.grad = parameter.grad._local_tensor  # type: ignore[union-attr]
            self.states = {key: getattr(value, "_local_tensor", value) for key, value in kept.items()}
            self._before = self.states.copy()

    def keep_states(
        self, states: dict[torch.Tensor, Any], wrap: Callable[[torch.Tensor, DTensor], torch.Tensor]
    ) -> None:
        """Put into ``states``, those of an optimizer, what a step has left in place of the former states."""
        for key, value in self.states.items():
            if value is not self._before.get(key):
                wraps = isinstance(value, torch.Tensor) and key not in _NUMBERS
                self._kept[key] = wrap(value, self.parameter) if wraps else value  # type: ignore[arg-type]
        if self._kept:
            states[self.parameter] = self._kept


def step_local_tensors(
    optimizer: Optimizer, wrap: Callable[[torch.Tensor, DTensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Make one step, without its hooks, on local tensors.

    Args:
        optimizer: One of torch's elementwise optimizers. It has its DTensors again afterwards, also if the
            step raises.
        wrap: Returns the local tensor of a new state as a DTensor with the layout of a parameter.

    Returns:
        The parameters that were stepped. If there are none, nothing was done: no DTensor has a gradient, or
        one has a gradient or a state with another layout.
    """
    states = optimizer.state
    groups = []
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not all(_is_laid_out(p, states.get(p, {})) for p in with_gradient):
                return []
            if any(isinstance(value, DTensor) for value in group.values()):
                return []  # a learning rate, for one
            groups.append(with_gradient)
        members = [_Member(p, states.get(p, {})) for group in groups for p in group]
    if not any(member.given is not member.parameter for member in members):
        return []
    given = {id(member.parameter): member.given for member in members}
    whole = parameter_lists(optimizer)
    try:
        optimizer.state = defaultdict(dict, {member.given: member.states for member in members})
        set_parameter_lists(optimizer, [[given[id(p)] for p in group] for group in groups])
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # without hooks
    finally:
        set_parameter_lists(optimizer, whole)
        optimizer.state = states
        for member in members:
            member.keep_states(states, wrap)
    increment_version([member.parameter for member in members if member.given is not member.parameter])
    return [member.parameter for member in members]


def parameter_lists(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """The lists of parameters of its groups."""
    return [group["params"] for group in optimizer.param_groups]


def set_parameter_lists(optimizer: Optimizer, lists: list[list[torch.Tensor]]) -> None:
    """Give each group another list of parameters."""
    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = parameters


class InnermostHooks:
    """A hook that is the last one before a step of an optimizer, and one that is the first after it.

    The last hook of others may remove itself or register more, which is an error if another one follows. The
    hook before the step therefore shares its entry, from :meth:`put` until it is called, and has none of its
    own at other times.

    Args:
        optimizer: The optimizer, to which no reference is kept.
        before: Called before the steps for which the hooks were put in place.
        after: Called after all steps.
    """

    def __init__(self, optimizer: Optimizer, before: Hook, after: Hook) -> None:
        self._before = before
        self._other: Hook | None = None
        # Dynamo cannot trace them. A compiled step is left to the optimizer (OptimizerCheck.before_step).
        self._call: Any = torch.compiler.disable(self._call_last)
        self._call.innermost = self
        self._after = optimizer.register_step_post_hook(torch.compiler.disable(after))
        # For a number that no other hook has.
        handle = optimizer.register_step_pre_hook(self._call)
        self._key = handle.id
        handle.remove()

    def put(self, optimizer: Optimizer) -> None:
        """Call them innermost in the step of ``optimizer`` that begins."""
        befores, afters = _hooks_of(optimizer)
        afters.move_to_end(self._after.id, last=False)
        _leave_entries(befores)  # after a step that failed in a hook, and for another model
        key = next(reversed(befores), self._key)
        self._other = befores.get(key)
        befores[key] = self._call

    def remove(self) -> None:
        """Call them no more."""
        self._after.remove()

    def _call_last(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        other = self._other
        _leave_entries(_hooks_of(optimizer)[0])
        found = None if other is None else other(optimizer, args, kwargs)
        if found is not None:
            if not isinstance(found, tuple) or len(found) != 2:
                return found  # torch says what is wrong
            args, kwargs = found
        own = self._before(optimizer, args, kwargs)
        return found if own is None else own


def _leave_entries(hooks: "OrderedDict[int, Any]") -> None:
    """Give the entries of hooks before a step back to those that had them."""
    for key, hook in list(hooks.items()):
        innermost = getattr(hook, "innermost", None)
        if isinstance(innermost, InnermostHooks):
            if innermost._other is None:
                del hooks[key]
            else:
                hooks[key], innermost._other = innermost._other, None


def _hooks_of(optimizer: Optimizer) -> "tuple[OrderedDict[int, Any], OrderedDict[int, Any]]":
    # Annotated as plain dictionaries.
    befores: Any = optimizer._optimizer_step_pre_hooks
    afters: Any = optimizer._optimizer_step_post_hooks
    return befores, afters


def _is_laid_out(parameter: torch.Tensor, states: Mapping[str, Any]) -> bool:
    """Whether gradient and states are laid out as ``parameter``, with plain local tensors; a plain one is.

    Nor is a gradient of another dtype, which ``grad_dtype`` of a parameter allows.
    """
    if not isinstance(parameter, DTensor):
        return True
    if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
        return False
    kept = (value for key, value in states.items() if key not in _NUMBERS)
    tensors = (value for value in kept if isinstance(value, torch.Tensor))
    return all(_is_alike(tensor, parameter) for tensor in (parameter.grad, *tensors))


def _is_alike(tensor: torch.Tensor | None, parameter: DTensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    spec, other = parameter._spec, tensor._spec
    own, local = parameter._local_tensor, tensor._local_tensor
    return (
        (spec is other or (spec.placements == other.placements and spec.mesh == other.mesh))
        and type(local) is type(own.data) is torch.Tensor
        and local.shape == own.shape
        and local.device == own.device
    )
