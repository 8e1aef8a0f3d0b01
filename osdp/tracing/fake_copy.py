"""Copies of a model without its weights."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from osdp.nn.modules import keeps_dtype
from osdp.tracing.tensors import map_tensors

MakeParameter = Callable[[nn.Parameter], torch.Tensor]


def copy_without_weights(model: nn.Module, make: MakeParameter) -> nn.Module:
    """Copy ``model`` with its parameters replaced by what ``make`` returns; ``model`` is not changed.

    Tied parameters stay tied. Buffers and other tensors are copied to the CPU, or become zeros if they are on
    ``meta``. A root in evaluation mode is put in training mode, since the copy is for a training step;
    otherwise every submodule keeps its mode.

    Args:
        model: Any module, on any device.
        make: Returns a tensor of the parameter's shape, strides and dtype.

    Raises:
        ValueError: A parameter has no shape yet (lazy modules).
    """
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet; run one batch through the model first")
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _host_copy(buffer)
    for module in model.modules():
        for value in _attributes(module):
            # deepcopy cannot copy tensors and generators in a FakeTensorMode, nor non-leaf tensors at all.
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _host_copy(value)
            elif isinstance(value, torch.Generator):
                # On fake tensors the numbers it draws do not matter, but its device must be theirs.
                memo[id(value)] = torch.Generator() if make is on_fake_cpu else value.clone_state()
    twin = copy.deepcopy(model, memo)
    return twin if twin.training else twin.train()


def on_meta(parameter: nn.Parameter) -> torch.Tensor:
    """A tensor like ``parameter`` without memory."""
    return torch.empty_like(parameter, device="meta", requires_grad=False)


def on_fake_cpu(parameter: nn.Parameter) -> torch.Tensor:
    """A tensor like ``parameter`` on the CPU; without memory inside a ``FakeTensorMode``."""
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")


def random_weights(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, left_out: Sequence[str] = ()
) -> None:
    """Give ``model``, a copy on ``meta``, random weights and its buffers on ``device``.

    Args:
        model: The copy.
        device: Where.
        dtype: Dtype of its floating-point weights; their own if ``None``.
        left_out: FQNs of modules that are left on ``meta``.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name == block or name.startswith(f"{block}.") for block in left_out):
            continue
        # A module may have one tensor by two names.
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = _random(key, parameter, device, None if keeps_dtype(module) else dtype)
            setattr(module, key, made[parameter])
        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer not in moved:
                moved[buffer] = buffer.to(device)
            setattr(module, key, moved[buffer])


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` cast its floating-point inputs to ``dtype``, as the runtime does."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _random(
    key: str, parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    """Finite weights that keep activations in range: norm weights are one, biases zero, as are integers."""
    chosen = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    data = torch.empty_like(parameter, device=device, dtype=chosen, requires_grad=False)
    if not (chosen.is_floating_point or chosen.is_complex):
        data.zero_()  # such as indices, for which zero is valid
    elif parameter.dim() > 1:
        # Floats of one byte have no random numbers of their own.
        drawn = data if chosen.itemsize > 1 else torch.empty_like(data, dtype=torch.float32)
        data.copy_(drawn.normal_(0.0, 0.02))
    else:
        data.fill_(0.0 if "bias" in key else 1.0)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _attributes(module: nn.Module) -> Iterator[object]:
    """The attributes of ``module``, and what containers among them hold, however deep."""
    left, seen = list(vars(module).values()), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return tensor.detach().to("cpu", copy=True)
