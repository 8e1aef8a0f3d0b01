"""The sentence of the library: describe the model, profile it, price every choice, search, hand on a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from osdp.device_info import DeviceInfo
from osdp.integrations.auto_wrap import policy_atoms
from osdp.integrations.fairscale import allowed_to_run, marked_modules
from osdp.model_desc import ModelDesc
from osdp.plan import Mode, Plan
from osdp.profile import Profile
from osdp.profiler.batch import SampleBatch
from osdp.profiler.estimate import estimate
from osdp.profiler.measure import profile_model
from osdp.profiler.tensor_parallel import derive
from osdp.runtime.mesh import data_parallel_mesh
from osdp.runtime.split_modules import kind_of
from osdp.search.planning import batches, best_plan
from osdp.search.rules import SLICES, Rules
from osdp.tensor_plan import TensorParallelPlan
from osdp.training import Training

P = TypeVar("P", Plan, TensorParallelPlan)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_plan(
    model: nn.Module | None,
    model_desc: ModelDesc | Any,
    device_info: DeviceInfo | str | int | None = None,
    *,
    training: Training | None = None,
    profile: Profile | Sequence[Profile] | None = None,
    mesh: "DeviceMesh | None" = None,
    strategy: str | Mode | None = None,
    local_batches: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    slices: Sequence[int] = SLICES,
    recompute: bool = True,
    offload: bool = True,
    group_sizes: Sequence[int] | None = None,
    two_step: bool | None = None,
    auto_wrap_policy: Callable[..., Any] | None = None,
    param_dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    find_unused_parameters: bool = False,
    cache_dir: str | Path | None = None,
) -> Plan:
    """The fastest plan that fits.

    Every rank of the process group calls it alike: all measure together, the first rank searches, all get its
    answer.

    Args:
        model: The plain model; may be on ``meta``. ``None`` if ``profile`` is given, or if an estimate from
            ``device_info``'s speeds will do.
        model_desc: Its ModelDesc, or a sample batch to describe it with.
        device_info: The DeviceInfo; or a memory limit such as ``"8GiB"``, or ``None`` for all memory there
            is, to measure the live process group.
        training: Optimizer, dtypes, microbatches; by default AdamW at the batch of the description.
        profile: A profile at the training's local batch, or one for each of ``local_batches``.
        mesh: The data-parallel mesh; one over all ranks of a live process group if ``None``.
        strategy: A mode to force on all operators.
        local_batches: Local batches to choose from; the plan with the most samples per second wins.
        microbatches: Numbers of microbatches a step to choose from likewise; by default the training's.
        slices: Numbers of slices, powers of two, that an operator may run in; none if empty, where
            ``strategy`` or ``two_step`` forces something, or where parameters may go unused.
        recompute: Whether blocks may be computed again in backward; not where slices are forbidden.
        offload: Whether states may live in host memory where nothing else fits; only beside accelerators.
        group_sizes: Ranks of the groups that plans may have; all whose links are known, or on several
            machines those of one machine, if ``None``.
        two_step: Whether units that are sharded over all ranks are gathered and reduced across such groups
            and inside them one after the other; the search decides if ``None``.
        auto_wrap_policy: A policy of torch or fairscale; what it would wrap is decided as one.
        param_dtype: Overrides the training's, as ``reduce_dtype`` does.
        reduce_dtype: Dtype gradients are reduced in.
        loss_fn: How the loss is made of the model's output.
        find_unused_parameters: Whether parts of the model may go unused in a step; units are then whole
            blocks.
        cache_dir: Where measured segments are kept.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
        ValueError: An argument does not fit another.
    """
    allowed, mesh = _allowed(strategy, two_step), mesh or _mesh(model, profile)
    description, sample = _described(model, model_desc, loss_fn, auto_wrap_policy)
    training = _trained(training, description, param_dtype, reduce_dtype)
    device = _detected(device_info, mesh, group_sizes)
    rules = _rules(allowed, slices, recompute, offload, two_step, find_unused_parameters, device)

    def profiled(batch: int) -> Profile:
        wanted = replace(training, local_batch=batch)
        if profile:
            return _given(profile, batch)
        if model is None:
            return estimate(description, device, wanted)
        with allowed_to_run(model):
            return profile_model(
                model, description, sample, training=wanted, mesh=mesh, loss_fn=loss_fn, cache_dir=cache_dir,
                progress=_rank(mesh) == 0,
            )  # fmt: skip

    candidates = batches(training, local_batches, microbatches, profiled)
    return _from_first_rank(lambda: best_plan(description, candidates, device, rules), mesh)


def make_tensor_plan(
    model: nn.Module, sample_inputs: Any, degree: int, *, mesh: "DeviceMesh | None" = None
) -> TensorParallelPlan:
    """How ``degree`` ranks can compute the layers of ``model`` together, for ``parallelize``.

    Every rank of the process group, or of ``mesh``, calls it alike: the first one derives, all get its plan.

    Args:
        model: The plain model, on any device; it is neither run nor changed.
        sample_inputs: One batch, as for :meth:`osdp.ModelDesc.from_module`; only its shapes are read.
        degree: Number of ranks that compute one layer together.
        mesh: A mesh with one axis; all ranks if ``None``.

    Raises:
        ValueError: The degree does not divide a number of heads, or there is nothing that can be sharded;
            says why.
    """
    return _from_first_rank(lambda: derive(model, sample_inputs, degree, kind_of=kind_of), mesh)


def _given(given: Profile | Sequence[Profile], batch: int) -> Profile:
    profiles = [given] if isinstance(given, Profile) else given
    for profile in profiles:
        if profile.local_batch == batch:
            return profile
    sizes = ", ".join(str(profile.local_batch) for profile in profiles)
    raise ValueError(f"a profile at local batch {batch} is needed, there are {sizes}")


def _mesh(model: nn.Module | None, profile: Any) -> "DeviceMesh | None":
    """The mesh to measure on, if anything is to be measured."""
    if model is None or profile is not None or not dist.is_initialized():
        return None
    return data_parallel_mesh(model)


def _described(
    model: nn.Module | None, given: Any, loss_fn: Callable[..., Any] | None, policy: Callable[..., Any] | None
) -> tuple[ModelDesc, SampleBatch | None]:
    """The description, and the sample batch if that was given."""
    if isinstance(given, ModelDesc):
        if policy is not None:
            raise ValueError(
                "auto_wrap_policy sets what a description calls an operator: pass the sample batch instead "
                "of a finished ModelDesc"
            )
        return given, None
    if model is None or given is None:
        raise ValueError("pass a ModelDesc, or the model and a sample batch to describe it with")
    batch = SampleBatch.of(given)
    atoms = policy_atoms(model, policy) if policy is not None else marked_modules(model)
    with allowed_to_run(model):
        return ModelDesc.from_module(model, batch, loss_fn=loss_fn, atoms=atoms), batch


def _trained(
    training: Training | None,
    description: ModelDesc,
    param_dtype: str | torch.dtype | None,
    reduce_dtype: str | torch.dtype | None,
) -> Training:
    training = training or Training()
    training = replace(training, local_batch=training.local_batch or description.local_batch)
    if param_dtype is not None:
        training = replace(training, param_dtype=_dtype_name(param_dtype))
    if reduce_dtype is not None:
        training = replace(training, reduce_dtype=_dtype_name(reduce_dtype))
    return training


def _dtype_name(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _detected(
    device_info: DeviceInfo | str | int | None, mesh: "DeviceMesh | None", group_sizes: Sequence[int] | None
) -> DeviceInfo:
    if not isinstance(device_info, DeviceInfo):
        return DeviceInfo.detect(device_info, mesh=mesh, group_sizes=group_sizes)
    return device_info if group_sizes is None else device_info.with_groups(group_sizes)


def _rules(
    allowed: tuple[Mode, ...],
    slices: Sequence[int],
    recompute: bool,
    offload: bool,
    two_step: bool | None,
    find_unused_parameters: bool,
    device: DeviceInfo,
) -> Rules:
    """What the search may use.

    Raises:
        ValueError: What is forced needs links that are unknown.
    """
    if (allowed == (Mode.HYBRID_SHARD,) or two_step) and not device.group_sizes:
        asked = "two_step=True" if two_step else "strategy='HYBRID_SHARD'"
        raise ValueError(
            f"{asked} needs groups of ranks, of which DeviceInfo knows no links: pass group_sizes=(2,), for "
            "example, here or to DeviceInfo.detect(group_sizes=...), which several machines need not"
        )
    free = allowed == tuple(Mode) and not two_step and not find_unused_parameters
    return Rules(
        allowed=allowed,
        whole_blocks=find_unused_parameters,
        slices=tuple(slices) if free else (),
        recompute=recompute and free,
        offload=offload,
        two_step=two_step,
    )


def _allowed(strategy: str | Mode | None, two_step: bool | None) -> tuple[Mode, ...]:
    if two_step and str(strategy) in (Mode.NO_SHARD, Mode.HYBRID_SHARD):
        raise ValueError(f"two_step=True is for units sharded over all ranks, of which {strategy} has none")
    if strategy is None:
        return tuple(Mode)
    names = [mode.value for mode in Mode]
    if str(strategy) not in names:
        raise ValueError(f"strategy {str(strategy)!r} is unknown; there are {', '.join(names)}")
    return (Mode(str(strategy)),)


def _rank(mesh: "DeviceMesh | None") -> int:
    return (mesh.get_rank() if mesh is not None else dist.get_rank()) if dist.is_initialized() else 0


def _from_first_rank(search: Callable[[], P], mesh: "DeviceMesh | None") -> P:
    """What ``search`` returns or raises on the first rank of the mesh, on all of them."""
    if not dist.is_initialized():
        return search()
    group = mesh.get_group() if mesh is not None else None
    first = dist.get_global_rank(group, 0) if group is not None else 0
    answer: list[P | Exception | None] = [None]
    if dist.get_rank() == first:
        try:
            answer = [search()]
        except Exception as error:  # whatever it is, the other ranks wait for it
            answer = [error]
    dist.broadcast_object_list(answer, src=first, group=group)
    if answer[0] is None or isinstance(answer[0], Exception):
        raise answer[0] if answer[0] is not None else RuntimeError("the first rank sent no plan")
    return answer[0]
