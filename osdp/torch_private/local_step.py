"""Optimizer steps on the local tensors of DTensors, and by torch's fused kernels on CPUs.

An elementwise optimizer computes the same with local tensors as with DTensors, in a fraction of the time:
each of the ten or so operations of AdamW on a small parameter costs several times as much on a DTensor. Its
fused kernel makes them in one pass over memory, for which torch waits to be asked: a step of AdamW over the
68 tensors of a small ResNet takes 3.7 ms by torch's default on CPUs, 3.2 by ``foreach``, 0.9 fused.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

#: A hook before or after a step, called with optimizer and arguments.
Hook = Callable[[Optimizer, Any, Any], Any]

#: States that are one number for each parameter, of any shape: torch keeps them as plain tensors.
NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))

#: Those of which torch has a fused kernel for CPUs; AdamW is an Adam.
_FUSED_ON_CPU = (SGD, Adam, Adagrad)
#: Options that a kernel takes as booleans only, and as numbers.
_FLAGS = ("amsgrad", "maximize", "nesterov")
_FACTORS = ("lr", "lr_decay", "eps", "weight_decay", "momentum", "dampening")
#: Of these dtypes a fused kernel rounds as the loop does. In narrower ones it keeps what that rounds away.
_FUSED_DTYPES = (torch.float32, torch.float64)

#: The gradient of a tensor of any class, without the subclass being asked.
_grad_of: Any = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


class _Member(NamedTuple):
    """A parameter in a step, and what the optimizer is given in its place.

    Attributes:
        parameter: The parameter.
        given: Its local tensor, with its gradient and a version of its own; the parameter itself if plain.
        states: Its states in the optimizer.
        given_states: The states as local tensors; ``states`` itself if plain.
    """

    parameter: torch.Tensor
    given: torch.Tensor
    states: dict[str, Any]
    given_states: dict[str, Any]

    @property
    def is_local(self) -> bool:
        """Whether a local tensor is given in place of a DTensor."""
        return self.given is not self.parameter

    def keep_states(
        self, all_states: dict[torch.Tensor, Any], wrap: Callable[[torch.Tensor, DTensor], torch.Tensor]
    ) -> None:
        """Put into ``all_states``, those of an optimizer, what a step has left."""
        if self.is_local:
            for key, value in self.given_states.items():
                if value is not _local(self.states.get(key)):
                    wraps = isinstance(value, torch.Tensor) and key not in NUMBERS
                    self.states[key] = wrap(value, self.parameter) if wraps else value  # type: ignore[arg-type]
        if self.states:
            all_states[self.parameter] = self.states


def _local(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return getattr(value, "_local_tensor", value)


def _member(parameter: torch.Tensor, grad: torch.Tensor, states: dict[str, Any]) -> _Member | None:
    """``parameter`` in a step; ``None`` if its gradient or a state has another layout.

    Nor may a gradient have another dtype, which ``grad_dtype`` of a parameter allows.
    """
    if not isinstance(parameter, DTensor):
        return _Member(parameter, parameter, states, states)
    # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
    given = parameter._local_tensor.data
    own_grad = _local_like(grad, parameter, given)
    if own_grad is None or own_grad.dtype != given.dtype:
        return None
    given_states = {}
    for key, value in states.items():
        if key in NUMBERS or not isinstance(value, torch.Tensor):
            given_states[key] = _local(value)
            continue
        local = _local_like(value, parameter, given)
        if local is None:
            return None
        given_states[key] = local
    given.grad = own_grad
    return _Member(parameter, given, states, given_states)


def _local_like(tensor: torch.Tensor, parameter: DTensor, own: torch.Tensor) -> torch.Tensor | None:
    """The local tensor of ``tensor``, if that is laid out as ``parameter`` with the local tensor ``own``."""
    if not isinstance(tensor, DTensor):
        return None
    spec, other, local = parameter._spec, tensor._spec, tensor._local_tensor
    is_alike = (
        (spec is other or (spec.placements == other.placements and spec.mesh == other.mesh))
        and type(local) is type(own) is torch.Tensor
        and local.shape == own.shape
        and local.device == own.device
    )
    return local if is_alike else None


def step_local_tensors(optimizer: Optimizer, wrap: Callable[[torch.Tensor, DTensor], torch.Tensor]) -> bool:
    """Make one step, without its hooks, on local tensors, and by a fused kernel where that is left open.

    Args:
        optimizer: One of torch's elementwise optimizers. It has its DTensors and options again afterwards,
            also if the step raises.
        wrap: Returns the local tensor of a new state as a DTensor with the layout of a parameter.

    Returns:
        Whether the step was made. Otherwise nothing was done: a gradient or a state has another layout than
        its parameter, or the step would be the optimizer's own.
    """
    members = _members(optimizer)
    if members is None:
        return False
    everyone = [member for own in members for member in own]
    fused = [
        group
        for group, own in zip(optimizer.param_groups, members, strict=True)
        if own and _group_leaves_fused_open(optimizer, group) and _fits_kernel(group, own)
    ]
    if not fused and not any(member.is_local for member in everyone):
        return False
    states, whole = optimizer.state, parameter_lists(optimizer)
    try:
        optimizer.state = defaultdict(dict, {member.given: member.given_states for member in everyone})
        set_parameter_lists(optimizer, [[member.given for member in own] for own in members])
        for group in fused:
            group["fused"] = True
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # without hooks
    finally:
        for group in fused:
            group["fused"] = None
        set_parameter_lists(optimizer, whole)
        optimizer.state = states
        for member in everyone:
            member.keep_states(states, wrap)
        # Local tensors have versions of their own, and a fused kernel counts none. A step that raises may
        # have changed some, too: what was gathered before it is out of date.
        increment_version([member.parameter for member in everyone])
    return True


def _members(optimizer: Optimizer) -> list[list[_Member]] | None:
    """The parameters of each group that have gradients; ``None`` if the optimizer has to step by itself."""
    states = optimizer.state
    members: list[list[_Member]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            if group.get("differentiable") or any(isinstance(value, DTensor) for value in group.values()):
                return None  # a learning rate, for one
            pairs = [(p, grad) for p in group["params"] if (grad := _grad_of(p)) is not None]
            found = [_member(p, grad, states.get(p, {})) for p, grad in pairs]
            known = [member for member in found if member is not None]
            if len(known) < len(found):
                return None
            members.append(known)
    return members


def leaves_fused_open(optimizer: Optimizer) -> bool:
    """Whether the step may be made by a fused kernel for CPUs: torch has one, and the user left it open."""
    return any(
        _group_leaves_fused_open(optimizer, group) and any(p.device.type == "cpu" for p in group["params"])
        for group in optimizer.param_groups
    )


def _group_leaves_fused_open(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    # The loop computes with tensors, and numbers of NumPy, in their own dtype; a kernel does not.
    factors = (*(group.get(name, 0.0) for name in _FACTORS), *group.get("betas", ()))
    return (
        isinstance(optimizer, _FUSED_ON_CPU)
        and group.get("fused", False) is None
        and group.get("foreach", False) is None
        and not group.get("capturable")
        and all(isinstance(group.get(name, False), bool) for name in _FLAGS)
        and all(isinstance(factor, (float, int)) for factor in factors)
    )


def _fits_kernel(group: Mapping[str, Any], members: Sequence[_Member]) -> bool:
    """Whether a fused kernel for CPUs can step ``members``: it takes memory as it lies, without strides."""
    begins = {member.given_states.get("momentum_buffer") is None for member in members}
    if "momentum" in group and len(begins) > 1:
        return False  # the kernel makes the first step of all of them, or of none
    # Loops: this runs for all parameters in every step, and generators would take half of its time.
    for member in members:
        given, states = member.given, member.given_states
        grad, dtype, device = given.grad, given.dtype, given.device
        assert grad is not None
        if type(given) not in (torch.Tensor, nn.Parameter):
            return False  # a subclass need not know the kernel; torch gives it to none by itself, either
        if dtype not in _FUSED_DTYPES or device.type != "cpu" or grad.layout != torch.strided:
            return False
        others = [grad]
        for key, value in states.items():
            if not isinstance(value, torch.Tensor):
                if key == "step" and value is not None:
                    return False
            elif value.device != device:
                return False  # a kernel reads numbers made under another default device as its own
            elif key not in NUMBERS:
                others.append(value)
            elif key == "step" and value.dtype != torch.float32:
                return False
        contiguous = given.is_contiguous()
        for other in others:
            if type(other) is not torch.Tensor or other.dtype != dtype or other.device != device:
                return False
            if not (contiguous and other.is_contiguous()) and not _lies_alike(other, given):
                return False
    return True


def _lies_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors that are not both contiguous have their elements in the same places of memory."""
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return tensor.stride() == other.stride() and bool(dense(tensor)) and bool(dense(other))


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
