"""Plans by hand, without a search: one operator for each module that registers parameters."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from osdp.model.training import Training
from osdp.nn.modules import supported_slicing
from osdp.plan.plan import Plan, StagePlan
from osdp.plan.sharding import Decision, Mode, Prediction, Route, ShardingPlan, Unit
from osdp.runtime.module.parameter_owners import owned_parameters

T = TypeVar("T")

#: What a unit is called whose parameters stay in the root.
ROOT = "root"


def plan_by_hand(
    model: nn.Module,
    modes: Mode | Mapping[str, Mode] | Callable[[str], Mode],
    world_size: int,
    *,
    groups: Mapping[str, str] | None = None,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
) -> Plan:
    """A plan for ``model``.

    Args:
        model: The model.
        modes: Mode of each operator, by name; a mapping may name modules above it, the longest name wins.
        world_size: Number of ranks.
        groups: Operators, or modules above them, by name, to the name of the unit they share: any word, the
            FQN of a module to wrap in their stead, or ``ROOT``. The others are units of their own.
        param_dtype: As in Plan.
        reduce_dtype: As in Plan.
    """
    operators: dict[str, list[str]] = {}
    owners: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for entry in owned_parameters(model).values():
        operator = entry.name.rpartition(".")[0]
        operators.setdefault(operator, []).append(entry.name)
        owners.setdefault(operator, {}).update({alias.rpartition(".")[0]: None for alias in entry.names})
        sizes[operator] = sizes.get(operator, 0) + entry.parameter.nbytes
    decisions = tuple(
        Decision(name, tuple(owners[name]), tuple(parameters), sizes[name], _mode(modes, name))
        for name, parameters in operators.items()
    )
    units = _units(model, decisions, groups or {})
    predicted = Prediction(1.0, 1.0, 0.0, 0.0, 1, "by hand", 1)
    return Plan(
        model="by hand",
        device="by hand",
        training=Training(local_batch=1, param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        stages=(StagePlan(("",), ShardingPlan(decisions, units, predicted, optimal=False)),),
        memory_limit=2**30,
        predicted=predicted,
        optimal=False,
        measured_profile=False,
        dp=world_size,
    )


def split(plan: Plan, model: nn.Module, slices: int, kept: int = 0) -> Plan:
    """``plan`` with every operator that can be cut, and is a sharded unit by itself, in so many slices.

    Of each but an embedding's so many are kept gathered.
    """
    if slices == 1:
        return plan
    alone = {u.operators[0] for u in plan.units if u.mode.sharded and not u.root and len(u.operators) == 1}

    def decided(decision: Decision) -> Decision:
        cut = supported_slicing(model.get_submodule(decision.operator))
        if decision.operator not in alone or cut is None:
            return decision
        needed = cut[0] != "rows" or len(decision.modules) > 1
        return replace(decision, slices=slices, sliced_by=cut[0], slices_kept=kept if needed else 0)

    return plan.with_sharding(decisions=tuple(map(decided, plan.decisions)))


def offload(plan: Plan) -> Plan:
    """``plan`` with the states of every unit that FSDP2 shards, but the root's, in host memory."""
    cut = {decision.operator for decision in plan.decisions if decision.slices > 1}
    return plan.with_sharding(
        units=tuple(
            replace(
                unit, offloaded=unit.mode.sharded and not unit.root and not cut.intersection(unit.operators)
            )
            for unit in plan.units
        ),
    )


def in_groups(plan: Plan, mode: Mode, group_size: int, route: Route, root: bool = False) -> Plan:
    """``plan`` with FULL_SHARD units (the root's, too, if ``root``) in ``mode``, and all by ``route``."""

    def unit_of(unit: Unit) -> Unit:
        if not unit.mode.sharded:
            return unit
        own = mode if unit.mode is Mode.FULL_SHARD and (root or not unit.root) else unit.mode
        size = group_size if own is Mode.HYBRID_SHARD or route.in_two_steps else 0
        return replace(unit, mode=own, group_size=size, route=route)

    return _with_units(plan, tuple(map(unit_of, plan.units)))


def step_by_exchange(plan: Plan) -> Plan:
    """``plan`` with gradients of SHARD_OPTIMIZER exchanged, instead of all-reduced."""
    units = (
        replace(unit, route=Route.EXCHANGE) if unit.mode is Mode.SHARD_OPTIMIZER else unit
        for unit in plan.units
    )
    return _with_units(plan, tuple(units))


def in_different_groups(plan: Plan, group_size: int) -> Plan:
    """``plan`` with its sharded units, but the root's, in turn in groups, in two steps, and as they are."""
    kinds = itertools.cycle(
        [
            (Mode.HYBRID_SHARD, group_size, Route.FLAT),
            (Mode.FULL_SHARD, group_size, Route.TWO_STEP_EXCHANGE),
            (None, 0, Route.EXCHANGE),
            (None, 0, Route.EXCHANGE_ALL),
            (Mode.HYBRID_SHARD, group_size, Route.EXCHANGE),
        ]
    )
    units = []
    for unit in plan.units:
        if unit.mode.sharded and not unit.root:
            mode, size, route = next(kinds)
            unit = replace(unit, mode=mode or unit.mode, group_size=size, route=route)
        units.append(unit)
    return _with_units(plan, tuple(units))


def _with_units(plan: Plan, units: tuple[Unit, ...]) -> Plan:
    modes = {name: unit.mode for unit in units for name in unit.operators}
    decisions = tuple(replace(decision, mode=modes[decision.operator]) for decision in plan.decisions)
    return plan.with_sharding(units=units, decisions=decisions)


def _units(model: nn.Module, decisions: tuple[Decision, ...], groups: Mapping[str, str]) -> tuple[Unit, ...]:
    shared: dict[tuple[str, Mode], list[Decision]] = {}
    for decision in decisions:
        key = _longest(groups, decision.operator) or f"operator {decision.operator}"
        if decision.operator == "" and decision.mode.sharded:
            key = ROOT
        shared.setdefault((key, decision.mode), []).append(decision)
    modules = {name for name, _ in model.named_modules()}
    units = []
    for (key, mode), members in shared.items():
        wraps = [fqn for member in members for fqn in member.modules]
        units.append(
            Unit(
                mode=mode,
                operators=tuple(member.operator for member in members),
                modules=("",) if key == ROOT else (key,) if key in modules else tuple(dict.fromkeys(wraps)),
                root=key == ROOT and mode.sharded,
            )
        )
    return tuple(units)


def _mode(modes: Mode | Mapping[str, Mode] | Callable[[str], Mode], operator: str) -> Mode:
    if isinstance(modes, Mode):
        return modes
    if callable(modes):
        return modes(operator)
    mode = _longest(modes, operator)
    if mode is None:
        raise KeyError(f"no mode for operator {operator!r}")
    return mode


def _longest(names: Mapping[str, T], operator: str) -> T | None:
    fitting = [name for name in names if not name or operator == name or operator.startswith(name + ".")]
    return names[max(fitting, key=len)] if fitting else None
