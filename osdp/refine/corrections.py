"""What a plan was searched from, corrected by what was measured of its steps.

Each figure is corrected by what shows it alone:

=====================  =====================================================================================
another batch          profile and memory grow as the traced work does
compute                by stretch of the trace, forward and backward apart
links                  by the collectives of sharded units, each of which is timed where it runs alone
all-reduces            run beside backward: they are as slow as makes the whole backward take what it took
optimizer              by its step
memory                 of opaque modules, where more was alive than when they were traced; never less. Of
                       activations that were taken by an upper end, where a forward left fewer alive
=====================  =====================================================================================
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from osdp.cost.evaluate import solution_of
from osdp.cost.sharding.problem import ShardingProblem, build_problem, with_links
from osdp.cost.sharding.solution import ShardingSolution, solution_costs
from osdp.cost.sharding.time import optimizer_time, passes
from osdp.explain.scaling import profile_at_batch
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.refine.link_times import LinkKey, key_of, with_measured_links
from osdp.refine.measurement import StepMeasurement, StretchTime
from osdp.refine.segment_profiles import with_counted_activations, with_measured_memory, with_measured_times
from osdp.refine.stretches import end_of_model

#: Relative error of a backward from which its all-reduces are said to be of another speed.
_CLOSE = 0.005
#: Powers of two that all-reduces may be slower, or faster, than was thought: that they are slow is seen, that
#: they are fast only where nothing else was in the backward. Where other collectives were timed, which share
#: the network, no more than so many from what these say.
_SLOWER, _FASTER, _BESIDE_OTHERS = 10.0, 4.0, 1.0
#: Halvings of an interval, enough for any float that matters here.
_HALVINGS = 40
_ALL_REDUCE = ("all_reduce", "world")


@dataclass(frozen=True)
class Corrected:
    """A basis as a measurement shows it.

    Attributes:
        basis: With one training and one profile: those that were measured.
        known_links: The links that have been measured in training.
    """

    basis: Basis
    known_links: frozenset[LinkKey] = frozenset()

    @property
    def profile(self) -> Profile:
        """The corrected profile."""
        return self.basis.profiles[0]

    @property
    def device(self) -> DeviceInfo:
        """The corrected devices."""
        return self.basis.device


def corrected(
    plan: Plan, basis: Basis, measured: StepMeasurement, known_links: Collection[LinkKey] = ()
) -> Corrected:
    """``basis`` such that the predicted step of ``plan`` is the measured one, as far as it can be told.

    Args:
        plan: The plan that ran.
        basis: What it, or what an earlier correction, was searched from.
        measured: What its steps took.
        known_links: Links that were measured in training before.

    Raises:
        ValueError: The model takes no batch but the one that it was described with.
    """
    training = replace(plan.training, local_batch=measured.local_batch, microbatches=measured.microbatches)
    # An earlier correction may have been of another batch than the plan's.
    before = basis.profile_near(measured.local_batch)
    profile = profile_at_batch(before, basis.model_desc, measured.local_batch)
    times = (_in_profile(each, basis, profile, measured) for each in (measured.forward, measured.backward))
    profile = with_measured_times(profile, basis.model_desc, plan.sharding.recomputed, *times)
    if leaves_activations_alone(plan, basis.model_desc):
        profile = with_counted_activations(profile, basis.model_desc, measured.kept, measured.returned)
    profile = with_measured_memory(profile, basis.model_desc, measured.opaque)
    found = replace(basis, trainings=(training,), profiles=(profile,))
    device, known = with_measured_links(basis.device, measured.collectives, known_links)
    device, known = _with_all_reduces(plan, replace(found, device=device), measured, known)
    found = replace(found, device=device)
    profile = _with_optimizer(plan, found, measured.optimizer_seconds)
    return Corrected(replace(found, profiles=(profile,)), known)


def leaves_activations_alone(plan: Plan, model_desc: ModelDesc) -> bool:
    """Whether a forward leaves all traced activations, and but for what it returns nothing else, alive."""
    sharding = plan.sharding
    whole = all(not each.mode.sharded and each.slices == 1 for each in sharding.decisions)
    as_traced = not sharding.recomputed and plan.training.param_dtype is None and not model_desc.opaque
    return whole and as_traced


def problem_of(
    plan: Plan, basis: Basis, *, reduces_each: bool | None = None
) -> tuple[ShardingProblem, ShardingSolution]:
    """The step of ``plan`` under the only training of ``basis``, which may differ from its own.

    Args:
        plan: The plan.
        basis: What it runs on.
        reduces_each: Whether every backward reduces its gradients; as the plan says if ``None``.
    """
    problem = build_problem(
        basis.model_desc,
        basis.profiles[0],
        basis.device,
        basis.trainings[0],
        reduce_each=plan.reduce_each_microbatch if reduces_each is None else reduces_each,
    )
    return solution_of(problem, plan.sharding)


def _in_profile(
    times: Sequence[StretchTime], basis: Basis, profile: Profile, measured: StepMeasurement
) -> list[StretchTime]:
    """Times of one microbatch, in the seconds that the profile counts."""
    ranks = basis.device.ranks_per_core
    # Measured profiles count seconds of a core that a rank has to itself, estimated ones those that pass.
    counted = (ranks if measured.in_cpu_time else 1) / (ranks if profile.measured else 1)
    return [StretchTime(each.modules, each.seconds * counted / measured.microbatches) for each in times]


def _with_all_reduces(
    plan: Plan, basis: Basis, measured: StepMeasurement, known: frozenset[LinkKey]
) -> tuple[DeviceInfo, frozenset[LinkKey]]:
    device = basis.device
    replicates = any(not decision.mode.sharded and decision.nbytes for decision in plan.sharding.decisions)
    if device.world_size == 1 or not replicates or not measured.backward_seconds:
        return device, known
    problem, found = problem_of(plan, basis, reduces_each=measured.reduces_each)

    def slower(factor: float) -> DeviceInfo:
        return replace(
            device,
            links=tuple(
                replace(link, latency=factor * link.latency, bandwidth=link.bandwidth / factor)
                if key_of(link) == _ALL_REDUCE or key_of(link) not in known
                else link
                for link in device.links
            ),
        )

    def backward(power: float) -> float:
        return _backward_seconds(with_links(problem, slower(2.0**power)), found)

    # Steps are timed from the gradient of the model's output on: the backward of a loss outside comes before.
    desc, profile = basis.model_desc, basis.profiles[0]
    loss = sum(profile.of(segment).backward.seconds for segment in desc.segments[end_of_model(desc) :])
    loss *= measured.microbatches * (device.ranks_per_core if profile.measured else 1)
    within = (_BESIDE_OTHERS, _BESIDE_OTHERS) if measured.collectives else (_SLOWER, _FASTER)
    power, is_told = _meet(backward, measured.backward_seconds + loss, *within)
    # What was not told is scaled with other links once these are measured.
    return slower(2.0**power), known | {_ALL_REDUCE} if is_told else known


def _backward_seconds(problem: ShardingProblem, found: ShardingSolution) -> float:
    """All backwards of a step."""
    seconds, settings = passes(problem, *solution_costs(problem, found)), problem.settings
    silent = settings.microbatches - settings.reductions
    return settings.reductions * seconds.reducing + silent * seconds.silent


def _meet(rising: Callable[[float], float], goal: float, slower: float, faster: float) -> tuple[float, bool]:
    """The power at which ``rising`` is ``goal``, and whether that was told.

    It is 0 if it is near by, and the nearest to 0 where it is flat. Also 0 if it does not rise that far,
    which tells nothing: what took so long was something else, such as other programs.

    Args:
        rising: A function that rises.
        goal: Its value.
        slower: The largest power.
        faster: The smallest, negated.
    """
    at_zero = rising(0.0)
    if abs(at_zero - goal) <= _CLOSE * goal:
        return 0.0, True
    if rising(slower) < goal:
        return 0.0, False
    low, high = (0.0, slower) if at_zero < goal else (-faster, 0.0)
    # What compute hides altogether may be any faster: not to be told by more than that it is hidden.
    goal = max(goal, rising(low) * (1 + _CLOSE))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return (low + high) / 2, True


def _with_optimizer(plan: Plan, basis: Basis, seconds: float) -> Profile:
    profile = basis.profiles[0]
    if not seconds:
        return profile
    predicted = _optimizer_seconds(plan, basis)
    # Updated shards are gathered in the same time, whatever the step takes.
    free = replace(profile, optimizer=profile.optimizer.scaled(0.0))
    own = predicted - _optimizer_seconds(plan, replace(basis, profiles=(free,)))
    return replace(profile, optimizer=profile.optimizer.scaled(seconds / own)) if own > 0 else profile


def _optimizer_seconds(plan: Plan, basis: Basis) -> float:
    problem, found = problem_of(plan, basis)
    return optimizer_time(problem, *solution_costs(problem, found))
