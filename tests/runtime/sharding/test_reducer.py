"""Which gradients share an all-reduce, and in which order the all-reduces start."""

from torch import nn

from osdp.plan.plan import Mode
from osdp.runtime.module.parameter_owners import owned_parameters
from osdp.runtime.sharding.reducer import replicated_units
from osdp.runtime.sharding.replicated import ReplicatedParameter
from tests.helpers.plans import plan_by_hand


def _units(model: nn.Module, groups: dict[str, str]) -> list[list[str]]:
    plan = plan_by_hand(model, Mode.NO_SHARD, 2, groups=groups)
    parameters = [ReplicatedParameter(entry, None) for entry in owned_parameters(model).values()]
    return [[parameter.name for parameter in unit] for unit in replicated_units(plan, parameters)]


def test_a_unit_of_the_plan_is_a_bucket() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    assert _units(model, {}) == [["0.weight"], ["1.weight"], ["2.weight"], ["3.weight"]]
    joined = _units(model, {"1": "middle", "2": "middle"})
    assert joined == [["0.weight"], ["1.weight", "2.weight"], ["3.weight"]]


def test_what_is_used_first_comes_first_whatever_the_order_of_units() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    # The unit of the first and the last operator is complete only when the first has its gradient.
    units = _units(model, {"0": "ends", "2": "ends"})
    assert units == [["0.weight", "2.weight"], ["1.weight"]]
