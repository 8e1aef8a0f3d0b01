"""DTensors of parameters that are sharded within groups, next to those that are sharded over all ranks.

A HYBRID_SHARD parameter is on a mesh of groups, other parameters of its plan are on the mesh of all ranks.
DTensor refuses operations on tensors of different meshes, so whether the norm for clipping can be computed by
torch, or the factors of LoRA can be merged, would depend on the plan. What is stored of HYBRID_SHARD
parameters, and their gradients, are therefore DTensors that bring the operands of an operation onto one mesh.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

#: In the names of functions on lists of tensors, element by element.
_ON_LISTS = ("_foreach_", "_fused_")


class GroupDTensor(DTensor):
    """A DTensor on a mesh of groups, which computes together with DTensors on other meshes of its ranks."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with all operands on one mesh."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # Attributes come by far the most often.
            if func.__name__ in ("__get__", "__set__", "__delete__"):
                return _as_group(func(*args, **kwargs))
            meshes = list(dict.fromkeys(_meshes((args, kwargs))))
            if len(meshes) == 1:
                return tree_map_only(DTensor, _as_group, func(*args, **kwargs))
            if any(part in func.__name__ for part in _ON_LISTS):
                return _each_mesh(func, args, kwargs)
            in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
            first = next(_meshes(args[0])) if in_place or func.__name__.startswith("__i") else None
            mesh = first or next((mesh for mesh in meshes if mesh.ndim == 1), meshes[0])
            args, kwargs = _onto(mesh, (tuple(args), dict(kwargs)))
            return tree_map_only(DTensor, _as_group, func(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the DTensor that it is everywhere else."""
        plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)


def compute_with_other_meshes(tensor: torch.Tensor | None) -> None:
    """Let a DTensor on a mesh of groups be a :class:`GroupDTensor` from now on; others stay what they are."""
    _as_group(tensor)


def _as_group(value: Any) -> Any:
    if type(value) is DTensor and value.device_mesh.ndim > 1:
        value.__class__ = GroupDTensor
    return value


def _meshes(values: Any) -> Iterator[DeviceMesh]:
    return (leaf.device_mesh for leaf in tree_leaves(values) if isinstance(leaf, DTensor))


def _onto(mesh: DeviceMesh, values: Any) -> Any:
    """``values`` with all DTensors on ``mesh``; those that come from another one are whole there."""

    def move(tensor: DTensor) -> DTensor:
        everywhere = [Replicate()] * mesh.ndim
        if tensor.device_mesh != mesh:
            return DTensor.from_local(tensor.full_tensor(), mesh, everywhere, run_check=False)
        # Partial values, norms of shards above all, are not combined correctly with whole ones.
        is_partial = any(placement.is_partial() for placement in tensor.placements)
        return tensor.redistribute(placements=everywhere) if is_partial else tensor

    return tree_map_only(DTensor, move, values)


def _each_mesh(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func`` on lists, mesh by mesh; what it returns in the order of the lists."""
    length = len(args[0])
    members: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(args[0]):
        members.setdefault(tensor.device_mesh, []).append(index)
    results: list[Any] = [None] * length
    for mesh, indices in members.items():

        def chosen(value: Any, indices: Sequence[int] = indices) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == length
            return [value[index] for index in indices] if is_list else value

        some_args, some_kwargs = _onto(
            mesh, (tuple(map(chosen, args)), {name: chosen(value) for name, value in kwargs.items()})
        )
        found = func(*some_args, **some_kwargs)
        for index, result in zip(indices, found or (), strict=False):
            results[index] = _as_group(result)
    return results if any(result is not None for result in results) else None
