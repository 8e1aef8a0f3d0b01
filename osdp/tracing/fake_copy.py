"""Copies of a model without its weights."""

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from osdp.nn.modules import keeps_dtype
from osdp.torch_private.dispatch_modes import no_dispatch_modes
from osdp.tracing.tensors import map_tensors

MakeParameter = Callable[[nn.Parameter], torch.Tensor]


def copy_without_weights(
    model: nn.Module, make: MakeParameter, device: torch.device | None = None
) -> nn.Module:
    """Copy ``model`` with its parameters replaced by what ``make`` returns; ``model`` is not changed.

    Tied parameters stay tied. Buffers and other tensors are copied to the CPU, or become zeros if they are on
    ``meta``. A root in evaluation mode is put in training mode, since the copy is for a training step;
    otherwise every submodule keeps its mode.

    Args:
        model: Any module, on any device.
        make: Returns a tensor of the parameter's shape, strides and dtype.
        device: Where the copy will run: tensors there that are no buffers stay there.

    Raises:
        ValueError: A parameter has no shape yet (lazy modules), or what a module holds cannot be copied.
    """
    memo: dict[int, Any] = {}
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
                stays = device is not None and value.device.type == device.type
                memo[id(value)] = value.detach().to(device, copy=True) if stays else _host_copy(value)
            elif isinstance(value, torch.Generator):
                # On fake tensors the numbers it draws do not matter, but its device must be theirs.
                memo[id(value)] = torch.Generator() if make is on_fake_cpu else value.clone_state()
    twin = _copied(model, memo)
    _copy_functions(model, twin, memo)
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


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of ``model``; ``memo`` has copies of its tensors, and gets those of all else."""
    known = dict(memo)
    try:
        with no_dispatch_modes():  # what objects and hidden modules hold stays real tensors
            return copy.deepcopy(model, memo)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{_not_copied(model, known)} cannot be copied ({error}), and models are described on "
            "copies: give its class a __deepcopy__ that returns itself, or set it after wrapping"
        ) from error


def _not_copied(model: nn.Module, known: Mapping[int, Any]) -> str:
    """Name of the first attribute of a module that cannot be copied."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                if name != "_modules":
                    with no_dispatch_modes():
                        copy.deepcopy(value, dict(known))
            except Exception:
                return f"{fqn}.{name}".lstrip(".")
    return "the model"


def _copy_functions(model: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    """Let functions that the modules of ``twin`` hold, as attributes or as hooks, refer to copies as well.

    deepcopy leaves functions as they are: they would run modules of the model itself.

    Args:
        model: The model.
        twin: The copy.
        memo: What was copied, by the id of the original; gets the functions.
    """
    originals = set(model.modules())
    for module in twin.modules():
        if module in originals:  # its class says that it is not to be copied
            continue
        own = vars(module)
        for held in (own, own.get("_forward_pre_hooks", {}), own.get("_forward_hooks", {})):
            for name, value in list(held.items()):
                if isinstance(value, (types.FunctionType, types.MethodType, partial)):
                    held[name] = _rebound(value, memo)


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """``value`` with copies in place of the parts of the model that it is, or refers to as a function."""
    if not _refers_to_model(value, memo, set()):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebound(value.__func__, memo), _rebound(value.__self__, memo))
    if isinstance(value, partial):
        args = [_rebound(each, memo) for each in value.args]
        named = {name: _rebound(each, memo) for name, each in value.keywords.items()}
        bound = partial(_rebound(value.func, memo), *args, **named)
        vars(bound).update(vars(value))
        return bound
    if id(value) not in memo:
        _copy_function(value, memo)
    return memo[id(value)]


def _copy_function(function: types.FunctionType, memo: dict[int, Any]) -> None:
    """Put a copy of ``function`` that refers to copies into ``memo``."""
    cells = function.__closure__ or ()
    # Those that hold no part of the model stay shared: what hooks count or collect is read elsewhere.
    new = tuple(types.CellType() if _refers_to_model(_content(cell), memo, set()) else cell for cell in cells)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, new)
    memo[id(function)] = made  # before the rest, which may refer to it
    for cell, copied in zip(cells, new, strict=True):
        if copied is not cell:
            copied.cell_contents = _rebound(_content(cell), memo)
    given, named = function.__defaults__, function.__kwdefaults__
    made.__defaults__ = None if given is None else tuple(_rebound(each, memo) for each in given)
    if named is not None:
        made.__kwdefaults__ = {name: _rebound(each, memo) for name, each in named.items()}
    made.__dict__.update(vars(function))


def _refers_to_model(value: Any, memo: Mapping[int, Any], seen: set[int]) -> bool:
    """Whether ``value`` is a copied module or tensor, or a function that refers to one, however deep.

    Lists and objects that functions refer to stay as they are.
    """
    if isinstance(value, (nn.Module, torch.Tensor)):
        return id(value) in memo
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: list[Any] = []
    if isinstance(value, types.MethodType):
        held = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        held = [_content(cell) for cell in value.__closure__ or ()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return any(_refers_to_model(each, memo, seen) for each in held)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has not been assigned yet
        return None


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return tensor.detach().to("cpu", copy=True)
