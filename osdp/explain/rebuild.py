"""The problem that a plan solved, built again from its basis."""

from dataclasses import dataclass, replace

from osdp.cost.evaluate import solution_of
from osdp.cost.sharding.problem import ShardingProblem, build_problem, with_links
from osdp.cost.sharding.solution import ShardingSolution
from osdp.hardware.device_info import DeviceInfo
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan


@dataclass(frozen=True)
class Rebuilt:
    """A plan with its problem and its units as the simulator sees them.

    Attributes:
        plan: The plan.
        basis: What it was searched from.
        problem: The step that was planned.
        solution: The plan's units.
    """

    plan: Plan
    basis: Basis
    problem: ShardingProblem
    solution: ShardingSolution


def basis_of(plan: Plan) -> Basis:
    """What a plan was searched from.

    Raises:
        ValueError: The plan does not have it.
    """
    if plan.basis is not None:
        return plan.basis
    if not plan.is_whole:
        raise ValueError(
            f"the plan has {len(plan.stages)} stages and tp={plan.tp}: without its model it cannot be "
            "explained or planned again; plan.stage_table(n) has the reasons of each stage"
        )
    if len(plan.batch_shapes) > 1:
        raise ValueError(
            f"the plan was made for batches of {len(plan.batch_shapes)} shapes: it is not explained, refined "
            "or searched again, which is done for one shape; plan for one of them, or for another BatchMix"
        )
    raise ValueError(
        "the plan does not contain what it was searched from (it was written by hand or by an older osdp): "
        "plan again with make_plan(...), OSDP(...) or osdp plan"
    )


def rebuild(plan: Plan) -> Rebuilt:
    """The problem and the units of a plan.

    Raises:
        ValueError: The plan does not contain what it was searched from.
    """
    return rebuild_with(plan, basis_of(plan))


def rebuild_with(plan: Plan, basis: Basis) -> Rebuilt:
    """The same units in the problem of another basis of the same model."""
    profile = basis.profile_at(plan.local_batch)
    problem = build_problem(
        basis.model_desc, profile, basis.device, plan.training, reduce_each=plan.reduce_each_microbatch
    )
    return _placed(plan, basis, problem)


def rebuild_with_links(rebuilt: Rebuilt, device: DeviceInfo) -> Rebuilt:
    """The same units on the same devices with other times of the same links."""
    basis = replace(rebuilt.basis, device=device)
    return _placed(rebuilt.plan, basis, with_links(rebuilt.problem, device))


def _placed(plan: Plan, basis: Basis, problem: ShardingProblem) -> Rebuilt:
    problem, solution = solution_of(problem, plan.sharding)
    return Rebuilt(plan, basis, problem, solution)
