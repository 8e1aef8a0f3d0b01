"""What ranks are given must be alike; a fault that one of them finds is everybody's."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from osdp.errors import PlanMismatchError
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from osdp.runtime import apply
from tests.helpers.distributed import run
from tests.helpers.nets import Net
from tests.helpers.plans import plan_by_hand


def plan_of(net: Net, modes: Mode | dict[str, Mode] = Mode.FULL_SHARD) -> Plan:
    return plan_by_hand(net, modes, dist.get_world_size())


def another_plan(net: Net) -> Plan:
    return plan_of(net, {"": Mode.FULL_SHARD, "blocks.1": Mode.NO_SHARD})


def frozen(net: Net) -> Plan:
    net.blocks[1].up.weight.requires_grad_(False)
    return plan_of(net)


def wider(net: Net) -> Plan:
    net.blocks[1].up = torch.nn.Linear(5, 9)
    return plan_of(net)


def low(net: Net) -> Plan:
    net.blocks[1].up.bfloat16()
    return plan_of(net)


#: What rank 1 does otherwise, and what all ranks say about it.
CASES: dict[Callable[[Net], Plan], tuple[str, ...]] = {
    another_plan: ("rank 1 differs from rank 0", "operator 'blocks.1.norm'", "NO_SHARD"),
    frozen: ("rank 1 differs from rank 0", "'blocks.1.up.weight'", "requires_grad=False"),
    wider: ("rank 1 differs from rank 0", "'blocks.1.up.weight'", "(9, 5)"),
    low: ("rank 1 differs from rank 0", "'blocks.1.up.weight'", "torch.bfloat16"),
}


def said_of(work: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


def all_alike() -> None:
    for difference, words in CASES.items():
        torch.manual_seed(0)
        net = Net(tied=False, gated=False)
        plan = difference(net) if dist.get_rank() == 1 else plan_of(net)
        before = [id(parameter) for parameter in net.parameters()]
        said = said_of(lambda net=net, plan=plan: apply(net, plan))
        assert all(word in said for word in ("PlanMismatchError", *words)), said
        texts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(texts, said)
        assert len(set(texts)) == 1, texts
        assert [id(parameter) for parameter in net.parameters()] == before


def one_fault_is_everybodys() -> None:
    """Rank 1 has wrapped its model before; the others would wait for it."""
    net = Net(tied=False, gated=False)
    plan = plan_of(net)
    if dist.get_rank() == 1:
        # A group that the others have not must not keep the ranks from meeting.
        alone = dist.new_group([1], use_local_synchronization=True)
        net.blocks[0] = torch.nn.parallel.DistributedDataParallel(net.blocks[0], process_group=alone)
    said = said_of(lambda: apply(net, plan))
    assert "rank 1: ValueError: the model is wrapped already: blocks.0" in said, said


def the_same_fault_is_raised_as_it_is() -> None:
    net = Net(tied=False, gated=False)
    plan = plan_by_hand(net, Mode.FULL_SHARD, 7)
    with pytest.raises(PlanMismatchError) as caught:
        apply(net, plan)
    assert caught.value.differences == (f"it is for 7 ranks, there are {dist.get_world_size()}",)


def test_ranks_must_apply_the_same_plan_to_the_same_model() -> None:
    run(2, all_alike, timeout=40)
    run(3, one_fault_is_everybodys, timeout=40)
    run(2, the_same_fault_is_raised_as_it_is, timeout=40)
