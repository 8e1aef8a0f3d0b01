"""Conversion of fused weights, whose blocks are sharded separately, to a checkpoint's layout and back.

Tensor-parallel ranks hold a part of each block of a fused weight (queries, keys and values, for example).
``torch.distributed.checkpoint`` stores one contiguous box per rank, so such a tensor is converted to one that
is sharded in one piece; names and whole shapes stay the same::

    2 ranks, blocks Q K V      rank 0        rank 1
    in blocks                  Q0 K0 V0      Q1 K1 V1
    in one piece               Q0 Q1 K0      K1 V0 V1
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from osdp.comm.shards import join_parts, part_of
from osdp.torch_private.distributed import all_gather
from osdp.torch_private.dtensor import blocked_shard, blocks_of_shard, sharded_dim
from osdp.torch_private.saving import stored_names


def in_one_block(by_parameter: dict[str, Any]) -> dict[str, Any]:
    """State dict entries with every tensor in one contiguous piece on each rank.

    Args:
        by_parameter: A tensor, or a mapping of several, by parameter name; the same names on all ranks.
    """

    def relaid(value: DTensor) -> DTensor:
        dim, blocks = _layout(value)
        return value if dim is None or blocks == 1 else _relaid(value, dim, blocks, 1)

    return {name: _mapped(relaid, value) for name, value in by_parameter.items()}


def in_blocks_of(model: nn.Module, by_parameter: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of :func:`in_one_block`: entries with the placements of the parameters of ``model``.

    Args:
        model: The model.
        by_parameter: Values by parameter name; with a ``prefix``, by names ``{prefix}{parameter}.{state}``.
        prefix: The prefix of names.
    """
    named = stored_names(model)
    stored = {name: p for name, p in named.items() if isinstance(p, DTensor) and _layout(p)[1] > 1}

    def relaid(parameter: DTensor, value: DTensor) -> DTensor:
        dim, blocks = _layout(parameter)
        return value if dim is None or value.shape != parameter.shape else _relaid(value, dim, 1, blocks)

    def owner(key: str) -> DTensor | None:
        names = (name for name in stored if prefix and key.startswith(f"{prefix}{name}."))
        return stored.get(key) if not prefix else stored.get(next(names, ""))

    found = {}
    for key, value in by_parameter.items():
        parameter = owner(key)
        found[key] = value if parameter is None else _mapped(partial(relaid, parameter), value)
    return found


def _layout(tensor: DTensor) -> tuple[int | None, int]:
    """The dimension that the last mesh axis (tensor parallelism) shards, and its number of blocks."""
    last = tensor.placements[-1]
    return sharded_dim(last), blocks_of_shard(last)


def _mapped(function: Callable[[DTensor], DTensor], state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _mapped(function, value) for key, value in state.items()}
    return function(state) if isinstance(state, DTensor) else state


def _relaid(value: DTensor, dim: int, before: int, after: int) -> DTensor:
    """``value`` with ``dim`` sharded on the last axis in ``after`` blocks instead of ``before``."""
    mesh = value.device_mesh
    axis = mesh.ndim - 1
    local = value.to_local().detach().contiguous()
    gathered = local.new_empty(mesh.size(axis) * local.numel())
    all_gather(gathered, local.view(-1), group=mesh.get_group(axis))
    whole = join_parts(gathered.view(mesh.size(axis), *local.shape).unbind(), dim, before)
    part = part_of(whole, dim, mesh.get_local_rank(axis), mesh.size(axis), after)
    placement: Placement = Shard(dim) if after == 1 else blocked_shard(dim, after)
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        [*value.placements[:-1], placement],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
