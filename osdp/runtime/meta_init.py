"""Initialisation of models built on ``meta``, without ever holding the whole model.

Block by block (the elements of its ``ModuleList`` and ``Sequential`` containers, and the modules next to
them) a model is allocated whole on every rank, initialised by its own modules, cut into shards and freed. The
seed of a block is derived from rank 0's seed and the block's name. So values depend neither on the plan nor
on the stage of a block (except parameters tied over several stages), and a rank holds at most its shards and
one block.
"""

import zlib
from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp.comm.shards import part_of
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.torch_private.dtensor import blocks_of_shard, sharded_dim, wrap_like

Initialiser = Callable[[nn.Module], object]


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
    lost = [
        f"{name or 'the root'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _holds_something(module) and initialiser(model, module) is None
    ]
    if lost:
        raise ValueError(
            "the model is on meta and these modules cannot initialise what they hold: "
            + ", ".join(lost)
            + ". "
            "Give them a reset_parameters() method, or the model an _init_weights(module) method"
        )


def initialiser(
    model: nn.Module, module: nn.Module, param_init_fn: Initialiser | None = None
) -> Callable[[], object] | None:
    """The initialiser of ``module``: what is given, the model's ``_init_weights``, its own, or ``None``."""
    if param_init_fn is not None:
        return lambda: param_init_fn(module)
    by_model = getattr(model, "_init_weights", None)
    if callable(by_model):
        return lambda: by_model(module)
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if callable(own):
            return own  # type: ignore[no-any-return]
    return None


def materialise(
    model: nn.Module,
    owned: dict[str, ParameterSites],
    mesh: DeviceMesh,
    device: torch.device,
    stamp: int | None = None,
    offloaded: Collection[str] = (),
    param_init_fn: Initialiser | None = None,
) -> None:
    """Give ``model``, wrapped on ``meta``, storage and initial values.

    Args:
        model: The wrapped model, all of it on ``meta``.
        owned: Its parameters.
        mesh: The mesh of all data-parallel ranks.
        device: This rank's device.
        stamp: Seed; rank 0's current one if ``None``.
        offloaded: Names of parameters that are offloaded to host memory.
        param_init_fn: Initialises a module; ``None`` for its own method.
    """
    seed = torch.tensor([torch.initial_seed() % 2**62 if stamp is None else stamp], device=device)
    dist.broadcast(seed, group=mesh.get_group(), group_src=0)
    model.to_empty(device=device)
    for entry in owned.values():
        entry.register(entry.parameter)  # to_empty gave tied places a parameter each
        if entry.name in offloaded:
            entry.register(_on_host(entry.parameter))
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_forked(device)):
        names = {id(module): name for name, module in model.named_modules()}
        done: set[str] = set()
        for modules in blocks(model):
            # Seeded by its name, a block gets the same values whatever else is on this rank.
            torch.manual_seed(_seed_of(int(seed.item()), names[id(modules[-1])]))
            _initialise(model, modules, owned, done, mesh, device, param_init_fn)


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
    model: nn.Module,
    modules: list[nn.Module],
    owned: dict[str, ParameterSites],
    done: set[str],
    mesh: DeviceMesh,
    device: torch.device,
    param_init_fn: Initialiser | None,
) -> None:
    inside = {id(module) for module in modules}
    mine = [entry for entry in owned.values() if any(id(module) in inside for module, _ in entry.places)]
    stored = [entry.parameter for entry in mine]
    for entry, parameter in zip(mine, stored, strict=True):
        if entry.name in done:  # tied to a module of an earlier block; this one may initialise it again
            whole = _whole(parameter.to(device))
        else:
            whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        entry.register(nn.Parameter(whole, requires_grad=parameter.requires_grad))
        done.add(entry.name)
    with torch.no_grad():
        for module in modules:
            initialise = initialiser(model, module, param_init_fn)
            if initialise is not None and (_holds_something(module) or hasattr(model, "_init_weights")):
                initialise()
        for entry, parameter in zip(mine, stored, strict=True):
            _store(entry.parameter, parameter)
            entry.register(parameter)


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
