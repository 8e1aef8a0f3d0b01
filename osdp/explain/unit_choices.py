"""Alternatives of each unit of a plan: what they would cost, and what would have to change for them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from osdp.cost.sharding.problem import RootUnitCost
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import solution_root
from osdp.cost.sharding.time import HOST
from osdp.explain.rebuild import Rebuilt, rebuild, rebuild_with, rebuild_with_links
from osdp.explain.scaling import (
    device_with_faster_links,
    profile_at_batch,
    profile_with_faster_compute,
    profile_with_faster_host,
)
from osdp.hardware.device_info import DeviceInfo
from osdp.plan.basis import Basis
from osdp.plan.choices import choice_of
from osdp.plan.explanation import Alternative, PlanExplanation, UnitExplanation
from osdp.plan.plan import Plan
from osdp.plan.sharding import Unit
from osdp.search.sharding.explain import Explainer, UnitTuples
from osdp.text import format_bytes, format_seconds

#: Factors of bandwidth and batch at which a choice is tried again.
_FACTORS = (1 / 16, 1 / 4, 1 / 2, 2.0, 4.0, 16.0)
_BATCHES = (1 / 4, 1 / 2, 2.0, 4.0)

#: Relative difference of step times below which a choice counts as no better.
_ALIKE = 1e-4


def explain(plan: Plan, unit: str | None = None) -> PlanExplanation:
    """Why a plan is as it is: what each unit's other choices would cost, and when they would be better.

    Args:
        plan: A plan of a model that is not cut into stages.
        unit: Name of an operator or a module: only units that contain it; all if ``None``.

    Raises:
        ValueError: The plan does not contain what it was searched from, or no unit has that name.
    """
    rebuilt = rebuild(plan)
    wanted = [index for index, each in enumerate(plan.units) if _has(each.operators, each.modules, unit)]
    if not wanted:
        names = ", ".join(dict.fromkeys(name for each in plan.units for name in each.operators))
        raise ValueError(f"no unit of the plan contains {unit!r}; its operators are {names}")
    settings = _settings(rebuilt)
    explainer = Explainer(rebuilt.problem, rebuilt.solution, rebuilt.basis.options)
    places = _places(rebuilt)
    known: dict[object, tuple[Alternative, ...]] = {}
    units = []
    for index in wanted:
        each, at = plan.units[index], places.get(index)
        key: object = index if at is None else explainer.key_of(at)
        if key not in known and at is None:
            known[key] = _outside_chain(rebuilt, explainer, each)
        elif at is not None and key not in known:
            known[key] = _alternatives(rebuilt, explainer.alternatives(at), settings)
        nbytes = sum(plan.sharding.by_operator[name].nbytes for name in each.operators)
        modules = each.operators if each.root else each.modules
        choice = choice_of(plan.sharding, each) + (" (root unit)" if each.root else "")
        units.append(UnitExplanation(modules, each.operators, nbytes, choice, known[key]))
    outcome, gains = rebuilt.solution.outcome, _gains(rebuilt)
    return PlanExplanation(
        step_seconds=outcome.seconds,
        peak_bytes=math.ceil(outcome.peak),
        memory_limit=plan.memory_limit,
        limits=_limits(rebuilt, gains),
        compute_gain=gains.compute,
        links_gain=gains.links,
        optimizer_gain=gains.optimizer,
        units=tuple(units),
        host_gain=gains.host if _waits_for_host(rebuilt) else None,
    )


def _has(operators: Sequence[str], modules: Sequence[str], name: str | None) -> bool:
    return name is None or any(
        name == each or each.startswith(f"{name}.") or (module and f"{name}.".startswith(f"{module}."))
        for each in operators
        for module in (*modules, "")
    )


def _places(rebuilt: Rebuilt) -> dict[int, int]:
    """Index of the chain's unit for each of the plan's units that is in the chain."""
    chain, units = rebuilt.problem.timeline.chain, rebuilt.plan.units
    owner = {name: index for index, unit in enumerate(units) for name in unit.operators}
    found: dict[int, int] = {}
    for at, (start, _, _) in enumerate(rebuilt.solution.units):
        found.setdefault(owner[chain[start].name], at)
    return found


def _outside_chain(rebuilt: Rebuilt, explainer: Explainer, unit: Unit) -> tuple[Alternative, ...]:
    """The other choice for the largest operator of a unit outside the chain."""
    outside = [operator for operator in rebuilt.problem.timeline.root if operator.name in unit.operators]
    largest = max(outside, key=lambda operator: operator.nbytes)
    limit = rebuilt.plan.memory_limit
    return tuple(
        Alternative(name, outcome.seconds, math.ceil(outcome.peak), outcome.peak <= limit)
        for name, outcome in explainer.alternatives_outside(largest)
    )


def _alternatives(
    rebuilt: Rebuilt, others: Sequence[tuple[str, UnitTuples, StepEstimate]], settings: Sequence["_Setting"]
) -> tuple[Alternative, ...]:
    chosen, limit = rebuilt.solution.outcome, rebuilt.plan.memory_limit
    found = []
    for name, units, outcome in others:
        fits = outcome.peak <= limit
        better = list(_chosen_if(units, outcome, chosen, limit, settings)) if fits else []
        if not fits and outcome.seconds < chosen.seconds:
            better = [f"a limit of {format_bytes(outcome.peak)} or more"]
        faster = _why_not(rebuilt.plan, outcome, chosen) if fits else ""
        found.append(Alternative(name, outcome.seconds, math.ceil(outcome.peak), fits, tuple(better), faster))
    return tuple(sorted(found, key=lambda each: (not each.fits, each.step_seconds)))


def _why_not(plan: Plan, outcome: StepEstimate, chosen: StepEstimate) -> str:
    """Why a faster choice that fits was not taken; empty if it is not faster."""
    gain = 1 - outcome.seconds / chosen.seconds
    if gain <= 0:
        return ""
    # The simpler plan is taken where the times are not sure enough to tell them apart.
    is_tie = gain <= max(plan.predicted.spread, _ALIKE)
    return "a tie" if is_tie else "faster, which the search did not consider or find"


@dataclass(frozen=True)
class _Setting:
    """Another setting: its kind, its words, and the problem under it."""

    kind: str
    words: str
    rebuilt: Rebuilt

    @cached_property
    def root(self) -> RootUnitCost:
        """Costs of the operators outside the chain, the same for all units."""
        return solution_root(self.rebuilt.problem, self.rebuilt.solution)

    def prefers(self, units: UnitTuples, limit: int) -> bool:
        """Whether these units are faster than the plan's under this setting, and fit."""
        solution = self.rebuilt.solution
        outcome = simulate_units(self.rebuilt.problem, units, self.root)
        faster = outcome.seconds < solution.outcome.seconds * (1 - _ALIKE)
        return outcome.peak <= limit and (faster or solution.outcome.peak > limit)


def _chosen_if(
    units: UnitTuples,
    outcome: StepEstimate,
    chosen: StepEstimate,
    limit: int,
    settings: Sequence[_Setting],
) -> Iterator[str]:
    """Settings under which another choice that fits would be better; the nearest of each kind."""
    if format_bytes(outcome.peak) != format_bytes(chosen.peak) and outcome.peak < chosen.peak:
        yield f"a limit below {format_bytes(chosen.peak)}"
    seen: set[str] = set()
    for setting in settings:
        if setting.kind not in seen and setting.prefers(units, limit):
            seen.add(setting.kind)
            yield setting.words


def _settings(rebuilt: Rebuilt) -> list[_Setting]:
    """The plan under other bandwidths and batches, those nearest to its own first."""
    basis, plan = rebuilt.basis, rebuilt.plan
    found = []
    if basis.device.world_size > 1:
        for factor in sorted(_FACTORS, key=lambda each: abs(math.log(each))):
            words = f"{factor:g} times the bandwidth" if factor > 1 else f"1/{1 / factor:g} of the bandwidth"
            device = _with_bandwidths(basis.device, factor)
            found.append(_Setting("bandwidth", words, rebuild_with_links(rebuilt, device)))
    if basis.model_desc.batch_is_free:
        for factor in sorted(_BATCHES, key=lambda each: abs(math.log(each))):
            batch = plan.local_batch * factor
            if batch >= 1 and batch == int(batch):
                words = f"a local batch of {batch:g}"
                found.append(_Setting("batch", words, _at_batch(plan, basis, int(batch))))
    return found


def _at_batch(plan: Plan, basis: Basis, local_batch: int) -> Rebuilt:
    profile = profile_at_batch(basis.profile_at(plan.local_batch), basis.model_desc, local_batch)
    training = replace(plan.training, local_batch=local_batch)
    changed = replace(basis, trainings=(training,), profiles=(profile,))
    return rebuild_with(replace(plan, training=training), changed)


def _with_bandwidths(device: DeviceInfo, factor: float) -> DeviceInfo:
    links = tuple(replace(link, bandwidth=factor * link.bandwidth) for link in device.links)
    return replace(device, links=links)


def limits_of(plan: Plan) -> str:
    """What keeps a plan from being faster, in a sentence.

    Raises:
        ValueError: The plan does not contain what it was searched from.
    """
    rebuilt = rebuild(plan)
    return _limits(rebuilt, _gains(rebuilt))


@dataclass(frozen=True, slots=True)
class _Gains:
    """Relative throughput that a plan gains if one part of its step is twice as fast.

    Shares of a step would mislead: compute that hides collectives takes long, and gains nothing.
    """

    compute: float
    links: float
    optimizer: float
    host: float


def _gains(rebuilt: Rebuilt) -> _Gains:
    basis, outcome = rebuilt.basis, rebuilt.solution.outcome

    def gain(faster: Rebuilt) -> float:
        return outcome.seconds / faster.solution.outcome.seconds - 1

    profiles = tuple(profile_with_faster_compute(profile, 2) for profile in basis.profiles)
    issued = tuple(profile_with_faster_host(profile, 2) for profile in basis.profiles)
    return _Gains(
        host=gain(rebuild_with(rebuilt.plan, replace(basis, profiles=issued))),
        compute=gain(rebuild_with(rebuilt.plan, replace(basis, profiles=profiles))),
        links=gain(rebuild_with_links(rebuilt, device_with_faster_links(basis.device, 2))),
        optimizer=1 / (1 - outcome.optimizer_seconds / outcome.seconds / 2) - 1,
    )


def _waits_for_host(rebuilt: Rebuilt) -> bool:
    """Whether the host takes longest to issue one of the passes that the step has."""
    cut, settings = rebuilt.solution.outcome.cut, rebuilt.problem.settings
    accumulates = settings.microbatches > settings.reductions
    return HOST in (cut.forward, cut.backward) or (accumulates and cut.silent == HOST)


def _limits(rebuilt: Rebuilt, gains: _Gains) -> str:
    plan, outcome = rebuilt.plan, rebuilt.solution.outcome
    compute = outcome.compute_seconds + outcome.optimizer_seconds
    waiting = max(outcome.seconds - compute, 0.0)
    free = plan.memory_limit - outcome.peak
    parts = {"compute": gains.compute, "communication": gains.links, "the optimizer": gains.optimizer}
    waits_for = "communication"
    if _waits_for_host(rebuilt):
        parts["the host, which issues kernels"] = gains.host
        waits_for = "the host" if plan.world_size == 1 else "communication and the host"
    if plan.world_size == 1:
        del parts["communication"]
    first, *others = sorted(parts, key=lambda name: -parts[name])
    rest = ", ".join(f"{name} twice as fast {parts[name]:.0%}" for name in others)
    return (
        f"{first}: if it were twice as fast, there would be {parts[first]:.0%} more throughput ({rest}); of "
        f"a step compute and the optimizer take {compute / outcome.seconds:.0%}, waiting for {waits_for} "
        f"{format_seconds(waiting)} ({waiting / outcome.seconds:.0%}); {format_bytes(max(free, 0))} of the "
        "limit are free at the peak"
    )
