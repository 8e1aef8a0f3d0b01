"""From a model, its profiles and the devices to the best Plan: batch, modes, units, the reason of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from osdp.cost.judge import Outcome, judge, judge_choice
from osdp.cost.prices import MODES, ROOT
from osdp.cost.situation import Situation, build_situation, price_root
from osdp.cost.step import prediction, price_plan
from osdp.device_info import DeviceInfo
from osdp.errors import InfeasibleError, LargeOperator
from osdp.layout import unit_modules
from osdp.model_desc import ModelDesc, Operator
from osdp.plan import Decision, Mode, Plan, Unit
from osdp.profile import Profile
from osdp.search.polish import share_buckets
from osdp.search.sharding import ANYTHING, Assignment, Rules, least_peak, solve_bounded
from osdp.training import Training
from osdp.units import format_bytes, format_seconds

_LARGEST_SHOWN = 3
#: A relative gap that is rounding.
_PROVEN = 1e-9


@dataclass(frozen=True)
class Candidate:
    """One way to form a step, before its units are decided.

    Attributes:
        training: Local batch and microbatches.
        profile: Segments at that local batch.
    """

    training: Training
    profile: Profile


def best_plan(
    model_desc: ModelDesc, candidates: Sequence[Candidate], device: DeviceInfo, rules: Rules = ANYTHING
) -> Plan:
    """The plan with the highest throughput among all candidates.

    ``Plan.optimal`` says whether it is proven best in the decision space (:mod:`osdp.search.sharding`), over
    all candidates; the notes otherwise say how much better another could be.

    Args:
        model_desc: The model.
        candidates: Local batches and microbatches to choose from; one for a given step.
        device: The devices and their memory limit.
        rules: Modes that may be used.

    Raises:
        InfeasibleError: No plan of any candidate fits the limit.
    """
    best: tuple[Situation, Assignment] | None = None
    rate = possible = 0.0
    for candidate in candidates:
        samples = candidate.profile.local_batch * candidate.training.microbatches
        for situation in _situations(model_desc, candidate, device):
            upper = samples / rate if rate else np.inf
            found, bound = solve_bounded(situation, device.memory_limit, rules=rules, upper=upper)
            possible = max(possible, samples / bound)
            if found is not None:
                best, rate = (situation, found), samples / found.outcome.seconds
    if best is None:
        raise _infeasible(model_desc, candidates, device, rules)
    situation, found = best
    gap = max(0.0, 1 - rate / possible)
    return _plan(model_desc, situation, _with_shared_buckets(situation, found), rules, gap)


def _with_shared_buckets(situation: Situation, found: Assignment) -> Assignment:
    """The assignment with neighbouring replicated units joined: one step beyond the decision space."""
    if not found.units:
        return found
    root = price_root(situation, found.root_sharded, found.root_replicated, has_unit=found.has_root_unit)
    limit = situation.device.memory_limit
    outcome, units = share_buckets(situation, root, limit, found.units, found.outcome)
    return replace(found, units=units, outcome=outcome)


def _situations(model_desc: ModelDesc, candidate: Candidate, device: DeviceInfo) -> list[Situation]:
    training = candidate.training
    ways = (True, False) if training.microbatches > 1 else (True,)
    return [
        build_situation(model_desc, candidate.profile, device, training, reduce_each=each) for each in ways
    ]


def _infeasible(
    model_desc: ModelDesc, candidates: Sequence[Candidate], device: DeviceInfo, rules: Rules
) -> InfeasibleError:
    situations = [s for candidate in candidates for s in _situations(model_desc, candidate, device)]
    peaks = [least_peak(situation, rules=rules) for situation in situations]
    leanest = situations[int(np.argmin(peaks))]
    largest = sorted(model_desc.operators, key=lambda op: -op.nbytes)[:_LARGEST_SHOWN]
    return InfeasibleError(
        limit=device.memory_limit,
        best_peak=int(np.ceil(min(peaks))),
        largest=[LargeOperator(op.name, op.nbytes) for op in largest],
        suggestions=_suggestions(leanest, rules),
    )


def _suggestions(situation: Situation, rules: Rules) -> list[str]:
    """What would lower the peak, with how far where it can be told."""
    training, device = situation.training, situation.device
    state = float(situation.prices.state_sharded[-1])
    found = []
    batch = situation.profile.local_batch
    if batch > 1:
        found.append(f"a local batch below {batch}; more microbatches keep the global batch as it is")
    if rules.allowed != tuple(Mode):
        found.append("leaving strategy= out, so that every mode may be used")
    if training.param_dtype is None:
        found.append("param_dtype='bfloat16', which halves activations and gathered parameters")
    found.append(
        f"more ranks than {device.world_size}: sharded states take {format_bytes(state)} of each device here"
    )
    return found


def _plan(model_desc: ModelDesc, situation: Situation, found: Assignment, rules: Rules, gap: float) -> Plan:
    reasons = _Reasons(situation, found, rules)
    units: list[Unit] = []
    decided: dict[str, tuple[Mode, str]] = {}
    in_root: list[Operator] = list(found.root_sharded)
    chain = situation.timeline.chain
    for index, (a, b, mode) in enumerate(found.units):
        operators = chain[a:b]
        decided |= {op.name: (MODES[mode], reasons.of_unit(index)) for op in operators}
        if mode == ROOT:
            in_root += operators
            continue
        modules = unit_modules(operators, model_desc.operators, model_desc.modules)
        units.append(Unit(MODES[mode], tuple(op.name for op in operators), modules))
    for operator in found.root_replicated:
        units.append(Unit(Mode.NO_SHARD, (operator.name,), operator.modules))
    decided |= {op.name: (Mode.NO_SHARD, reasons.of_replicated(op)) for op in found.root_replicated}
    decided |= {op.name: (Mode.SHARD_GRAD_OP, reasons.of_root(op)) for op in found.root_sharded}
    if in_root:
        units.insert(0, Unit(Mode.SHARD_GRAD_OP, tuple(op.name for op in in_root), ("",), root=True))
    training, device = situation.training, situation.device
    plan = Plan(
        model=model_desc.fingerprint,
        device=device.fingerprint,
        training=replace(training, local_batch=situation.profile.local_batch),
        world_size=device.world_size,
        memory_limit=device.memory_limit,
        reduce_each_microbatch=situation.conditions.reduce_each,
        decisions=tuple(
            Decision(op.name, op.modules, tuple(p.name for p in op.parameters), op.nbytes, *decided[op.name])
            for op in model_desc.operators
        ),
        units=tuple(units),
        predicted=prediction(situation, found.outcome),
        measured_profile=situation.profile.measured,
        optimal=gap <= _PROVEN,
        notes=_notes(found, gap),
    )
    # The units as the runtime will form them: a root unit that nobody joined is none.
    outcome = judge(situation, *price_plan(situation, plan))
    return replace(plan, predicted=prediction(situation, outcome))


def _notes(found: Assignment, gap: float) -> tuple[str, ...]:
    cuts = f"{found.cuts} moments of the step decided the search"
    if gap <= _PROVEN:
        return (cuts,)
    return (cuts, f"proven to be within {gap:.2e} of the highest throughput")


class _Reasons:
    """Why each unit lives as it does: what the next-best mode would have cost."""

    def __init__(self, situation: Situation, found: Assignment, rules: Rules) -> None:
        self._situation, self._found = situation, found
        self._limit = situation.device.memory_limit
        self._modes = [k for k in range(ROOT) if MODES[k] in rules.allowed]
        sharded, replicated = found.root_sharded, found.root_replicated
        self._root = price_root(situation, sharded, replicated, has_unit=found.has_root_unit)
        self._known: dict[tuple[object, ...], str] = {}

    def of_unit(self, index: int) -> str:
        """The reason of a unit of the chain; equal units of equal modes are asked once."""
        a, b, mode = self._found.units[index]
        chain = self._situation.timeline.chain
        neighbours = tuple(m for _, _, m in self._found.units[max(index - 1, 0) : index + 2])
        shapes = tuple(p.shape for op in chain[a:b] for p in op.parameters)
        key = (shapes, mode, neighbours)
        if key not in self._known:
            forced = len(self._modes) == 1
            self._known[key] = "forced" if forced else self._compare(index)
        return self._known[key]

    def _compare(self, index: int) -> str:
        a, b, mode = self._found.units[index]
        others = []
        for other in self._modes:
            if other == mode:
                continue
            units = list(self._found.units)
            units[index] = (a, b, other)
            others.append((MODES[other], judge_choice(self._situation, units, self._root)))
        return _difference(self._found.outcome, others, self._limit)

    def of_root(self, operator: Operator) -> str:
        """The reason of an operator in the root's unit."""
        others = tuple(op for op in self._found.root_sharded if op != operator)
        return self._root_difference(Mode.NO_SHARD, others, (*self._found.root_replicated, operator))

    def of_replicated(self, operator: Operator) -> str:
        """The reason of a replicated operator outside the chain."""
        if any(not parameter.shape for parameter in operator.parameters):
            return "a 0-dim parameter cannot be sharded"
        others = tuple(op for op in self._found.root_replicated if op != operator)
        return self._root_difference(Mode.SHARD_GRAD_OP, (*self._found.root_sharded, operator), others)

    def _root_difference(
        self, mode: Mode, sharded: tuple[Operator, ...], replicated: tuple[Operator, ...]
    ) -> str:
        if len(self._modes) == 1:
            return "forced"
        has_unit = bool(sharded) or any(m == ROOT for _, _, m in self._found.units)
        root = price_root(self._situation, sharded, replicated, has_unit=has_unit)
        seen = judge_choice(self._situation, self._found.units, root)
        return _difference(self._found.outcome, [(mode, seen)], self._limit)


def _difference(chosen: Outcome, others: Sequence[tuple[Mode, Outcome]], limit: int) -> str:
    """What the other modes would change: the best that fits, and a faster one that does not."""
    parts = []
    fitting = [(o.seconds - chosen.seconds, mode, o) for mode, o in others if o.peak <= limit]
    if fitting:
        slower, mode, outcome = min(fitting, key=lambda item: item[0])
        spared = chosen.peak - outcome.peak
        parts.append(
            f"{mode} would cost {format_seconds(max(slower, 0.0))} more a step"
            + (f" and spare {format_bytes(spared)}" if spared > 0 else "")
        )
    for mode, outcome in others:
        if outcome.peak > limit and outcome.seconds < chosen.seconds:
            gain, over = chosen.seconds - outcome.seconds, outcome.peak - limit
            parts.append(
                f"{mode} would save {format_seconds(gain)} but exceed the limit by {format_bytes(over)}"
            )
    if not parts and others:
        parts.append("no other mode fits the limit")
    return "; ".join(parts)


def batches(
    training: Training,
    local_batches: Sequence[int],
    microbatches: Sequence[int],
    profile: Callable[[int], Profile],
) -> list[Candidate]:
    """Candidates for each local batch and number of microbatches, largest first."""
    return [
        Candidate(replace(training, local_batch=batch, microbatches=count), measured)
        for batch in sorted(set(local_batches), reverse=True)
        for measured in [profile(batch)]
        for count in sorted(set(microbatches), reverse=True)
    ]
