"""Initialisation of models built on ``meta``, without ever holding the whole model.

Block by block (the elements of its ``ModuleList`` and ``Sequential`` containers, and the modules next to
them) a model is allocated whole on every rank, initialised by its own modules, cut into shards and freed. The
seed of a block is derived from rank 0's seed and the block's name. So values depend neither on the plan nor
on the stage of a block (except parameters tied over several stages), and a rank holds at most its shards and
one block.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp.comm.shards import part_of
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.torch_private.dtensor import blocks_of_shard, sharded_dim, wrap_like
from osdp.torch_private.fsdp import as_written

Initialiser = Callable[[nn.Module], object]

#: Names that a message lists.
_SHOWN = 5


def is_on_meta(model: nn.Module) -> bool:
    """Whether ``model`` was built without storage.

    Raises:
        ValueError: Some of its parameters are on ``meta``, and some are not.
    """
    places = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if len(set(places.values())) > 1:
        empty = [name for name, on_meta in places.items() if on_meta]
        raise ValueError(
            f"{len(empty)} of {len(places)} parameters are on meta, such as {empty[0]!r}; "
            "build the whole model on meta or none of it"
        )
    return any(places.values())


def check_initialisers(model: nn.Module) -> None:
    """Raise unless every module with parameters or buffers of its own can initialise them.

    Raises:
        ValueError: Some modules cannot; names them.
    """
    found = initialisers(model)
    lost = [
        f"{name or 'the root'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _holds_something(module) and not found[id(module)]
    ]
    if lost:
        raise ValueError(
            "the model is on meta and these modules cannot initialise what they hold: "
            + ", ".join(lost)
            + ". "
            "Give them a reset_parameters() method, or the model an _init_weights(module) method"
        )


def initialisers(
    model: nn.Module, param_init_fn: Initialiser | None = None
) -> dict[int, list[Callable[[], object]]]:
    """What initialises each module, by its ``id``: what is given; or its own method, then the model's.

    That of the model is the ``_init_weights`` of the innermost module around it that has one: models that
    consist of others, as those of transformers do, leave these to themselves.
    """
    found: dict[int, list[Callable[[], object]]] = {}

    def visit(module: nn.Module, around: Initialiser | None) -> None:
        if id(module) in found:
            return
        own = getattr(module, "_init_weights", None)
        around = own if _takes(own, module) else around
        calls: list[Callable[[], object]] = []
        found[id(module)] = calls
        if param_init_fn is not None:
            calls += [partial(param_init_fn, module)] if _holds_something(module) else []
        else:
            resets = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
            calls += [reset for reset in resets if _takes(reset) and _holds_something(module)][:1]
            calls += [partial(around, module)] if around is not None else []
        for child in module.children():
            visit(child, around)

    visit(model, None)
    return found


def _takes(method: Any, *arguments: Any) -> TypeGuard[Callable[..., object]]:
    """Whether ``method`` is one that can be called with these arguments alone."""
    if not callable(method):
        return False
    try:
        signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def materialise(
    model: nn.Module,
    owned: dict[str, ParameterSites],
    mesh: DeviceMesh,
    device: torch.device,
    stamp: int | None = None,
    offloaded: Collection[str] = (),
    param_init_fn: Initialiser | None = None,
) -> list[str]:
    """Give ``model``, wrapped on ``meta``, storage and initial values; buffers with values keep them.

    Args:
        model: The wrapped model, all of it on ``meta``.
        owned: Its parameters.
        mesh: The mesh of all data-parallel ranks.
        device: This rank's device.
        stamp: Seed; rank 0's current one if ``None``.
        offloaded: Names of parameters that are offloaded to host memory.
        param_init_fn: Initialises a module, whose parameters are whole and on the device by then; ``None``
            for its own methods.

    Returns:
        Names of the parameters and buffers that nothing initialised.
    """
    seed = torch.tensor([torch.initial_seed() % 2**62 if stamp is None else stamp], device=device)
    dist.broadcast(seed, group=mesh.get_group(), group_src=0)
    empty = {name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    blank = {
        name: _Blank(buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in empty
    }
    for entry in owned.values():
        entry.register(entry.parameter)  # that gave tied places a parameter each
        if entry.name in offloaded:
            entry.register(_on_host(entry.parameter))
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_forked(device)):
        names = {id(module): name for name, module in model.named_modules()}
        done: dict[str, bool] = {}
        calls = initialisers(model, param_init_fn)
        for modules in blocks(model):
            # Seeded by its name, a block gets the same values whatever else is on this rank.
            torch.manual_seed(_seed_of(int(seed.item()), names[id(modules[-1])]))
            _initialise(modules, owned, done, device, calls)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    lost = [name for name, before in blank.items() if before.stays(buffers[name])]
    return [*(name for name in owned if not done.get(name)), *lost]


def refuse_blank(names: Sequence[str], *, given: bool) -> None:
    """Refuse a model of which something has no values.

    Args:
        names: What :func:`materialise` returned.
        given: Whether ``param_init_fn`` was to initialise it.

    Raises:
        ValueError: There are some.
    """
    if not names:
        return
    some = f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if names[_SHOWN:] else ''}"
    if given:
        raise ValueError(
            f"param_init_fn left {some} as they were: they are no longer on meta when it is called, so leave "
            "out tests of is_meta, and let it initialise what each module holds"
        )
    raise ValueError(
        "the model was on meta, and neither reset_parameters() nor _init_weights() of its modules "
        f"initialise {some}: let them, or pass param_init_fn=, or build the model with its values"
    )


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(parameter.detach().cpu(), parameter.requires_grad)
    # FSDP2 puts the local tensor there at once, but the DTensor around it stays one of the device.
    local = parameter.to_local().detach().cpu()
    return nn.Parameter(wrap_like(local, parameter), parameter.requires_grad)


def _seed_of(seed: int, block: str) -> int:
    return seed ^ zlib.crc32(block.encode())


def blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules of ``model`` in groups that are allocated together, children before parents."""
    yield from _blocks(model)


def _blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for element in child.children():
                yield _bottom_up(element)
            yield [child]  # it may have parameters of its own
        elif _has_containers(child):
            yield from _blocks(child)
        else:
            yield _bottom_up(child)
    yield [module]


def _has_containers(module: nn.Module) -> bool:
    return any(isinstance(inner, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) for inner in module.modules())


def _bottom_up(module: nn.Module) -> list[nn.Module]:
    # ``modules()`` lists parents before their children.
    return list(reversed(list(module.modules())))


def _initialise(
    modules: list[nn.Module],
    owned: dict[str, ParameterSites],
    done: dict[str, bool],
    device: torch.device,
    calls: dict[int, list[Callable[[], object]]],
) -> None:
    inside = {id(module) for module in modules}
    mine = [entry for entry in owned.values() if any(id(module) in inside for module, _ in entry.places)]
    stored = [entry.parameter for entry in mine]
    blank: dict[str, _Blank] = {}
    for entry, parameter in zip(mine, stored, strict=True):
        if entry.name in done:  # tied to a module of an earlier block; this one may initialise it again
            whole = _whole(parameter.to(device))
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            blank[entry.name] = _Blank(whole)
        entry.register(nn.Parameter(whole, requires_grad=parameter.requires_grad))
    with torch.no_grad():
        for module in modules:
            with as_written(module):  # for who gives it new storage, as FSDP's param_init_fn is to do
                for initialise in calls[id(module)]:
                    initialise()
        for entry, parameter in zip(mine, stored, strict=True):
            done[entry.name] = entry.name not in blank or not blank[entry.name].stays(entry.parameter)
            _store(entry.parameter, parameter)
            entry.register(parameter)


class _Blank:
    """A tensor that is to be initialised, filled with what no initialiser writes, if that exists."""

    def __init__(self, tensor: torch.Tensor) -> None:
        value: float = 0
        if tensor.is_floating_point() or tensor.is_complex():
            value = torch.nan
        elif tensor.dtype != torch.bool:
            value = torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max
        with torch.no_grad():
            tensor.fill_(value)
        self._value, self._storage, self._version = value, tensor.data_ptr(), tensor._version

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, in its place now, is as blank as it was, or in part."""
        tensor = tensor.detach()
        if not tensor.numel():
            return False
        if tensor.dtype == torch.bool:
            return (tensor.data_ptr(), tensor._version) == (self._storage, self._version)
        if self._value != self._value:
            return bool(tensor.isnan().any())
        return bool((tensor == self._value).all())


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return whole.detach().clone()


def _store(whole: torch.Tensor, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    local = parameter.to_local()
    mesh, last = parameter.device_mesh, len(parameter.placements) - 1
    # The last axis (tensor parallelism) was sharded first; data-parallel axes shard its result.
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        dim = sharded_dim(placement)
        if dim is not None:
            blocks = blocks_of_shard(placement) if axis == last else 1
            whole = part_of(whole, dim, mesh.get_local_rank(axis), mesh.size(axis), blocks)
    local.copy_(whole)


def _holds_something(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(recurse=False), None) is not None
    return has_parameters or next(module.buffers(recurse=False), None) is not None


def _forked(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type
