"""What is compared: OSDP and the baselines on the same model, weights, data and optimizer, made alike."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.baselines import (
    TrainStep,
    ddp,
    fsdp2,
    make_optimizer,
    rank_batches,
    train_step,
    with_real_reduce_scatter,
)
from benchmarks.support.live_bytes import peaks_of_steps
from benchmarks.support.memory_oracle import Step, Timeline, fake_group, measure_peak, training_step
from benchmarks.support.models import Case, loss_of
from osdp import OSDP, DeviceInfo, Link, ModelDesc, Plan, Training, make_plan
from osdp.comm.groups import Meshes
from osdp.cost.sharding.shard_groups import shard_groups_of
from osdp.hardware.device_info import COLLECTIVES
from osdp.hardware.profile import Profile
from osdp.plan.sharding import Mode, Route, Unit
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.measure import profile_model, profile_trainings
from osdp.runtime.sharding.fsdp_units import can_count_unused_as_zero

BASELINES = ("ddp", "fsdp2", "fsdp2-keep")

#: Ways to set up FSDP2 by hand: whether blocks are resharded after forward, and whether they are recomputed.
FSDP2 = {
    "fsdp2": (True, False),
    "fsdp2-keep": (False, False),
    "fsdp2-recompute": (True, True),
    "fsdp2-keep-recompute": (False, True),
}

#: Steps before one is measured: optimizer states are there then, and lazily made buffers.
WARMUP = 2

#: All parameters of all cases get gradients, and no torch before 2.12 can shard them otherwise.
_ALL_USED: dict[str, Any] = {} if can_count_unused_as_zero() else {"find_unused_parameters": False}

#: A limit that never binds.
UNLIMITED = 2**50


@dataclass(frozen=True)
class Setting:
    """All that planning a case needs.

    Attributes:
        case: The model.
        training: The optimizer and the local batch.
        model_desc: The description of the model.
        profile: Its profile on this machine.
    """

    case: Case
    training: Training
    model_desc: ModelDesc
    profile: Profile

    def plan(self, device: DeviceInfo, memory_limit: int = UNLIMITED, **options: Any) -> Plan:
        """The plan for these devices under ``memory_limit`` bytes; ``options`` as for ``make_plan``."""
        return make_plan(
            None,
            self.model_desc,
            replace(device, memory_limit=memory_limit),
            training=self.training,
            profile=self.profile,
            **options,
        )

    def candidate(self, device: DeviceInfo, plan: Plan) -> "Candidate":
        """OSDP with ``plan``."""
        wrapper = OsdpWrap(self.model_desc, replace(device, memory_limit=plan.memory_limit), plan)
        return Candidate("osdp", self.case, self.training, wrapper)

    def by_hand(self, kind: str, group_size: int = 0) -> "Candidate":
        """The baseline of this kind."""
        return Candidate(kind, self.case, self.training, group_size=group_size)


@dataclass(frozen=True)
class OsdpWrap:
    """What OSDP needs to wrap a model.

    Attributes:
        model_desc: The description of the model.
        device: The devices the plan was made for.
        plan: The plan.
    """

    model_desc: ModelDesc
    device: DeviceInfo
    plan: Plan


@dataclass(frozen=True)
class Candidate:
    """One way to train a case.

    Attributes:
        kind: ``"ddp"``, one of :data:`FSDP2`, ``"fsdp2-ring"`` (with a real reduce-scatter on gloo),
            ``"hsdp"`` (FSDP2 inside groups, replicated across) or ``"osdp"``.
        case: The model.
        training: The optimizer and the local batch.
        osdp: How OSDP wraps it; only for ``"osdp"``.
        group_size: Ranks of a group; only for ``"hsdp"``.
    """

    kind: str
    case: Case
    training: Training
    osdp: OsdpWrap | None = None
    group_size: int = 0

    def wrap(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Parallelise ``model`` this way, in place."""
        if self.kind == "ddp":
            return ddp(model)
        if self.kind == "hsdp":
            return fsdp2(model, self.case, Meshes.over(mesh).grouped(self.group_size))
        if self.kind == "fsdp2-ring":
            return with_real_reduce_scatter(fsdp2(model, self.case, mesh))
        if self.kind in FSDP2:
            reshard, recompute = FSDP2[self.kind]
            return fsdp2(model, self.case, mesh, reshard=reshard, recompute=recompute)
        assert self.osdp is not None
        found = self.osdp
        given = {"training": self.training, "plan": found.plan, **_ALL_USED}
        return OSDP(model, found.model_desc, found.device, **given)

    def prepare(self, mesh: DeviceMesh) -> TrainStep:
        """A fresh model and optimizer, as a function of the step's number."""
        case, training = self.case, self.training
        model = self.wrap(case.model(device=mesh.device_type), mesh)
        optimizer = make_optimizer(model.parameters(), training)
        batches = rank_batches(
            case, training.local_batch, dist.get_rank(), dist.get_world_size(), device=mesh.device_type
        )
        return train_step(model, optimizer, batches)

    def build_step(self, mesh: DeviceMesh) -> Step:
        """A fresh model and optimizer, as a step whose memory is measured."""
        case, training = self.case, self.training
        model = self.wrap(case.model(device=mesh.device_type), mesh)
        if self.kind == "ddp" and dist.get_backend() == "fake":
            # DDP expects a tensor from its collective, which the fake group does not return.
            model.register_comm_hook(None, _already_reduced)
        optimizer = make_optimizer(model.parameters(), training)
        batch = case.sample(training.local_batch, device=mesh.device_type)
        keeps = isinstance(model, OSDP) and not model.plan.reduce_each_microbatch
        early = model.no_sync if keeps else nullcontext
        return training_step(model, optimizer, lambda: loss_of(model(**batch)), training.microbatches, early)

    def memory(self, world_size: int, device: str = "cpu") -> Timeline:
        """Its true memory on the worst of ``world_size`` ranks."""
        with fake_group(world_size):
            # A mesh stays in a cache of torch, so it is made before anything is counted.
            mesh = init_device_mesh(device, (world_size,))
            return measure_peak(lambda: self.build_step(mesh), device=device)

    def live_bytes(self, mesh: DeviceMesh) -> list[int]:
        """Its peaks on this rank, which was started to count its live bytes, over whole steps.

        Counted are all bytes beyond those that are alive before the model is built.
        """
        return peaks_of_steps(lambda: self.build_step(mesh), warmup=WARMUP)

    def collectives(self, world_size: int) -> dict[str, int]:
        """Collectives and messages of one step, by name; those of DDP are started in C++ and not seen."""
        with fake_group(world_size):
            step = self.build_step(init_device_mesh("cpu", (world_size,)))
            step()
            with CommunicationCounter() as counter:
                step()
        return dict(counter.counts)


class CommunicationCounter(TorchDispatchMode):
    """Counts calls of process groups; torch's own ``CommDebugMode`` knows no messages.

    Attributes:
        counts: Calls so far, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0].strip("_")
        # Each message has a sender.
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "recv")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _already_reduced(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    del state
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def given_device(world_size: int, kind: str = "cpu", *, copies_messages: bool = False) -> DeviceInfo:
    """Devices that nobody measured, for plans whose times do not matter.

    Collectives are as slow as gloo's (0.5 ms, 200 MB/s), so that a searched plan uses the memory it may.

    Args:
        world_size: Their number.
        kind: Their kind.
        copies_messages: Whether the backend is gloo rather than the ``fake`` group.
    """
    links = tuple(Link(name, "world", world_size, 5e-4, 2e8) for name in COLLECTIVES)
    return DeviceInfo(
        memory_limit=UNLIMITED,
        kind=kind,
        devices_per_node=world_size,
        links=links,
        copies_messages=copies_messages,
    )


def gloo_devices(nodes: int, per_node: int, *, by_exchange: bool = False) -> DeviceInfo:
    """CPUs that nobody measured, on gloo, five times as fast inside a node; all routes are known.

    Args:
        nodes: Number of nodes.
        per_node: Devices of each.
        by_exchange: Whether gradients are reduced by exchanges.
    """
    size = nodes * per_node
    flat = given_device(size, copies_messages=True)
    groups: dict[str, tuple[int, float]] = {"world": (size, 2e8)}
    if nodes > 1:
        groups |= {
            f"inside {per_node}": (per_node, 1e9),
            f"across {per_node}": (nodes, 2e8),
            f"two_step {per_node}": (size, 4e8),
        }
    links = tuple(
        Link(name, group, ranks, 5e-4, speed, by_exchange=by_exchange and name == "reduce_scatter")
        for group, (ranks, speed) in groups.items()
        for name in COLLECTIVES
    )
    return replace(flat, nodes=nodes, devices_per_node=per_node, links=links)


def make_setting(
    case: Case,
    training: Training,
    profile: Profile | None = None,
    *,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    cache: MeasurementCache | None = None,
) -> Setting:
    """Describe and profile ``case`` on this machine (or take its ``profile``, or what ``cache`` has).

    With a ``mesh`` the optimizer is timed on DTensors, as it runs under a plan.
    """
    sample = case.sample(training.local_batch)
    model = case.model(device="meta" if profile else "cpu")
    model_desc = ModelDesc.from_module(model, sample)
    measured = profile or profile_model(
        model, model_desc, sample, training=training, device=device, mesh=mesh, cache=cache, progress=False
    )
    return Setting(case, training, model_desc, measured)


def make_setting_together(case: Case, training: Training, mesh: DeviceMesh) -> Setting:
    """As :func:`make_setting`, on all ranks at once, as they train; all get rank 0's profile."""
    (setting,) = make_settings_together(case, [training], mesh)
    return setting


def make_settings_together(case: Case, trainings: Sequence[Training], mesh: DeviceMesh) -> list[Setting]:
    """The same for trainings that differ in their batches, of which the first is the largest."""
    sample = case.sample(trainings[0].local_batch)
    model = case.model(device="cpu")
    model_desc = ModelDesc.from_module(model, sample)
    if len(trainings) > 1 and not model_desc.batch_is_free:
        return [make_setting_together(case, training, mesh) for training in trainings]
    profiles = profile_trainings(
        model, model_desc, sample, trainings=trainings, device="cpu", mesh=mesh, progress=False
    )
    dist.broadcast_object_list(profiles)
    return [Setting(case, each, model_desc, found) for each, found in zip(trainings, profiles, strict=True)]


def live_mesh() -> DeviceMesh:
    """The 1-D mesh of the live process group."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def on_routes_of(device: DeviceInfo, plan: Plan) -> Plan:
    """The plan on its own routes where there are links for them, else on those that were the fastest here."""
    groups = shard_groups_of(device)
    whole, known = groups[0].route, {group.route for group in groups if not group.group_size}

    def route(unit: Unit) -> Route:
        if unit.mode is Mode.NO_SHARD or unit.group_size or unit.route in known:
            return unit.route
        if unit.mode is Mode.SHARD_OPTIMIZER:
            # Nothing is gathered by messages, and whatever is exchanged can be reduced by all.
            by_exchange = unit.route.by_exchange and any(each.by_exchange for each in known)
            return Route.EXCHANGE if by_exchange else Route.FLAT
        return whole

    return plan.with_sharding(units=tuple(replace(unit, route=route(unit)) for unit in plan.units))
