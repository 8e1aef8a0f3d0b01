"""Plans drawn at random from all those that the search could find, and what it finds at a given limit."""

import random

from osdp.api import make_plan
from osdp.cost.sharding.problem import build_problem
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.strategies import UnitMode, UnitSpan
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.plan.plan import Plan
from osdp.plan.search_options import SearchOptions
from osdp.profiler.roofline import estimate
from osdp.search.sharding.candidates import CandidateUnits
from osdp.search.sharding.cutting_planes import CostedCandidates
from osdp.search.sharding.planner import whole_plan
from osdp.search.sharding.root_unit import root_choices

_RULES = SearchOptions(slices=(2, 4), recompute=True)


def device(world_size: int, memory_limit: int = 2**40) -> DeviceInfo:
    """Ranks on one machine, with speeds to estimate with."""
    links = tuple(Link(name, "world", world_size, 1e-4, 1e9) for name in COLLECTIVES)
    return DeviceInfo(
        memory_limit=memory_limit,
        devices_per_node=world_size,
        links=links,
        flops=1e10,
        memory_bandwidth=1e10,
    )


def searched_plan(model_desc: ModelDesc, world_size: int, limit: float) -> Plan:
    """The best plan in an estimate.

    Args:
        model_desc: The model.
        world_size: Number of ranks.
        limit: Of memory, in parts of the model's parameter bytes.
    """
    nbytes = sum(operator.nbytes for operator in model_desc.operators)
    return make_plan(None, model_desc, device(world_size, int(limit * nbytes)))


def random_plan(model_desc: ModelDesc, world_size: int, seed: int) -> Plan:
    """One of all plans in the decision space: any units, modes, slices, recomputed blocks and root."""
    rng = random.Random(seed)
    training = Training(local_batch=model_desc.local_batch)
    info = device(world_size)
    profile = estimate(model_desc, info, training)
    problem = build_problem(model_desc, profile, info, training, reduce_each=True)
    choice = rng.choice(root_choices(problem.timeline.root, _RULES))
    space = CostedCandidates.of(problem, _RULES, root_unit=choice.has_unit).space
    units = [unit for item in range(space.num_items) for unit in _path(space, item, rng)]
    joins = any(strategy.mode == UnitMode.ROOT for *_, strategy in units)
    root = choice._replace(has_unit=bool(choice.sharded) or joins).cost(problem)
    found = choice.solution(units, simulate_units(problem, units, root), num_rows=0, bound=0.0)
    return whole_plan(model_desc, problem, found, _RULES, gap=1.0)


def _path(space: CandidateUnits, item: int, rng: random.Random) -> list[UnitSpan]:
    """Units that partition an item; those of a recomputed one are all recomputed."""
    all_units = space.spans(space.inner[item])
    again = rng.random() < 0.3 and any(strategy.recomputed for *_, strategy in all_units)
    candidates = [unit for unit in all_units if unit[2].recomputed == again]
    position, end = space.bounds[item], space.bounds[item + 1]
    found = []
    while position < end:
        possible = [unit for unit in candidates if unit[0] == position]
        # Modes alike often, whatever the number of strategies of each: shard groups and kept slices.
        mode = rng.choice(sorted({strategy.plan_mode for *_, strategy in possible}))
        unit = rng.choice([unit for unit in possible if unit[2].plan_mode is mode])
        found.append(unit)
        position = unit[1]
    return found
