"""``parallelize``: tensor parallelism for a model, under a :class:`TensorParallelPlan`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from osdp.comm.groups import device_of
from osdp.comm.shards import part_of
from osdp.errors import PlanMismatchError
from osdp.nn.modules import kind_of
from osdp.plan.tensor_parallel import Style, TensorParallelPlan
from osdp.plan.tensor_parallel_rank import Exchange
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain import check_plain
from osdp.runtime.tensor_parallel.collectives import TensorParallelGroup
from osdp.runtime.tensor_parallel.group_random import GroupRandom
from osdp.runtime.tensor_parallel.modules import RegionInput, ShardInfo, run_in_part, sum_gradients
from osdp.runtime.tensor_parallel.sequence import share_sequence
from osdp.torch_private.distributed import same_random_numbers
from osdp.torch_private.dtensor import blocked_shard

#: Allowed sharding styles by kind of module.
_STYLES = {
    "linear": (Style.COLUMN, Style.ROW, Style.VOCAB_HEAD),
    "conv1d": (Style.COLUMN, Style.ROW, Style.VOCAB_HEAD),
    "embedding": (Style.COLUMN, Style.VOCAB_EMBEDDING),
}


def parallelize(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> nn.Module:
    """Shard ``model`` over the tensor-parallel ranks of ``mesh``, in place; every rank of it calls this.

    All ranks start from the first one's parameters, buffers and random states, and must be given the same
    batches. From then on torch, Python and NumPy draw from the group's random states inside the model,
    independent of draws and seeds outside: dropout masks are the same on all ranks where activations are, and
    differ where those are sharded. Sharded weights become DTensors on ``mesh`` that keep their names and
    whole shapes; everything else is the same on all ranks, and so are its gradients. Apply data parallelism
    afterwards
    (:func:`osdp.runtime.running.apply` on the other axis of the mesh), under a plan made from the
    plain model; a model on ``meta`` gets its values then.

    Args:
        model: The plain model or a stage of it: modules of other stages may be emptied (their parameters
            ``None``), or removed, and then the plan must be restricted.
        plan: A plan that was derived for it.
        mesh: A mesh with one axis and the number of ranks of the plan's degree.

    Returns:
        ``model``.

    Raises:
        ValueError: The model is wrapped already, or the mesh has more than one axis.
        PlanMismatchError: The plan is for another model or number of ranks; lists every difference.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} axes, tensor parallelism needs 1; pass one axis of it, such as "
            'mesh["tp"]'
        )
    check_plain(model)
    plan = _without_emptied(model, plan)
    differences = list(_differences(model, plan, mesh))
    if differences:
        raise PlanMismatchError(differences)
    owned = owned_parameters(model)
    _start_alike(model, mesh)
    _shard_parameters(owned, plan, partial(_shard, mesh=mesh))
    ranks = TensorParallelGroup.of(mesh)
    _become_part(model, plan, ranks, GroupRandom(ranks, device_of(mesh)))
    return model


def first_rank_part(model: nn.Module, plan: TensorParallelPlan) -> tuple[nn.Module, list[Exchange]]:
    """Change ``model`` in place into the part that the first tensor-parallel rank computes, without others.

    Args:
        model: A copy of the plain model, on ``meta``.
        plan: A plan that was derived for it.

    Returns:
        ``model``, and a list to which each forward appends the collectives of itself and of its backward.
    """
    ranks = TensorParallelGroup(None, 0, plan.degree)

    def first_part(parameter: nn.Parameter, dim: int, blocks: int) -> nn.Parameter:
        part = part_of(parameter.detach(), dim, 0, plan.degree, blocks)
        part = part.clone(memory_format=torch.contiguous_format)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    _shard_parameters(owned_parameters(model), plan, first_part)
    _become_part(model, plan, ranks, None)
    return model, ranks.log


def _become_part(
    model: nn.Module, plan: TensorParallelPlan, ranks: TensorParallelGroup, random: GroupRandom | None
) -> None:
    _exchange_modules(model, plan, ranks, random)
    for divided in plan.divided:
        setattr(model.get_submodule(divided.module), divided.name, divided.value // plan.degree)
    if plan.sequence is not None:
        share_sequence(model, plan.sequence, ranks)
    if random is not None:
        _draw_together(model, plan, random)


def _draw_together(model: nn.Module, plan: TensorParallelPlan, random: GroupRandom) -> None:
    """Use ``random`` in the model, and in every module around a sharded one, as it may be called alone."""
    blocks = {block for run in plan.sequence.runs for block in run} if plan.sequence is not None else set()
    around = {""}
    for entry in plan.modules:
        parts = entry.module.split(".")
        around |= {".".join(parts[:count]) for count in range(1, len(parts))}
    for name in sorted(around | blocks):
        random.surround(model.get_submodule(name), sharded=name in blocks)


def _without_emptied(model: nn.Module, plan: TensorParallelPlan) -> TensorParallelPlan:
    """``plan`` without modules whose weight is ``None``, which belong to other pipeline stages."""
    modules = dict(model.named_modules(remove_duplicate=False))
    emptied = {
        entry.module
        for entry in plan.modules
        if entry.module in modules and getattr(modules[entry.module], "weight", None) is None
    }
    return replace(plan, modules=tuple(e for e in plan.modules if e.module not in emptied))


def _differences(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> Iterator[str]:
    if plan.degree != mesh.size():
        yield f"it is for {plan.degree} tensor-parallel ranks, there are {mesh.size()}"
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in plan.modules:
        module = modules.get(entry.module)
        if module is None:
            yield f"module {entry.module!r} is to be sharded, which the model lacks; use plan.restricted()"
            continue
        kind = kind_of(module)
        if entry.style not in _STYLES.get(kind or "", ()):
            yield f"module {entry.module!r}, a {type(module).__name__}, cannot be sharded as a {entry.style}"
        elif "forward" in module.__dict__:
            yield f"module {entry.module!r} has a forward of its own, set on the instance"
        elif (size := _weight(module).shape[entry.dim]) != entry.size:
            yield f"module {entry.module!r} has size {size} in dim {entry.dim}, the plan says {entry.size}"
    for name in plan.summed:
        if name not in modules:
            yield f"the gradients of module {name!r} are to be summed, which the model lacks"
    for divided in plan.divided:
        value = getattr(modules.get(divided.module), divided.name, None)
        if value != divided.value:
            yield f"{divided.module}.{divided.name} is {value}, the plan says {divided.value}"


def _start_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcast the first rank's parameters, buffers and random states to all ranks of ``mesh``."""
    device, group = device_of(mesh), mesh.get_group()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device).contiguous()
                dist.broadcast(tensor.data, group=group, group_src=0)
    same_random_numbers(group, device)


def _shard_parameters(
    owned: dict[str, ParameterSites],
    plan: TensorParallelPlan,
    shard: Callable[[nn.Parameter, int, int], nn.Parameter],
) -> None:
    """Register shards in all places of each parameter, including tied ones."""
    placements = dict(_placements(plan))
    for entry in owned.values():
        found = {placements[name] for name in entry.names if name in placements}
        if len(found) > 1:
            raise PlanMismatchError([f"tied parameter {entry.name!r} is to be sharded in {len(found)} ways"])
        if found:
            dim, blocks = found.pop()
            entry.register(shard(entry.parameter, dim, blocks))


def _placements(plan: TensorParallelPlan) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name of each sharded parameter, the dimension it is sharded along, and the number of blocks.

    Biases that are added to sums or to gathered logits are replicated; so are biases of fused blocks, whose
    parts FSDP2 could not shard evenly.
    """
    for entry in plan.modules:
        yield f"{entry.module}.weight", (entry.dim, entry.blocks)
        if entry.style is Style.COLUMN and entry.blocks == 1:
            yield f"{entry.module}.bias", (0, 1)


def _shard(parameter: nn.Parameter, dim: int, blocks: int, mesh: DeviceMesh) -> nn.Parameter:
    with torch.no_grad():
        whole = parameter.detach()
        # A copy even where the part is contiguous: as a view it would keep the whole alive.
        part = part_of(whole, dim, mesh.get_local_rank(), mesh.size(), blocks)
        part = part.clone(memory_format=torch.contiguous_format)
        placement: Placement = Shard(dim) if blocks == 1 else blocked_shard(dim, blocks)
        sharded = DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _exchange_modules(
    model: nn.Module, plan: TensorParallelPlan, ranks: TensorParallelGroup, random: GroupRandom | None
) -> None:
    entrances: dict[str, RegionInput] = {}
    made: dict[nn.Module, nn.Module] = {}
    for entry in plan.modules:
        module = model.get_submodule(entry.module)
        entrance = entrances.setdefault(entry.region or entry.module, RegionInput(ranks))
        transposed = kind_of(module) == "conv1d"
        in_sequence = plan.sequence is not None and plan.sequence.holds(entry.module)
        made[module] = run_in_part(module, ShardInfo(entry, ranks, entrance, transposed, in_sequence, random))
    sequence_summed = plan.sequence.summed if plan.sequence is not None else ()
    for name in (*plan.summed, *sequence_summed):
        module = model.get_submodule(name)
        made[module] = sum_gradients(module, ranks)
    for parent in list(model.modules()):
        # Not named_children(), which leaves out what is registered twice.
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                setattr(parent, name, made[child])


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight
