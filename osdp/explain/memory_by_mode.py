"""Memory of plans that treat all operators alike, by mode and batch: what a model takes before any search."""

import math
from collections.abc import Sequence
from dataclasses import replace

from osdp.cost.sharding.problem import build_problem
from osdp.errors import InfeasibleError
from osdp.explain.step_memory import memory_timeline
from osdp.explain.what_if import profile_for_batch, search_again
from osdp.plan.basis import Basis
from osdp.plan.explanation import MemoryRow
from osdp.plan.plan import Plan
from osdp.plan.search_options import SLICES, SearchOptions
from osdp.plan.sharding import Mode
from osdp.search.sharding.solve import min_peak

#: Modes of the table, those that take most memory first.
MODES = (Mode.NO_SHARD, Mode.SHARD_OPTIMIZER, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)


def memory_by_mode(basis: Basis, batches: Sequence[int] = ()) -> list[MemoryRow]:
    """The memory of a step with all operators in one mode, and of the plan that takes least.

    Args:
        basis: Model, devices, training and profile.
        batches: Local batches; by default the profile's own.

    Raises:
        ValueError: The model does not accept a batch.
    """
    rows = []
    for batch in batches or [profile.local_batch for profile in basis.profiles]:
        nearest = min(basis.profiles, key=lambda profile: abs(profile.local_batch - batch))
        profile = profile_for_batch(nearest, basis, basis.trainings[0], batch)
        training = replace(basis.trainings[0], local_batch=batch)
        there = replace(basis, trainings=(training,), profiles=(profile,))
        limit = basis.device.memory_limit
        for mode in MODES if basis.device.world_size > 1 else MODES[:1]:
            plan = _in_mode(there, mode)
            peak = memory_timeline(plan).peak
            nbytes = plan.predicted.peak_bytes
            rows.append(
                MemoryRow(mode.value, batch, plan.predicted.step_seconds, peak, nbytes, nbytes <= limit)
            )
        least = _least(there)
        # Where host memory can be used, a plan may take less.
        offloads = basis.device.host is not None and profile.host_optimizer is not None
        name = "least without offloading" if offloads else "least of any plan"
        rows.append(MemoryRow(name, batch, None, None, least, least <= limit))
    return rows


def _in_mode(basis: Basis, mode: Mode) -> Plan:
    """The fastest plan in one mode that fits, or else the one that takes least."""
    try:
        return search_again(replace(basis, options=SearchOptions(allowed=(mode,))))
    except InfeasibleError as error:
        lowest: Plan | None = error.lowest
        if lowest is None:
            raise
        return lowest


def _least(basis: Basis) -> int:
    """The lowest peak of any plan: everything sharded, sliced and recomputed where that saves memory."""
    training, profile = basis.trainings[0], basis.profiles[0]
    problem = build_problem(basis.model_desc, profile, basis.device, training)
    return math.ceil(min_peak(problem, options=SearchOptions(slices=SLICES, recompute=True)))
