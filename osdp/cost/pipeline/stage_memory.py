"""Memory required by a pipeline stage, derived from the simulation of its step alone."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from osdp.arrays import Floats
from osdp.cost.pipeline.memory import StageMemory
from osdp.cost.sharding.memory import always, lasting_gradients, root_always
from osdp.cost.sharding.problem import ShardingProblem, build_problem
from osdp.cost.sharding.simulate import simulate_step
from osdp.cost.sharding.solution import ShardingSolution, solution_costs
from osdp.cost.sharding.strategies import UnitMode, UnitSpan
from osdp.cost.sharding.timeline import Timeline
from osdp.hardware.profile import Profile
from osdp.model.dataflow import Dataflow, Transfer
from osdp.model.description import DTYPE_BYTES, ModelDesc
from osdp.model.fqn import is_inside

_FORWARD = ("forward", "unshard")


@dataclass(frozen=True, slots=True)
class StageMessages:
    """Bytes that a stage exchanges with other stages per microbatch.

    Attributes:
        received: Activations from stages of other ranks.
        sent: Gradients that come back for the outputs it sent.
        returned: Gradients that go back to other ranks.
        splits: Whether gradients go back to any stage.
        recreated: Activations that it recreates in the code around its modules; not exchanged, but also held
            per microbatch.
    """

    received: int = 0
    sent: int = 0
    returned: int = 0
    splits: bool = False
    recreated: float = 0.0


def messages_of(
    stage: int, transfers: Sequence[Transfer], placement: Sequence[int], flow: Dataflow, local_batch: int
) -> StageMessages:
    """Bytes that stage ``stage`` exchanges; between stages of one rank nothing is copied."""

    def nbytes(found: Sequence[Transfer]) -> int:
        return sum(flow.values[transfer.value].nbytes(local_batch) for transfer in found)

    coming = [t for t in transfers if t.target == stage]
    from_others = [t for t in coming if placement[t.source] != placement[stage]]
    return StageMessages(
        received=nbytes(from_others),
        sent=nbytes([t for t in transfers if t.source == stage and t.differentiable]),
        returned=nbytes([t for t in from_others if t.differentiable]),
        splits=any(t.differentiable for t in coming),
    )


def recreated_bytes(desc: ModelDesc, profile: Profile, flow: Dataflow, movable: Collection[str]) -> float:
    """Activation bytes that a later stage recreates around its modules, and that none of its segments counts.

    Every stage computes masks and the like itself. Moreover, tensors that the code around the modules
    allocates in the first stage and frees at its end appear in the profile of the last stage as freed only.
    """
    around = [s for s in desc.segments if not any(is_inside(s.module, module) for module in movable)]
    freed = sum(max(-profile.of(s).forward.live_bytes, 0) for s in around)
    return flow.remade(profile.local_batch) + freed


def without_shared(
    memories: Sequence[StageMemory], shared: Sequence[tuple[int, int]], states: int
) -> list[StageMemory]:
    """The memory of the stages with each parameter that a rank holds for several of them counted once.

    Args:
        memories: Memory of each stage.
        shared: Each such parameter as a pair: a stage that shares it with an earlier one, and its bytes.
        states: Number of optimizer states of a parameter's size.
    """
    found = list(memories)
    for stage, nbytes in shared:
        memory = found[stage]
        found[stage] = replace(
            memory, base=memory.base - (1 + states) * nbytes, gradients=memory.gradients - nbytes,
            step=memory.step - (2 + states) * nbytes,
        )  # fmt: skip
    return found


def captured_bytes(desc: ModelDesc, local_batch: int) -> int:
    """Gradients that a split backward keeps: those of the outputs of all segments with parameters; bytes."""
    return math.ceil(float(_captured(desc, local_batch).sum()))


def _captured(desc: ModelDesc, local_batch: int) -> Floats:
    """Gradient bytes that a split backward keeps, by segment."""
    found = [
        sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in segment.outputs)
        if segment.operators
        else 0
        for segment in desc.segments
    ]
    return np.array(found) * (local_batch / desc.local_batch)


def _freed_first(desc: ModelDesc, profile: Profile) -> float:
    """Activations of the loss that the first part of a backward frees: its input, and what it made."""
    last = max((index for index, segment in enumerate(desc.segments) if segment.operators), default=0)
    handed, *after = (profile.of(s).forward.live_bytes for s in desc.segments[last:])
    scale = profile.local_batch / desc.local_batch
    output = scale * sum(math.prod(o.shape) * DTYPE_BYTES[o.dtype] for o in desc.segments[last].outputs)
    return max(min(handed, output), 0.0) + sum(max(nbytes, 0) for nbytes in after)


def _input_pass(desc: ModelDesc, profile: Profile, timeline: Timeline) -> float:
    """Most bytes that the first part of a backward needs beyond the activations; it frees none of them."""
    lives = np.array([profile.of(s).forward.live_bytes for s in desc.segments])
    before = np.cumsum(lives) - np.maximum(lives, 0)
    captured = np.cumsum(_captured(desc, profile.local_batch)[::-1])[::-1]
    return float(np.max(timeline.backward_high - before + captured, initial=0.0))


def stage_memory(
    desc: ModelDesc,
    profile: Profile,
    problem: ShardingProblem,
    found: ShardingSolution,
    messages: StageMessages,
) -> StageMemory:
    """Memory of a stage whose ``problem`` has the solution ``found`` and that exchanges ``messages``."""
    # 1. Simulate the step with one microbatch and with two: they differ by the gradients that an earlier
    #    backward leaves. Resident bytes belong to the rank, not to the stage.
    without_resident = replace(profile, resident_bytes=0)
    training = problem.training
    if problem.device.world_size == 1 and training.param_dtype is None and training.reduce_dtype is None:
        found = _split_replicated(found)
    one, two = (
        replace(
            build_problem(desc, without_resident, problem.device, training, reduce_each=False),
            root_group=problem.root_group,
        )
        for training in (replace(problem.training, microbatches=number) for number in (1, 2))
    )
    first, later = _peaks(one, found), _peaks(two, found)
    gradients = later["always"] - first["always"]
    # 2. What recomputation drops, and what a split backward captures.
    timeline, (units, _) = one.timeline, solution_costs(one, found)
    dropped = timeline.recompute.saving[units.start[units.recomputed]].sum()
    captured = captured_bytes(desc, profile.local_batch)
    return StageMemory(
        base=first["always"],
        gradients=gradients,
        kept=timeline.kept - float(dropped) + messages.recreated,
        forward=first["forward"] - first["always"] + messages.recreated,
        first_backward=first["backward"] - first["always"] + messages.recreated,
        backward=later["backward"] - later["always"] + messages.recreated,
        step=first["step"],
        cast=max(later["cast"] - later["always"], 0.0),
        growth=later["left"] - gradients,
        received=messages.received,
        sent=messages.sent,
        returned=messages.returned,
        captured=captured - (0 if messages.sent else _freed_first(desc, profile)),
        input_pass=_input_pass(desc, profile, timeline),
        largest_gradient=max((operator.nbytes for operator in desc.operators), default=0),
        splits=messages.splits,
        temporaries_add=one.costs.temporaries_add,
    )


def _split_replicated(found: ShardingSolution) -> ShardingSolution:
    """The solution with replicated units split into single operators.

    On a single rank no bucket is reduced, so gradients are allocated one by one.
    """
    units: list[UnitSpan] = []
    for start, stop, strategy in found.units:
        if strategy.mode == UnitMode.NO_SHARD:
            units += [(k, k + 1, strategy) for k in range(start, stop)]
        else:
            units.append((start, stop, strategy))
    return replace(found, units=tuple(units))


def _peaks(problem: ShardingProblem, found: ShardingSolution) -> dict[str, float]:
    """Peak bytes by pass; as ``always`` those alive throughout, as ``left`` the gradients of the last."""
    units, root = solution_costs(problem, found)
    peaks = {"forward": 0.0, "backward": 0.0, "step": 0.0, "cast": 0.0}
    for nbytes, moment in simulate_step(problem, units, root).moments:
        # All other kinds of moments are in backward.
        phase = "forward" if moment.kind in _FORWARD else moment.kind if moment.kind in peaks else "backward"
        peaks[phase] = max(peaks[phase], nbytes)
    own = always(units, problem, lasting_gradients(units, problem))
    left = float(units.gradient_kept.sum()) + root.gradient_kept
    return peaks | {"always": root_always(problem, root) + float(own.sum()), "left": left}
