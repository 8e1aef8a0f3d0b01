"""DTensors that compute as whole tensors do: with others on another mesh, and where a number is read.

What a function makes of all shards, such as a norm, is at first the part of each rank, and reading it
(``norm.item()``, ``if gradient.isnan().any()``) gives that part, another one on each rank. Plain tensors,
which a plan that replicates everything has, give the whole. So what is stored of parameters, and their
gradients, are DTensors whose results are whole: one all-reduce for each that would be a part, when all ranks
make it, since a number is often read by one rank alone. Lists of results are left to the function that joins
them.

A HYBRID_SHARD parameter is on a mesh of groups, other parameters of its plan are on the mesh of all ranks.
DTensor refuses operations on tensors of different meshes, so whether the norm for clipping can be computed by
torch, or the factors of LoRA can be merged, would depend on the plan. What is stored of HYBRID_SHARD
parameters, and their gradients, therefore bring the operands of an operation onto one mesh, too.

So are the gradients of replicated parameters beside sharded ones, for ``torch.amp.GradScaler``: whether any
gradient is infinite torch asks the other ranks only if the first one in the optimizer is sharded
(``found_inf_reduce_handler`` in ``torch.distributed.tensor``, 2.13). Where the first was replicated, and the
infinity in a shard of one rank, that rank alone skipped its step.

Copies of parameters that a user keeps, such as averages, have the layout of the plan that they were made
under: after a switch to another they are plain beside DTensors, or the other way round. Together they compute
in the layout of what is written to.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from osdp.runtime.module.plain_states import part_for
from osdp.runtime.ranks.control import Control
from osdp.torch_private.compiling import not_compiled
from osdp.torch_private.dtensor import data_pointer, wrap_like
from osdp.torch_private.optimizers import treat_in_lists

#: What ranks wait for that compute with a plain tensor beside a DTensor.
_PRODUCT = (
    "what is computed of a plain tensor and a sharded parameter or gradient, which all ranks have to do"
)
#: In the names of functions on lists of tensors, element by element.
_ON_LISTS = ("_foreach_", "_fused_")
#: What looks for infinite gradients.
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
#: What returns views of plain tensors, and copies of shards where it cuts the dim that is sharded.
_VIEWS = frozenset(
    (
        "__getitem__",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "hsplit",
        "vsplit",
        "dsplit",
        "chunk",
        "tensor_split",
        "unbind",
        "diagonal",
        "linalg_diagonal",
        "view",
        "view_as",
        "unflatten",
    )
)
#: The attribute of such copies.
_IS_COPY = "is_copy_of_shards"
#: Torch's words for plain tensors beside DTensors.
_MIXED = "got mixed torch.Tensor and DTensor"
#: What takes tensors as they are: attributes, and what asks autograd for the gradients of some.
_AS_THEY_ARE = frozenset(("__get__", "__set__", "__delete__", "grad", "backward"))
#: What reads a tensor into Python.
_READS = frozenset(
    (
        "item",
        "tolist",
        "is_nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__complex__",
        "__format__",
        "__array__",
        "numpy",
    )
)
#: What changes no values: what is a part before is one after it.
_MOVES = frozenset(("to", "cpu", "cuda", "float", "double", "detach", "stack", "cat"))
#: Methods whose names look like those of in-place operations, which change no values.
_NOT_IN_PLACE = frozenset(("__init__", "__int__", "__index__", "__invert__", "__iter__", "requires_grad_"))


def _attribute(name: str) -> property:
    """The attribute ``name`` of a tensor, past ``__torch_function__``.

    That takes 5 us, thirty times as long as the attribute, and loops over parameters read several of each.
    """
    attribute = getattr(torch._C.TensorBase, name)

    def get(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = attribute.__get__(tensor)
        return _as_group(value)

    def put(tensor: torch.Tensor, value: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            attribute.__set__(tensor, value)

    def delete(tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            attribute.__delete__(tensor)

    return property(get, put, delete)


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _DATA.__get__(tensor)
    return found


def _put_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``, of which torch changes what is around a DTensor, and none of its values.

    Raises:
        RuntimeError: These would have to change.
    """
    alike = value.shape == tensor.shape and value.dtype == tensor.dtype and value.device == tensor.device
    if alike and data_pointer(value) != data_pointer(tensor):
        raise RuntimeError(
            "p.data = value leaves the values of a sharded tensor as they are: write p.data.copy_(value), or "
            "p.copy_(value) under torch.no_grad()"
        )
    _DATA.__set__(tensor, value)  # as ``module.to(...)`` does


_DATA: Any = torch.Tensor.data


class GroupDTensor(DTensor):
    """A DTensor that computes together with DTensors on other meshes of its ranks, to whole results."""

    data = property(_get_data, _put_data)
    grad = _attribute("grad")
    requires_grad = _attribute("requires_grad")
    is_leaf = _attribute("is_leaf")
    shape = _attribute("shape")
    dtype = _attribute("dtype")
    device = _attribute("device")
    _version = _attribute("_version")
    _backward_hooks = _attribute("_backward_hooks")
    _post_accumulate_grad_hooks = _attribute("_post_accumulate_grad_hooks")

    @classmethod
    @not_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with all operands on one mesh."""
        kwargs = kwargs or {}
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _AS_THEY_ARE:
                return _as_group(func(*args, **kwargs))
            if name in _READS:
                return func(_read(args[0]), *args[1:], **kwargs)
            if name == _UNSCALES:
                return _each_mesh(func, (sorted(args[0], key=_is_whole), *args[1:]), kwargs)
            if args and isinstance(args[0], DTensor):
                _refuse_copies(name, args)
            try:
                found = _computed(func, name, args, kwargs)
            except RuntimeError as error:
                if _MIXED not in str(error):  # which torch says before anything is computed
                    raise
                run = _each_mesh if _is_on_lists(name) else partial(_computed, name=name)
                found = run(func, args=_laid_out_alike(name, args), kwargs=kwargs)
            if args and name in _VIEWS and (name != "__getitem__" or _is_view_index(args[1])):
                _note_copies(args[0], found)
            return found

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        """As DTensor's, for compiled code, which compares types."""
        whole: Any = DTensor.__tensor_unflatten__(*args)
        whole.__class__ = GroupDTensor
        return whole

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """The same values in other placements."""
        moved: DTensor = _as_group(super().redistribute(*args, **kwargs))
        return moved

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the DTensor that it is everywhere else."""
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy on the same mesh."""
        if id(self) not in memo:
            memo[id(self)] = copied = _as_group(copy.deepcopy(self._plain(), memo))
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def _plain(self) -> DTensor:
        plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        vars(plain).update(vars(self))  # whether it is a parameter, for one
        return plain


treat_in_lists(GroupDTensor)


def memory_of(tensor: DTensor) -> int:
    """Address of the storage of the local part."""
    return tensor._local_tensor.untyped_storage().data_ptr()


def _note_copies(source: Any, found: Any) -> None:
    """Remember which views of a DTensor are copies, so that nobody writes to them for its sake."""
    if not isinstance(source, DTensor) or _is_whole(source) or isinstance(source._local_tensor, FakeTensor):
        return
    for view in operands((found,), {}):
        if view.numel() and memory_of(view) != memory_of(source):
            setattr(view, _IS_COPY, True)


def _refuse_copies(name: str, args: Sequence[Any]) -> None:
    """Raise for a function that would write to a copy of what is sharded.

    Raises:
        RuntimeError: It would; of a plain tensor it would change a part.
    """
    target = args[0]
    if name == "__setitem__" and not _is_whole(target) and _is_view_index(args[1]):
        target = target[args[1]]
        _note_copies(args[0], target)
    if _IS_COPY in vars(target) and is_in_place(name):
        raise RuntimeError(
            f"{name} would change a copy: rows of a sharded tensor, or whatever is cut along the dim that is "
            "sharded, are gathered from the ranks. Change the whole tensor (tensor.mul_(mask), "
            "torch.where), or do it before wrapping"
        )


def _is_view_index(index: Any) -> bool:
    """Whether a plain tensor has a view at this index, rather than a copy."""
    return all(
        each is None or each is Ellipsis or (isinstance(each, (int, slice)) and not isinstance(each, bool))
        for each in (index if isinstance(index, tuple) else (index,))
    )


def _computed(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``func`` returns with all DTensors on one mesh, or, in lists, mesh by mesh."""
    meshes, parts = _layout(args, kwargs)
    if len(meshes) <= 1:
        return _results(func(*args, **kwargs), name, parts)
    if _is_on_lists(name):
        return _each_mesh(func, args, kwargs)
    written = _written(name, args, kwargs)
    if written is None:
        mesh = next((mesh for mesh in meshes if mesh.ndim == 1), meshes[0])
    else:
        _settle(written)
        mesh = written.device_mesh
    args, kwargs = _onto(mesh, (tuple(args), dict(kwargs)))
    return _results(func(*args, **kwargs), name, parts)


def _is_on_lists(name: str) -> bool:
    return any(part in name for part in _ON_LISTS)


def _laid_out_alike(name: str, args: Sequence[Any]) -> list[Any]:
    """Operands of which some are plain and some DTensors of the same shapes, in one layout.

    Args:
        name: Of the function.
        args: Its operands; of one on lists those at the same places belong together.
    """
    if not _is_on_lists(name):
        return _in_one_layout(args, in_place=is_in_place(name))
    length = len(args[0])
    together = [index for index, value in enumerate(args) if _is_list(value, length)]
    rows = zip(*(args[index] for index in together), strict=True)
    columns = zip(*(_in_one_layout(row, in_place=is_in_place(name)) for row in rows), strict=True)
    found = list(args)
    for index, column in zip(together, columns, strict=True):
        found[index] = list(column)
    return found


def _in_one_layout(values: Sequence[Any], *, in_place: bool) -> list[Any]:
    """``values`` in the layout of the first if that is written to; else of a DTensor among them."""
    if in_place and not isinstance(values[0], DTensor):
        return [_read(value) if isinstance(value, DTensor) else value for value in values]
    likes = [value for value in values if isinstance(value, DTensor) and not _is_part(value)]

    def laid_out(value: Any) -> Any:
        # DTensor itself takes a single number for one of all ranks.
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.numel() == 1:
            return value
        like = next((each for each in likes if each.shape == value.shape), None)
        if like is not None:
            return wrap_like(part_for(like, value).contiguous(), like)
        return _alike_on_all_ranks(value, likes[0].device_mesh) if likes else value

    return list(map(laid_out, values))


def _alike_on_all_ranks(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor as one that each rank has all of; a collective call.

    What optimizers keep of products of whole gradients is alike on all ranks, to the last bit. Activations
    are not: every rank would compute its part of the result with its own.

    Raises:
        RuntimeError: It is not.
    """
    control = Control.among(mesh)
    if mesh.size() > 1:
        if control is None:
            return value  # nobody can tell whether it is alike
        held = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        # Seven bytes are the most that surely fit into a signed number of eight.
        digest = hashlib.sha256(repr((value.shape, value.dtype)).encode() + held).digest()[:7]
        if len(set(control.meet(_PRODUCT, int.from_bytes(digest, "big")))) > 1:
            raise RuntimeError(
                f"a tensor of shape {tuple(value.shape)}, which differs among the ranks, was to be computed "
                "with a sharded parameter or gradient: each rank would make its part of the result of its "
                "own values. Take the whole, parameter.full_tensor(), on all ranks"
            )
    whole: torch.Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length


def compute_as_whole(tensor: torch.Tensor | None) -> None:
    """Let a DTensor be a :class:`GroupDTensor` from now on; others stay what they are."""
    _as_group(tensor)


def _as_group(value: Any) -> Any:
    """A DTensor, or those in a list, as such; sizes, which are tuples too, stay what they are."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return _remade(value, _as_group)
    if type(value) is DTensor:
        value.__class__ = GroupDTensor
    return value


def _remade(values: Any, change: Callable[[Any], Any]) -> Any:
    """A list or tuple, named or not, of other values."""
    changed = map(change, values)
    return values._make(changed) if hasattr(values, "_make") else type(values)(changed)


def _layout(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[list[DeviceMesh], bool]:
    """The meshes of the operands, and whether one of them is a part on each rank."""
    tensors = list(operands(args, kwargs))
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors)), any(map(_is_part, tensors))


def _results(found: Any, name: str, parts: bool) -> Any:
    """What a function returned: whole, but for lists, and for ``parts`` of lists that were moved alone.

    So the norms of all gradients are joined by one all-reduce, not by one for each.
    """
    if type(found) in (list, tuple) or (parts and name in _MOVES):
        return _as_group(found)
    if isinstance(found, tuple) and not isinstance(found, torch.Size):
        return _remade(found, lambda value: _results(value, name, parts=False))
    return _as_group(_whole(found, name))


def _is_part(value: DTensor) -> bool:
    return any(placement.is_partial() for placement in value.placements)


def _whole(value: Any, name: str) -> Any:
    """``value``, which is summed over the ranks if it is a part on each; a collective call."""
    if not isinstance(value, DTensor) or not _is_part(value):
        return value
    _meet(value, name)
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def _read(value: torch.Tensor) -> torch.Tensor:
    """A DTensor as a plain tensor, which is whole; a collective call if it is not."""
    if not isinstance(value, DTensor):
        return value
    if not _is_whole(value):
        _meet(value, "a number")
    return value.full_tensor()


def _meet(value: DTensor, name: str) -> None:
    """Wait for the other ranks, where it shows if some never come."""
    control = Control.known(value.device_mesh)
    if control is not None:
        control.meet(f"{name} of a sharded parameter or gradient, which all ranks have to compute")


def operands(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[DTensor]:
    """The DTensors among the arguments of a function of torch, and in lists and tuples of them.

    Several times as fast as ``torch.utils._pytree``: an optimizer calls functions by the hundred in a step.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands(value, {})


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether each rank has all of it."""
    return not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements)


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor | None:
    """The operand that a function called ``name`` writes to, if it is a DTensor."""
    found = args[0] if is_in_place(name) else kwargs.get("out")
    return found if isinstance(found, DTensor) else None


def is_in_place(name: str) -> bool:
    """Whether a function called ``name`` writes to its first operand."""
    if name in _NOT_IN_PLACE:
        return False
    name = name.partition(".")[0]  # of an overload, such as ``mul_.Tensor``
    by_operator = name.startswith("__i")
    return name == "__setitem__" or by_operator or (name.endswith("_") and not name.endswith("__"))


def _settle(written: DTensor) -> None:
    """Give a partial value, which is about to be written to, its whole value on each rank."""
    if any(placement.is_partial() for placement in written.placements):
        whole: Any = written.detach()
        whole = whole.redistribute(placements=[Replicate()] * written.device_mesh.ndim)
        written._local_tensor, written._spec = whole._local_tensor, whole._spec


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
    lead = next(value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
    length = len(lead)
    members: dict[DeviceMesh | None, list[int]] = {}
    for index, tensor in enumerate(lead):
        members.setdefault(getattr(tensor, "device_mesh", None), []).append(index)
    results: list[Any] = [None] * length
    for mesh, indices in members.items():

        def chosen(value: Any, indices: Sequence[int] = indices) -> Any:
            return [value[index] for index in indices] if _is_list(value, length) else value

        some = tuple(map(chosen, args)), {name: chosen(value) for name, value in kwargs.items()}
        some_args, some_kwargs = some if mesh is None else _onto(mesh, some)
        found = func(*some_args, **some_kwargs)
        for index, result in zip(indices, found or (), strict=False):
            results[index] = _as_group(result)
    return results if any(result is not None for result in results) else None
