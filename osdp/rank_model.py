"""Planning for ranks that compute layers together: their part of the model, and its profiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from osdp.comm.objects import on_first_rank
from osdp.cost.tensor_parallel import part_profile, with_exchanges
from osdp.hardware.device_info import DeviceInfo, Link
from osdp.hardware.profile import Profile
from osdp.integrations.auto_wrap import policy_atoms
from osdp.integrations.fairscale import allowed_to_run, marked_modules
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.plan.tensor_parallel_rank import RankDesc
from osdp.profiler.cache import MeasurementCache, placement
from osdp.profiler.links.axis_links import measure_tensor_links
from osdp.runtime.mesh import device_of
from osdp.runtime.tensor_parallel.apply import imagine
from osdp.tracing.fake_copy import on_meta, skeleton
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensor_parallel.derive import derive
from osdp.tracing.tensor_parallel.rank import describe_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RankModel:
    """What is planned for: a model, or the part of it that one of several ranks computes.

    Attributes:
        model: The model; if it is a part, without weights.
        desc: Its description.
        shared: What of it is shared with other ranks; ``None`` if it is the whole model.
    """

    model: nn.Module
    desc: ModelDesc
    shared: RankDesc | None = None

    def profiler(
        self,
        whole: ModelDesc,
        device: DeviceInfo,
        measure: Callable[[Training], Profile],
    ) -> Callable[[Training], Profile]:
        """How to get its profile with what is exchanged.

        Args:
            whole: The description of the whole model.
            device: Has the links of these ranks.
            measure: Returns a profile of the part, or one of the whole model that was given.
        """

        def profiled(training: Training) -> Profile:
            profile = measure(training)
            if self.shared is None:
                return profile
            if profile.model == whole.fingerprint:
                profile = part_profile(whole, profile, self.shared)
            return with_exchanges(profile, self.shared, device)

        return profiled


def one_rank(
    model: nn.Module,
    batch: SampleBatch,
    whole: ModelDesc,
    degree: int,
    sequence_parallel: bool = False,
    *,
    loss_fn: Callable[..., Any] | None,
    policy: Callable[..., Any] | None,
) -> RankModel:
    """What one of ``degree`` ranks computes; all ranks of the process group call it alike.

    Args:
        model: The plain model; it is neither run nor changed.
        batch: The batch that it was described with.
        whole: That description.
        degree: Tensor-parallel degree.
        sequence_parallel: Whether they share the sequence, too.
        loss_fn: How the loss is made of the model's output.
        policy: What it would wrap is decided as one.

    Raises:
        ValueError: The layers cannot be shared by that number of ranks; gives the reason.
    """
    if degree == 1:
        if sequence_parallel:
            raise ValueError("sequence_parallel shares a sequence among tensor-parallel ranks: pass tp=, too")
        return RankModel(model, whole)
    plan = on_first_rank(lambda: derive(model, batch, degree, sequence_parallel=sequence_parallel))
    atoms: Sequence[str] = policy_atoms(model, policy) if policy is not None else marked_modules(model)
    with allowed_to_run(model):
        part, log = imagine(skeleton(model, on_meta), plan)
        desc = describe_rank(part, log, batch, whole, plan, loss_fn=loss_fn, atoms=atoms)
    return RankModel(part, desc.desc, desc)


def with_tensor_links(device: DeviceInfo, mesh: "DeviceMesh | None", cache: MeasurementCache) -> DeviceInfo:
    """The devices with the collectives inside layers measured, unless they are known or nobody is there."""
    if device.tensor_links or mesh is None or mesh["tp"].size() == 1:
        return device
    where, group = device_of(mesh), mesh["tp"].get_group()
    facts = [mesh.mesh.tolist(), *placement(where, None)] if cache.is_on else []
    links = cache.measured(
        "tensor_links", tuple[Link, ...], facts, lambda: measure_tensor_links(group, where)
    )
    return replace(device, tensor_links=links)
