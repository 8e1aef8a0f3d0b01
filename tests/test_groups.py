"""Group sharding and communication with groups: every layout trains as a single process does."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from osdp import OSDP, DeviceInfo, Link, ModelDesc, PlanMismatchError, Training, make_plan
from osdp.comm.collectives import FlatReduceScatter, TwoStepAllGather, TwoStepReduceScatter, exchange
from osdp.comm.groups import Grid, Meshes
from osdp.comm.torch_private import all_gather, reduce_scatter
from osdp.device_info import COLLECTIVES
from osdp.plan import Mode, Route, Unit
from tests.distributed import run
from tests.nets import Net, loss_of, tokens
from tests.plans import in_groups, plan_by_hand
from tests.test_parity import Case, all_faults


def equal_to_flat(group_size: int) -> None:
    """Every route moves what the flat collective moves, to the same places."""
    world = dist.group.WORLD
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    grid = Meshes(mesh).grid(group_size)
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, numel in ((torch.float32, 5), (torch.bfloat16, 8), (torch.float64, 1)):
        mine = torch.arange(numel, dtype=dtype) + 10 * rank
        want, got = torch.empty(size * numel, dtype=dtype), torch.empty(size * numel, dtype=dtype)
        all_gather(want, mine)
        for is_async, by_exchange in itertools.product((False, True), repeat=2):
            got.zero_()
            work = TwoStepAllGather(grid, by_exchange=by_exchange)(
                output_tensor=got, input_tensor=mine, group=world, async_op=is_async
            )
            if work is not None:
                work.wait()
            assert torch.equal(got, want)
        whole = (torch.arange(size * numel) % 7 + rank).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            wanted = torch.empty(numel, dtype=dtype)
            reduce_scatter(wanted, whole.clone(), op=op)
            for route in (
                FlatReduceScatter(),
                TwoStepReduceScatter(grid, by_exchange=False),
                TwoStepReduceScatter(grid, by_exchange=True),
            ):
                reduced = torch.empty(numel, dtype=dtype)
                route(output_tensor=reduced, input_tensor=whole.clone(), group=world, op=op)
                rounding = 2e-2 if dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(reduced, wanted, rtol=rounding, atol=0)


def test_every_route_is_the_flat_collective() -> None:
    run(4, equal_to_flat, 2)


def test_every_route_is_the_flat_collective_on_two_by_three() -> None:
    run(6, equal_to_flat, 3)


def refused() -> None:
    with pytest.raises(ValueError, match="it cannot do"):
        exchange(torch.zeros(1), torch.zeros(2), dist.ReduceOp.MAX, dist.group.WORLD)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError, match="groups of 3 do not divide 2 ranks"):
        Meshes(mesh).grouped(3)
    assert isinstance(Meshes(mesh).grid(2), Grid)


def test_other_reductions_and_groups_that_do_not_divide_are_refused() -> None:
    run(2, refused)


def test_units_say_what_groups_they_have() -> None:
    for wrong in (
        {"mode": Mode.HYBRID_SHARD},
        {"mode": Mode.FULL_SHARD, "group_size": 2},
        {"mode": Mode.FULL_SHARD, "route": Route.TWO_STEP},
        {"mode": Mode.HYBRID_SHARD, "group_size": 2, "route": Route.TWO_STEP},
        {"mode": Mode.NO_SHARD, "route": Route.EXCHANGE},
    ):
        with pytest.raises(ValueError, match="unit"):
            Unit(operators=("a",), modules=("a",), **wrong)


#: Mode, group size and route of the sharded units of a layout, and whether they are the root's, too.
Grouping = tuple[Mode, int, Route, bool]


def groupings(group_size: int) -> list[Grouping]:
    return [
        (Mode.HYBRID_SHARD, group_size, Route.FLAT, False),
        (Mode.HYBRID_SHARD, group_size, Route.FLAT, True),
        (Mode.HYBRID_SHARD, group_size, Route.EXCHANGE, False),
        (Mode.FULL_SHARD, 0, Route.EXCHANGE, False),
        (Mode.FULL_SHARD, group_size, Route.TWO_STEP, False),
        (Mode.FULL_SHARD, group_size, Route.TWO_STEP_EXCHANGE, False),
    ]


def grouped_cases(group_size: int) -> list[Any]:
    layouts = ("shard all", "shard each", "mixed blocks", "mixed leaves", "keep all")
    cases = [
        Case(layout, accumulate=accumulate, grouping=grouping)
        for layout in layouts
        for grouping in groupings(group_size)
        for accumulate in ("none", "keep", "reduce")
    ]
    low = ("bfloat16", "float32")
    return cases + [Case("mixed blocks", dtypes=low, grouping=grouping) for grouping in groupings(group_size)]


def test_every_group_layout_of_four_ranks_trains_as_a_single_process() -> None:
    results = run(4, all_faults, grouped_cases(2), timeout=170)
    assert [fault for rank in results for fault in rank] == []


def planned_with_groups() -> tuple[set[str], set[str], float]:
    """The search takes what the links favour, and the plan trains."""
    net, batch = WithLoss(gated=False, depth=3), tokens(0, 4, 6)
    model_desc = ModelDesc.from_module(net, batch)

    def links(group: str, size: int, bandwidth: float) -> list[Link]:
        return [Link(name, group, size, 1e-5, bandwidth) for name in COLLECTIVES]

    slow = [*links("world", 4, 1e5), *links("inside 2", 2, 1e9), *links("across 2", 2, 1e6)]
    found = []
    for two_step in (1e4, 1e9):
        device = DeviceInfo(
            memory_limit=2**40, devices_per_node=4, links=(*slow, *links("two_step 2", 4, two_step)),
            flops=1e12, memory_bandwidth=1e12,
        )  # fmt: skip
        training = Training(local_batch=4)
        whole = make_plan(None, model_desc, device, training=training, strategy="NO_SHARD")
        tight = replace(device, memory_limit=int(0.93 * whole.predicted.peak_bytes))
        plan = make_plan(None, model_desc, tight, training=training, slices=(), recompute=False)
        found.append(
            {str(unit.mode) if unit.mode is Mode.HYBRID_SHARD else str(unit.route) for unit in plan.units}
        )
    model = OSDP(net, plan=plan)
    model(batch).backward()
    return found[0], found[1], float(model.clip_grad_norm_(1.0))


class WithLoss(Net):
    """Its own loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(batch), batch)


def test_the_search_takes_the_groups_that_the_links_favour() -> None:
    answers = run(4, planned_with_groups)
    hybrid, two_step, _ = answers[0]
    assert "HYBRID_SHARD" in hybrid and "two_step" in two_step
    assert len({norm for _, _, norm in answers}) == 1


def refused_groups() -> None:
    net = Net(gated=False)
    plan = plan_by_hand(net, Mode.FULL_SHARD, dist.get_world_size())
    with pytest.raises(PlanMismatchError, match="groups of 3 ranks, which must be several and divide 2"):
        OSDP(net, plan=in_groups(plan, Mode.HYBRID_SHARD, 3, Route.FLAT))


def test_a_plan_whose_groups_do_not_divide_the_ranks_is_refused() -> None:
    run(2, refused_groups)


def test_forcing_groups_that_nobody_measured_says_how_to_measure_them() -> None:
    net, batch = WithLoss(gated=False), tokens(0, 4, 6)
    device = DeviceInfo(memory_limit=2**30, flops=1e12, memory_bandwidth=1e12)
    with pytest.raises(ValueError, match=r"DeviceInfo\.detect\(group_sizes="):
        make_plan(None, ModelDesc.from_module(net, batch), device, strategy="HYBRID_SHARD")
