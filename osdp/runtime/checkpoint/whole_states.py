"""Loading of rank 0's plain state dict into a model that all ranks hold, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.objects import broadcast_object, gather_objects, has_process_group, is_first
from osdp.runtime.mesh import device_type
from osdp.runtime.module.plain_states import laid_out_like, name_faults
from osdp.runtime.ranks.shared_faults import raise_together


class MissingAndUnexpected(NamedTuple):
    """Missing and unexpected names of a state dict, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Shape and dtype of a tensor, known to all ranks before it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send_whole(
    model: nn.Module, state_dict: Mapping[str, Any], owners: Mapping[str, str], strict: bool
) -> MissingAndUnexpected:
    """Load rank 0's ``state_dict`` into ``model``; see :func:`osdp.runtime.checkpoint.load_whole_state_dict`.

    Args:
        model: The model.
        state_dict: Rank 0's state dict; those of other ranks are ignored.
        owners: Local names of parameters that another stage owns, mapped to their names there.
        strict: Whether missing and unexpected names are an error.
    """
    outline = _outline(state_dict)
    own: dict[str, Any] = model.state_dict()  # its hooks also register the stored parameters
    result = _check_names_and_shapes(outline, own, type(model).__name__, strict)
    owner_of = {name: owner for owned in gather_objects(dict(owners)) for name, owner in owned.items()}
    copies: dict[str, list[str]] = {}
    for name in own:
        copies.setdefault(owner_of.get(name, name), []).append(name)
    kind = device_type(model) if has_process_group() else "cpu"
    device = (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )
    for name, entry in outline.items():
        if name in result.unexpected_keys:
            continue
        value = _received(state_dict.get(name), entry, device) if isinstance(entry, _Entry) else entry
        # Copies of a tied parameter are one parameter: the name that comes last wins.
        for mine in copies.get(owner_of.get(name, name), ()):
            _put(model, mine, value)
    return result


def _outline(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Names, shapes and dtypes of rank 0's tensors, and its other entries themselves."""
    fault: Exception | None = None
    outline: dict[str, Any] = {}
    if is_first():
        parts = [name for name, value in state_dict.items() if isinstance(value, DTensor)]
        if parts:
            fault = TypeError(
                f"{', '.join(parts[:5])} are DTensors, of which other ranks have parts: load them on all "
                "ranks by model.load_state_dict"
            )
        outline = {
            name: _Entry(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in state_dict.items()
        }
    raise_together(fault)
    return broadcast_object(outline)


def _check_names_and_shapes(
    outline: Mapping[str, Any], own: Mapping[str, Any], model: str, strict: bool
) -> MissingAndUnexpected:
    """Missing and unexpected names; raises the error of ``nn.Module.load_state_dict`` on all ranks."""
    stray = [name for name in outline if name not in own]
    missing = [name for name in own if name not in outline]
    shapes = [
        f"size mismatch for {name}: copying a param with shape {torch.Size(entry.shape)} from checkpoint, "
        f"the shape in current model is {own[name].shape}."
        for name, entry in outline.items()
        if isinstance(entry, _Entry) and name in own and tuple(own[name].shape) != entry.shape
    ]
    everyone = gather_objects((missing, stray, shapes))
    # A name unknown to one stage may belong to another: unexpected are those unknown to all.
    nowhere = set.intersection(*(set(names) for _, names, _ in everyone))
    result = MissingAndUnexpected(
        list(dict.fromkeys(name for names, _, _ in everyone for name in names)),
        [name for name in stray if name in nowhere],
    )
    errors = list(dict.fromkeys(mismatch for *_, mismatches in everyone for mismatch in mismatches))
    if strict:
        errors += name_faults(*result)
    if errors:
        lines = "".join(f"\n\t{error}" for error in errors)
        raise RuntimeError(f"Error(s) in loading state_dict for {model}, of which nothing was loaded:{lines}")
    return result


def _received(value: torch.Tensor | None, entry: _Entry, device: torch.device) -> torch.Tensor:
    if not has_process_group():
        assert value is not None  # a single process has all tensors
        return value
    if is_first() and value is not None:
        whole = value.detach().to(device).contiguous()
    else:
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if whole.numel():
        # As bytes: gloo does not know all dtypes, complex and 8-bit ones for example.
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    return whole


def _put(model: nn.Module, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = module._parameters.get(leaf)
    if parameter is not None and isinstance(value, torch.Tensor):
        value = laid_out_like(parameter, value)
    # Through the module that registers it, whose hooks and extra state apply: a wrapper's load_state_dict
    # would check all names.
    nn.Module.load_state_dict(module, {leaf: value}, strict=False)
