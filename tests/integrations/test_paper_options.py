"""``gen_fsdp_args``: options that force one use of groups, through fairscale or straight to the root."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
from torch import nn

from osdp import OSDP, DeviceInfo, Link, ModelDesc, Training, gen_fsdp_args, make_plan
from osdp.hardware.device_info import COLLECTIVES
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode
from tests.helpers.distributed import run
from tests.helpers.nets import WithLoss, tokens


def device(nodes: int, per_node: int, sizes: Sequence[int]) -> DeviceInfo:
    """Fast inside groups of any of ``sizes``, slow across; two steps are no faster than one."""
    groups = {"world": (nodes * per_node, 1e6)}
    for size in sizes:
        groups[f"inside {size}"] = (size, 1e9)
        groups[f"across {size}"] = (nodes * per_node // size, 1e6)
        groups[f"two_step {size}"] = (nodes * per_node, 1e6)
    links = tuple(
        Link(name, group, size, 1e-5, bandwidth)
        for group, (size, bandwidth) in groups.items()
        for name in COLLECTIVES
    )
    return DeviceInfo(
        memory_limit=2**34,
        nodes=nodes,
        devices_per_node=per_node,
        links=links,
        flops=1e12,
        memory_bandwidth=1e12,
    )


def planned(options: dict[str, Any], info: DeviceInfo, model: nn.Module) -> Plan:
    model_desc = ModelDesc.from_module(model, tokens(0, 4, 6))
    return make_plan(None, model_desc, info, training=Training(local_batch=4), **options)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 8), (4, 4)])
def test_group_sharding_shards_every_unit_inside_a_machine(nodes: int, per_node: int) -> None:
    info = device(nodes, per_node, (2, per_node) if per_node > 2 else (2,))
    plan = planned(gen_fsdp_args(nodes, per_node, "group_sharding", "mlp"), info, WithLoss(gated=False))
    assert {(unit.mode, unit.group_size) for unit in plan.units} == {(Mode.HYBRID_SHARD, per_node)}


def test_communication_with_groups_goes_in_two_steps_everywhere() -> None:
    options = gen_fsdp_args(2, 4, "communication_with_groups")
    plan = planned(options, device(2, 4, (2, 4)), WithLoss(gated=False))
    assert {unit.group_size for unit in plan.units} == {4}
    assert all(unit.route.in_two_steps and unit.mode.sharded for unit in plan.units)
    without = planned({"strategy": "FULL_SHARD", "two_step": False}, device(2, 4, (2, 4)), WithLoss())
    assert {unit.group_size for unit in without.units} == {0}


def test_none_forces_nothing_and_one_machine_has_no_groups() -> None:
    assert gen_fsdp_args(2, 8, "none", "bert-large") == {}
    assert gen_fsdp_args(1, 8, "group_sharding") == {"strategy": "FULL_SHARD"}
    assert gen_fsdp_args(8, 1, "group_sharding") == {"strategy": "NO_SHARD"}
    for nodes, per_node in ((1, 8), (8, 1)):
        options = gen_fsdp_args(nodes, per_node, "communication_with_groups")
        assert options == {"strategy": "FULL_SHARD"}


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"nnodes must be positive, got 0; .*'rings' is unknown; there are"):
        gen_fsdp_args(0, 8, "rings")
    info = device(2, 4, (4,))
    with pytest.raises(ValueError, match=r"groups of 4, not of 2: measure .*group_sizes=\(2,\)"):
        planned(gen_fsdp_args(4, 2, "group_sharding"), info, WithLoss(gated=False))
    with pytest.raises(ValueError, match=r"two_step=True needs groups of ranks, .*pass group_sizes=\(2,\)"):
        planned({"two_step": True}, info.with_groups(()), WithLoss(gated=False))
    with pytest.raises(ValueError, match=r"two_step=True is for units sharded over all ranks, .* NO_SHARD"):
        planned({"two_step": True, "strategy": "NO_SHARD"}, info, WithLoss(gated=False))


def through_fairscale(gsdp_type: str, *, marks: bool) -> tuple[set[tuple[str, int]], float]:
    """The paper's way to use it. Without marks, only the root has the options."""
    torch.manual_seed(7)
    options = gen_fsdp_args(2, 2, gsdp_type, "mlp")
    model: nn.Module = WithLoss(gated=False)
    policy = partial(default_auto_wrap_policy, min_num_params=100) if marks else default_auto_wrap_policy
    with enable_wrap(wrapper_cls=OSDP, **options):
        model = auto_wrap(model, auto_wrap_policy=policy)
    batch = tokens(dist.get_rank(), 2, 6)
    wrapped = OSDP(
        model, batch, device(2, 2, (2,)), training=Training(optimizer="SGD"), **({} if marks else options)
    )
    loss = wrapped(batch)
    loss.backward()
    return {(str(unit.mode), unit.group_size) for unit in wrapped.plan.units}, loss.item()


def both_kinds() -> list[tuple[set[tuple[str, int]], float]]:
    return [
        through_fairscale("group_sharding", marks=True),
        through_fairscale("communication_with_groups", marks=False),
    ]


def test_the_options_go_through_fairscale_to_the_root() -> None:
    answers = run(4, both_kinds, timeout=120)
    (hybrid, _), (two_step, _) = answers[0]
    assert hybrid == {("HYBRID_SHARD", 2)}
    assert {size for _, size in two_step} == {2} and "HYBRID_SHARD" not in {mode for mode, _ in two_step}
    # Either way the model starts from rank 0's weights.
    for (_, first), (_, second) in answers:
        assert first == pytest.approx(second, rel=1e-5)


def wrong_groups() -> None:
    for sizes, said in (((3,), "groups of 3"), ((1, 4), "groups of 1, 4")):
        with pytest.raises(ValueError, match=f"{said} ranks do not fit 4 ranks; possible are groups of 2"):
            DeviceInfo.detect(group_sizes=sizes)


def test_groups_that_do_not_divide_the_ranks_are_refused_before_anything_is_measured() -> None:
    run(4, wrong_groups)
