"""A plan searched again under another setting, from the same measurements."""

import math
from dataclasses import replace

from osdp.explain.rebuild import basis_of
from osdp.explain.scaling import (
    device_with_bandwidth,
    device_with_ranks,
    profile_at_batch,
    profile_with_copies,
    profile_with_optimizer,
    profile_without_neighbours,
)
from osdp.hardware.profile import Profile
from osdp.model.training import MATRIX_OPTIMIZERS, Training
from osdp.plan.basis import Basis
from osdp.plan.plan import NOT_MEASURED, Plan
from osdp.profiler.roofline import estimate
from osdp.search.sharding.planner import Candidate, best_plan
from osdp.text import parse_bytes


def what_if(
    plan: Plan,
    *,
    memory_limit: str | int | None = None,
    bandwidth: float | None = None,
    local_batch: int | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
    optimizer: str | None = None,
) -> Plan:
    """The best plan under other settings, from what ``plan`` was searched from; nothing is measured.

    Times of another batch grow as the traced work does, those of another network or number of ranks as
    collectives of a ring do. A note of the plan says what was not measured.

    Args:
        plan: A plan of a model that is not cut into stages.
        memory_limit: Bytes per device, or text such as ``"6GiB"``.
        bandwidth: Bytes per second of the network between nodes (of one node: between ranks), one way.
        local_batch: Samples of a microbatch on one rank.
        microbatches: Microbatches of a step.
        ranks: Number of data-parallel ranks.
        optimizer: A class of ``torch.optim``, with its default options.

    Raises:
        InfeasibleError: No plan fits.
        ValueError: A setting cannot be planned for without measuring; or the plan does not contain what it
            was searched from.
    """
    basis = basis_of(plan)
    if local_batch is not None or microbatches is not None:
        # What is not asked about stays, also where the plan was the best of several batches.
        basis = replace(basis, trainings=(plan.training,))
    basis, estimated = changed_basis(
        basis,
        memory_limit=memory_limit,
        bandwidth=bandwidth,
        local_batch=local_batch,
        microbatches=microbatches,
        ranks=ranks,
        optimizer=optimizer,
    )
    found = search_again(basis)
    notes = [note for note in plan.notes if note.startswith(NOT_MEASURED)]
    if estimated:
        notes.append(f"{NOT_MEASURED}{'; '.join(estimated)}")
    if found.global_batch != plan.global_batch and local_batch is None and microbatches is None:
        notes.append(f"a step has {found.global_batch} samples, not {plan.global_batch}")
    return replace(found, notes=(*found.notes, *notes))


def changed_basis(
    basis: Basis,
    *,
    memory_limit: str | int | None = None,
    bandwidth: float | None = None,
    local_batch: int | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
    optimizer: str | None = None,
) -> tuple[Basis, list[str]]:
    """A basis with the changes of :func:`what_if`, and what of it was not measured, in words.

    Raises:
        ValueError: As there.
    """
    counts = {"local_batch": local_batch, "microbatches": microbatches, "ranks": ranks}
    wrong = [f"{name}={value}" for name, value in counts.items() if value is not None and value < 1]
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        wrong.append(f"bandwidth={bandwidth}")
    if wrong:
        raise ValueError(f"there are no plans for {', '.join(wrong)}: these must be positive")
    estimated: list[str] = []
    device, trainings, profiles = basis.device, basis.trainings, basis.profiles
    if memory_limit is not None:
        device = replace(device, memory_limit=parse_bytes(memory_limit))
    if local_batch is not None:
        nearest = min(profiles, key=lambda profile: abs(profile.local_batch - local_batch))
        profiles = (profile_for_batch(nearest, basis, trainings[0], local_batch),)
        trainings = tuple(dict.fromkeys(replace(each, local_batch=local_batch) for each in trainings))
        if nearest.local_batch != local_batch and nearest.measured:
            estimated.append(f"times and bytes at batch {local_batch}, from those at {nearest.local_batch}")
    if ranks is not None and ranks != device.world_size:
        device = device_with_ranks(device, ranks)
        if basis.options.needs_groups and not device.group_sizes:
            raise ValueError(
                f"the plan is to shard in groups, which {ranks} ranks do not have: ask for several nodes, or "
                "plan without strategy= and two_step="
            )
        estimated.append(f"links of {ranks} ranks" if ranks > 1 else "a step without collectives")
        copies = basis.device.copy_bandwidth / device.copy_bandwidth
        if copies != 1:
            profiles = tuple(profile_with_copies(profile, copies) for profile in profiles)
            estimated.append("the optimizer's step with the memory's bandwidth shared by fewer ranks")
        if device.kind == "cpu" and device.devices_per_node == 1 < basis.device.devices_per_node:
            profiles = tuple(profile_without_neighbours(each) if each.measured else each for each in profiles)
            estimated.append("forward and backward of a rank that has its machine for itself")
    if bandwidth is not None:
        device = device_with_bandwidth(device, bandwidth)
        estimated.append(f"links of a network of {bandwidth * 8 / 1e9:g} Gbit/s")
    if microbatches is not None:
        trainings = tuple(dict.fromkeys(replace(each, microbatches=microbatches) for each in trainings))
    if optimizer is not None:
        before = trainings[0]
        trainings = tuple(dict.fromkeys(_with_optimizer(each, optimizer) for each in trainings))
        profiles = tuple(
            profile_with_optimizer(profile, before, trainings[0], device.kind) for profile in profiles
        )
        if trainings[0] != before:
            estimated.append(f"the step of {optimizer}, from that of {before.optimizers}")
    return replace(basis, device=device, trainings=trainings, profiles=profiles), estimated


def profile_for_batch(profile: Profile, basis: Basis, training: Training, local_batch: int) -> Profile:
    """A profile at another batch; one that says no more than the roofline does, from the roofline."""
    device = basis.device
    can_estimate = not profile.measured and device.flops > 0 and device.memory_bandwidth > 0
    if can_estimate and profile.local_batch != local_batch:
        at = replace(training, local_batch=profile.local_batch)
        if profile == estimate(basis.model_desc, device, at):
            return estimate(basis.model_desc, device, replace(training, local_batch=local_batch))
    return profile_at_batch(profile, basis.model_desc, local_batch)


def search_again(basis: Basis) -> Plan:
    """The best plan of a basis.

    Raises:
        InfeasibleError: No plan fits.
    """
    return best_plan(basis.model_desc, candidates_of(basis), basis.device, basis.options)


def candidates_of(basis: Basis) -> list[Candidate]:
    """The batches that a basis chooses from."""
    return [Candidate(training, basis.profile_at(training.local_batch or 1)) for training in basis.trainings]


def _with_optimizer(training: Training, optimizer: str) -> Training:
    if optimizer in MATRIX_OPTIMIZERS:
        if training.matrix_optimizer is None:
            raise ValueError(
                f"how long {optimizer} takes for whole matrices was not measured; plan again with "
                f"training=Training(matrix_optimizer={optimizer!r})"
            )
        return training
    return Training(
        optimizer=optimizer,
        param_dtype=training.param_dtype,
        reduce_dtype=training.reduce_dtype,
        local_batch=training.local_batch,
        microbatches=training.microbatches,
    )
