"""Local search: improve a plan by exchanging the units of items while the simulated step gets faster.

Used where the exact search stopped with a gap, and, for buckets that are shared, beyond its space. A
neighbour gives one item, or all items that are alike, the units of another item of their size: in this plan,
in a plan that was simulated before, or in an initial plan. The sweep is deterministic and bounded.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from osdp.cost.sharding.problem import RootUnitCost, ShardingProblem
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.strategies import NO_SHARD, SHARD_OPTIMIZER, UnitSpan, UnitStrategy
from osdp.model.description import Operator
from osdp.plan.deadline import NO_DEADLINE, Deadline
from osdp.search.sharding.candidates import CandidateUnits, item_bounds
from osdp.search.sharding.initial_plans import item_patterns
from osdp.search.sharding.ties import MayBeAsFast

UnitTuples = tuple[UnitSpan, ...]

#: Number of operators of an item, and its units with operators counted from its beginning.
Pattern = tuple[int, UnitTuples]

#: Maximum number of plans that are simulated.
LOOKS = 160
#: By how much a step may be slower, relatively, for fewer buckets, where links are faster beside compute.
_REGRET = 0.01


def improve_locally(
    problem: ShardingProblem,
    space: CandidateUnits,
    root: RootUnitCost,
    limit: float,
    chosen: UnitTuples,
    outcome: StepEstimate,
    seen: Iterable[Pattern] = (),
    deadline: Deadline = NO_DEADLINE,
) -> tuple[StepEstimate, UnitTuples]:
    """The best plan found by repeated improvement of ``chosen``.

    Args:
        problem: The step to plan.
        space: Candidate units; neighbours use no others.
        root: Costs of the operators outside the chain.
        limit: Bytes per device.
        chosen: Units of a feasible plan.
        outcome: The simulated step of ``chosen``.
        seen: Patterns of items in plans that were simulated before.
        deadline: When to stop although some neighbours have not been tried.
    """
    # 1. Patterns to exchange: of this plan, of plans seen before, of initial plans.
    items = patterns_of(space.bounds, chosen)
    usual = [
        pattern
        for in_one_way in item_patterns(space)
        for pattern in patterns_of(space.bounds, [unit for units in in_one_way for unit in units])
    ]
    others = list(dict.fromkeys([*items, *seen, *usual]))
    allowed = set(space.spans())
    # 2. The first improvement is taken and the sweep starts again, until none is left or LOOKS are used up.
    looks, improved = 0, True
    while improved:
        improved = False
        for moved, pattern in _neighbours(items, others):
            trial = [pattern if item in moved else own for item, own in enumerate(items)]
            units = _placed(space.bounds, trial)
            if not allowed.issuperset(units):
                continue
            if looks == LOOKS or deadline.is_over:
                return outcome, _placed(space.bounds, items)
            looks += 1
            tried = simulate_units(problem, units, root)
            if tried.peak <= limit and tried.seconds < outcome.seconds:
                outcome, items, improved = tried, trial, True
                break
    return outcome, _placed(space.bounds, items)


def patterns_of(bounds: Sequence[int], chosen: Sequence[UnitSpan]) -> list[Pattern]:
    """The pattern of each item in a plan, given the first operator of each and the number of operators."""
    found: list[Pattern] = []
    units = iter(chosen)
    for first, end in pairwise(bounds):
        mine, place = [], first
        while place < end:
            start, place, strategy = next(units)
            mine.append((start - first, place - first, strategy))
        found.append((end - first, tuple(mine)))
    return found


def _placed(bounds: Sequence[int], items: Sequence[Pattern]) -> UnitTuples:
    return tuple(
        (a + first, b + first, strategy)
        for first, (_, units) in zip(bounds, items, strict=False)
        for a, b, strategy in units
    )


def _neighbours(items: Sequence[Pattern], others: Sequence[Pattern]) -> Iterator[tuple[set[int], Pattern]]:
    """Pairs of a set of items and the pattern to give them: all equal items together, then single ones.

    Rare patterns come first, since there the last bytes can be saved.
    """
    places: dict[Pattern, list[int]] = {}
    for item, pattern in enumerate(items):
        places.setdefault(pattern, []).append(item)
    rare_first = sorted(places, key=lambda pattern: len(places[pattern]))
    alike = [(own, set(places[own])) for own in rare_first if len(places[own]) > 1]
    single = [(own, {item}) for own in rare_first for item in places[own]]
    for own, moved in (*alike, *single):
        for pattern in others:
            if pattern != own and pattern[0] == own[0]:
                yield moved, pattern


def side_by_side(problem: ShardingProblem, chosen: UnitTuples) -> Iterator[UnitTuples]:
    """The units of equal items in other orders: those that may share buckets first, and last.

    The search prices buckets by themselves, so that it may leave others between them: an MLP on two ranks
    took 8 % longer with four of its six blocks in two buckets than in one. Orders that have no fewer of them
    are left out.

    Args:
        problem: The step to plan.
        chosen: Units of a plan.
    """
    chain, possible = problem.timeline.chain, problem.timeline.recompute.possible
    crossed = {place for start, stop, _ in chosen for place in range(start + 1, stop)}
    bounds = [bound for bound in item_bounds(chain, possible) if bound not in crossed]
    items = patterns_of(bounds, chosen)
    alike: dict[object, list[int]] = {}
    for item, (first, end) in enumerate(pairwise(bounds)):
        kind = tuple(possible[first:end].tolist()), tuple(map(_kind_of, chain[first:end]))
        alike.setdefault(kind, []).append(item)
    for last in (False, True):
        order = list(items)
        for places in alike.values():
            own = sorted((items[place] for place in places), key=lambda pattern: _rank_of(pattern, last=last))
            for place, pattern in zip(places, own, strict=True):
                order[place] = pattern
        units = _placed(bounds, order)
        if _num_buckets(units) < _num_buckets(chosen):
            yield units


def _kind_of(operator: Operator) -> object:
    """Equal for operators that can have the same strategies, and so have the same bytes."""
    names = [parameter.name for parameter in operator.parameters]
    cut = operator.cut
    slicing = cut and (cut.dim, cut.slices, cut.in_backward, cut.weight in names and names.index(cut.weight))
    parameters = tuple((p.shape, p.dtype, p.trainable) for p in operator.parameters)
    return operator.block is None, operator.keeps_dtype, slicing, parameters


def _rank_of(pattern: Pattern, *, last: bool) -> tuple[object, ...]:
    """Order of the items whose units all may share buckets, by strategy, before or behind the others."""
    strategies = tuple(strategy for _, _, strategy in pattern[1])
    shares = all(_share(strategy, strategy) for strategy in strategies)
    return shares == last, strategies if shares else ()


def _num_buckets(units: UnitTuples) -> int:
    """Number of buckets if all neighbours that may share one do."""
    strategies = [strategy for _, _, strategy in units]
    shared = sum(_share(own, following) for own, following in pairwise(strategies))
    return sum(_share(own, own) for own in strategies) - shared


def share_buckets(
    problem: ShardingProblem,
    root: RootUnitCost,
    chosen: UnitTuples,
    outcome: StepEstimate,
    may_be_as_fast: MayBeAsFast | None = None,
    *,
    limit: float,
    faster: tuple[ShardingProblem, RootUnitCost] | None = None,
) -> tuple[StepEstimate, UnitTuples]:
    """Join neighbouring units of whole parameters, across blocks too, where the step is no slower and fits.

    This makes fewer, larger all-reduces; the price is memory earlier in backward and a later start. Where the
    link has no pause, by the prediction, the last bucket may be as large as it likes; where compute takes
    longer than was measured, all of it is waited for. A mixture of experts whose first half was joined took
    5 to 8 % longer for that.

    Args:
        problem: The step to plan.
        root: Costs of the operators outside the chain.
        chosen: Units of a feasible plan.
        outcome: The simulated step of ``chosen``.
        may_be_as_fast: Judges whether a plan is no slower; by default its seconds do.
        limit: Bytes per device.
        faster: The step with links that are faster beside compute, and the costs of what is outside the chain
            there, where a joint may cost no more than :data:`_REGRET`.
    """
    units, place = list(chosen), 0
    least = math.inf if faster is None else simulate_units(faster[0], chosen, faster[1]).seconds
    for _ in range(LOOKS):
        while place + 1 < len(units) and not _share(units[place][2], units[place + 1][2]):
            place += 1
        if place + 1 >= len(units):
            break
        # A joined unit stays at the same place, so that it may take in the next one, too.
        joint = (units[place][0], units[place + 1][1], units[place][2])
        trial = (*units[:place], joint, *units[place + 2 :])
        seen = simulate_units(problem, trial, root)
        no_slower = seen.seconds <= outcome.seconds or (may_be_as_fast and may_be_as_fast(trial, seen))
        if seen.peak > limit or not no_slower:
            place += 1
            continue
        there = 0.0 if faster is None else simulate_units(faster[0], trial, faster[1]).seconds
        if there > (1 + _REGRET) * least:
            place += 1
            continue
        outcome, units, least = seen, list(trial), min(least, there)
    return outcome, tuple(units)


def _share(strategy: UnitStrategy, following: UnitStrategy) -> bool:
    """Whether gradients of two units may share a bucket."""
    # In any shard group: that of SHARD_OPTIMIZER says how gradients are reduced.
    return strategy == following and strategy._replace(group=0) in (NO_SHARD, SHARD_OPTIMIZER)
