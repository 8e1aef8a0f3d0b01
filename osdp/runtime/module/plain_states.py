"""Loading of plain state dicts (whole tensors on each rank) into a model that runs under a plan.

``nn.Module.load_state_dict`` copies an entry into its parameter, which torch refuses where one of them is a
DTensor and the other is not, or has other placements. So each module first converts the entries to the
placements of its parameters: selecting this rank's part of a plain tensor costs no communication.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.objects import gather_objects
from osdp.comm.shards import part_of
from osdp.plan.plan import Tie
from osdp.torch_private.dtensor import blocks_of_shard, data_pointer, sharded_dim, wrap_like


def accept_plain_states(model: nn.Module) -> None:
    """Make ``load_state_dict`` of ``model`` and its modules accept plain tensors and other placements."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks, and has no parameters
        module.register_load_state_dict_pre_hook(_lay_out)


def _lay_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # The mapping is torch's own copy, for this module and those below.
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) and _is_cut_by_torch(parameter, value):
            raise RuntimeError(
                f"{prefix + name} consists of {blocks_of_shard(value.placements[-1])} blocks, of which "
                "tensor-parallel ranks hold a part each; torch's set_model_state_dict, or its dcp.load, has "
                "cut it as one. Load whole tensors by model.load_state_dict or "
                "osdp.runtime.checkpoint.load_whole_state_dict, and checkpoints by "
                "osdp.runtime.checkpoint.load"
            )
        if parameter is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            state_dict[prefix + name] = laid_out_like(parameter, value)


def _is_cut_by_torch(parameter: Any, value: DTensor) -> bool:
    """Whether torch's own functions have written into the memory of ``parameter``, which is in blocks.

    They take each rank's part for one contiguous piece.
    """
    if value is parameter or not isinstance(parameter, DTensor):
        return value is parameter and blocks_of_shard(value.placements[-1]) > 1
    in_place = value.to_local().numel() > 0 and data_pointer(value) == data_pointer(parameter)
    return in_place and blocks_of_shard(value.placements[-1]) > 1


def laid_out_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` with the placements of ``parameter``, ready to be copied into it.

    Args:
        parameter: A plain tensor or a DTensor.
        value: A tensor of the same shape: plain and the same on every rank, or a DTensor. If a DTensor has
            other placements it is gathered, so all ranks of its mesh must make the call.

    Raises:
        RuntimeError: ``value`` holds the part of another rank, which saved it.
    """
    if isinstance(value, DTensor):
        _refuse_another_ranks(value)  # before any operation, whose result is on the mesh of this rank
    value = value.detach()
    if isinstance(value, DTensor):
        if isinstance(parameter, DTensor) and _layout(parameter) == _layout(value):
            return value
        value = value.full_tensor()
    if not isinstance(parameter, DTensor):
        return value
    local = parameter.to_local().detach()
    part = part_for(parameter, value)
    if part.shape != local.shape:
        raise RuntimeError(
            f"of a tensor of shape {tuple(value.shape)} this rank would hold {tuple(part.shape)}, and it "
            f"holds {tuple(local.shape)}; its placements {parameter.placements} are not known here"
        )
    return wrap_like(part.to(local).contiguous(), parameter)


def _refuse_another_ranks(value: DTensor) -> None:
    """Raise if ``value`` was made on another rank, whose part of the whole it holds."""
    mesh, there = value.device_mesh, value.device_mesh.get_coordinate()
    here = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
    if there is None or list(there) == here or all(sharded_dim(p) is None for p in value.placements):
        return
    raise RuntimeError(
        f"a tensor of shape {tuple(value.shape)} holds the part of the rank at {list(there)} of its mesh, "
        f"and this rank is at {here}: one rank saved it and others load it, whose parts are lost. Save by "
        "osdp.checkpoint.save or torch.distributed.checkpoint on all ranks, or on rank 0 what "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict gives with full_state_dict=True"
    )


def part_for(parameter: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole`` under the placements of ``parameter``."""
    mesh = parameter.device_mesh
    last = mesh.ndim - 1
    # The last axis (tensor parallelism) was sharded first, the others then sharded its result.
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        dim = sharded_dim(placement)
        if dim is not None:
            # On other axes a strided shard only records that the last axis was sharded first.
            blocks = blocks_of_shard(placement) if axis == last else 1
            whole = part_of(whole, dim, mesh.get_local_rank(axis), mesh.size(axis), blocks)
    return whole


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def load_into(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """``model.load_state_dict(state_dict, strict)``, with advice where names have a wrapper's prefix."""
    try:
        return model.load_state_dict(state_dict, strict)
    except RuntimeError as error:
        advice = _advice(model.state_dict(), state_dict)
        if not advice:
            raise
        raise RuntimeError(f"{error}\n{advice}") from error


def load_into_stages(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool,
    ties: Sequence[Tie],
    group: dist.ProcessGroup,
) -> Any:
    """Load a whole model's state dict into this rank's stages; all ranks of the pipeline call it.

    Args:
        model: The modules of this rank's stages.
        state_dict: The state dict of the whole model.
        strict: Whether names that are missing, or that no stage has, are an error.
        ties: Tied parameters, of which several stages hold a copy.
        group: The ranks of this pipeline.

    Returns:
        The result of ``nn.Module.load_state_dict``, for the whole model.

    Raises:
        RuntimeError: Names or shapes differ; the same error on all ranks.
    """
    given = dict(state_dict)
    for tie in ties:
        # As in a model with one tied parameter, the name that is loaded last wins.
        there = [state_dict[name] for name in tie.names if name in state_dict]
        if len({getattr(value, "shape", None) for value in there}) == 1:
            given |= dict.fromkeys(tie.names, there[-1])
    own = model.state_dict()
    faults = ""
    try:
        model.load_state_dict({name: value for name, value in given.items() if name in own}, strict=False)
    except RuntimeError as error:
        faults = str(error)
    missing = [name for name in own if name not in state_dict]
    stray = [name for name in state_dict if name not in own]
    everyone = gather_objects((missing, stray, faults), group)
    result = _combined([entry[:2] for entry in everyone])
    said = list(dict.fromkeys(words for *_, words in everyone if words))
    if strict:
        said += name_faults(*result)
    if said:
        advice = _advice(own, state_dict)
        head = f"Error(s) in loading state_dict for stages of {type(model).__name__}:"
        raise RuntimeError("\n\t".join([head, *said]) + (f"\n{advice}" if advice else ""))
    return result


def name_faults(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """The lines of ``nn.Module.load_state_dict``'s error about missing and unexpected names."""
    kinds = {"Missing": missing, "Unexpected": unexpected}
    return [
        f'{kind} key(s) in state_dict: "' + '", "'.join(names) + '". '
        for kind, names in kinds.items()
        if names
    ]


def _combined(everyone: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Any:
    """Torch's result for the whole model: names missing in any stage, and names unexpected in all stages."""
    missing = dict.fromkeys(name for names, _ in everyone for name in names)
    nowhere = set.intersection(*(set(names) for _, names in everyone))
    unexpected = [name for name in everyone[0][1] if name in nowhere]
    return nn.Module().load_state_dict({})._replace(missing_keys=list(missing), unexpected_keys=unexpected)


def _advice(own: Iterable[str], given: Iterable[str]) -> str:
    """Advice where all given names share a prefix that the model's names lack, such as DDP's ``module.``."""
    names, known = list(given), set(own)
    first = names[0] if names else ""
    ends = (at + 1 for at, letter in enumerate(first) if letter == ".")
    prefix = next((first[:end] for end in ends if first[end:] in known), "")
    if not prefix or first in known or not all(name.startswith(prefix) for name in names):
        return ""
    return (
        f"All names given begin with {prefix!r}, which a wrapper such as DistributedDataParallel adds; "
        f"remove it: torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, {prefix!r})"
    )
