"""Group sharding and communication with groups: every layout trains as a single process does."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from osdp import OSDP, DeviceInfo, Link, ModelDesc, PlanMismatchError, Training, make_plan
from osdp.comm.collectives import FlatReduceScatter, TwoStepAllGather, TwoStepReduceScatter, exchange
from osdp.comm.groups import Grid, Meshes
from osdp.hardware.device_info import COLLECTIVES
from osdp.plan.plan import Plan
from osdp.plan.sharding import Mode, Route, Unit
from osdp.runtime import apply, checkpoint
from osdp.torch_private.distributed import all_gather, reduce_scatter
from tests.helpers.distributed import run
from tests.helpers.nets import Net, WithLoss, loss_of, tokens
from tests.helpers.plans import in_different_groups, in_groups, plan_by_hand
from tests.test_parity import ACCUMULATE, DTYPES, LAYOUTS, Case, all_faults, difference, pairs, whole


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
            gather = TwoStepAllGather(grid, by_exchange=by_exchange)
            work = gather(output_tensor=got, input_tensor=mine, group=world, async_op=is_async)
            if work is not None:
                work.wait()
            between = gather._column
            assert between is not None
            gather.free()  # whatever a thread of gloo holds
            assert between.untyped_storage().nbytes() == 0
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


def on_halves() -> None:
    """Two data-parallel meshes of four ranks, whose groups are made at different times."""
    whole_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    mesh, half = whole_mesh["dp"], dist.get_rank() // 4
    for turn in (0, 1):
        if turn == half:
            grid = Meshes.over(mesh).grid(2)
        dist.barrier()
    assert Meshes.over(mesh).grouped(2) is Meshes.over(mesh).grouped(2)
    assert dist.get_process_group_ranks(grid.inside)[0] // 4 == half
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=grid.inside)
    dist.all_reduce(total, group=grid.across)
    assert total.item() == sum(range(4 * half, 4 * half + 4))


def test_groups_of_several_data_parallel_meshes_do_not_meet() -> None:
    run(8, on_halves)


def on_one_mesh() -> None:
    """Links are measured on a mesh without names; then a model is wrapped with a mesh that has one."""
    unnamed = dist.device_mesh.init_device_mesh("cpu", (2,))
    assert Meshes.over(unnamed).world is unnamed
    net: Any = Net(gated=False)
    modes, groups = LAYOUTS["mixed leaves"]
    net = OSDP(net, plan=plan_by_hand(net, modes, 2, groups=groups))
    assert {parameter.device_mesh for parameter in net.parameters()} == {net.mesh}
    for optimizer in (torch.optim.ASGD(net.parameters(), foreach=True), torch.optim.AdamW(net.parameters())):
        net(tokens(0, 2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_all_parameters_are_on_the_mesh_of_the_model() -> None:
    """An optimizer once refused a list of parameters: some were on the mesh that was made first."""
    run(2, on_one_mesh)


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
        {"mode": Mode.SHARD_OPTIMIZER, "route": Route.EXCHANGE_ALL},
    ):
        with pytest.raises(ValueError, match="unit"):
            Unit(operators=("a",), modules=("a",), **wrong)


def groupings(size: int) -> list[Callable[[Plan], Plan]]:
    kinds = [
        (Mode.HYBRID_SHARD, size, Route.FLAT, False),
        (Mode.HYBRID_SHARD, size, Route.FLAT, True),
        (Mode.HYBRID_SHARD, size, Route.EXCHANGE, False),
        (Mode.HYBRID_SHARD, size, Route.EXCHANGE_ALL, True),
        (Mode.FULL_SHARD, 0, Route.EXCHANGE, False),
        (Mode.FULL_SHARD, 0, Route.EXCHANGE_ALL, True),
        (Mode.FULL_SHARD, size, Route.TWO_STEP, False),
        (Mode.FULL_SHARD, size, Route.TWO_STEP_EXCHANGE, False),
    ]
    uniform: list[Callable[[Plan], Plan]] = [
        partial(in_groups, mode=mode, group_size=group_size, route=route, root=root)
        for mode, group_size, route, root in kinds
    ]
    return [*uniform, partial(in_different_groups, group_size=size)]


def grouped_cases(group_size: int) -> list[Any]:
    layouts = ("shard all", "mixed blocks", "mixed leaves", "keep all")
    cases = [
        Case(layout, accumulate=accumulate, dtypes=dtypes, grouping=grouping)
        for grouping, layout, accumulate, dtypes in pairs(
            groupings(group_size), layouts, ACCUMULATE, DTYPES[:2]
        )
    ]
    different = partial(in_different_groups, group_size=group_size)
    return [
        *cases,
        Case("shard all", recomputed=True, grouping=different),
        Case("shard each", offloaded=True, grouping=different),
        Case("mixed blocks", recomputed=True, accumulate="keep", grouping=different),
    ]


def test_every_group_layout_of_four_ranks_trains_as_a_single_process() -> None:
    results = run(4, all_faults, grouped_cases(2), timeout=170)
    assert [fault for rank in results for fault in rank] == []


def main_cases() -> list[Case]:
    """Each kind of groups once, groups of two and of four in turn."""
    ways = itertools.cycle((("shard each", "none"), ("mixed leaves", "keep"), ("shard each", "keep")))
    sizes = itertools.cycle((2, 4))
    return [
        Case(layout, accumulate=accumulate, grouping=pair[size == 4])
        for pair, size, (layout, accumulate) in zip(
            zip(groupings(2), groupings(4), strict=True), sizes, ways, strict=False
        )
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_main_group_layouts_of_eight_ranks_train_as_a_single_process() -> None:
    results = run(8, all_faults, main_cases(), timeout=170)
    assert [fault for rank in results for fault in rank] == []


def wrapped(grouping: Callable[[Plan], Plan] | None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    net: Any = Net(gated=False)
    if grouping is not None:
        modes, groups = LAYOUTS["mixed leaves"]
        plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
        net = OSDP(net, plan=grouping(plan))
    return net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True)


def step(net: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    """A step on the same batch everywhere; the norm of its gradients, which are clipped."""
    optimizer.zero_grad()
    loss_of(net(tokens(number, 2, 6)), tokens(number, 2, 6)).backward()
    if isinstance(net, OSDP):
        norm = net.clip_grad_norm_(0.1)
    else:
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return float(norm)


def clips_as_a_single_process() -> None:
    for grouping in groupings(2):
        (net, optimizer), (plain, its_optimizer) = wrapped(grouping), wrapped(None)
        for number in range(2):
            norms = step(net, optimizer, number), step(plain, its_optimizer, number)
            assert norms[0] == pytest.approx(norms[1], rel=1e-5), grouping
        for (name, ours), (_, theirs) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
            assert difference(whole(ours.detach()), theirs.detach()) < 1e-5, (grouping, name)


def test_gradients_are_clipped_alike_in_all_groups() -> None:
    run(4, clips_as_a_single_process)


def initialised_in_groups() -> None:
    values = []
    for grouping in (None, *groupings(2)):
        torch.manual_seed(40 + dist.get_rank())  # rank 0's counts
        with torch.device("meta"):
            net = Net(gated=False)
        modes, groups = LAYOUTS["mixed leaves"]
        plan = plan_by_hand(net, modes, dist.get_world_size(), groups=groups)
        apply(net, plan if grouping is None else grouping(plan))
        values.append({name: whole(p.detach()).clone() for name, p in net.named_parameters()})
    assert all(torch.equal(got[name], values[0][name]) for got in values[1:] for name in values[0])


def test_models_on_meta_start_alike_in_all_groups() -> None:
    run(4, initialised_in_groups)


def saved_in_groups(folder: str) -> list[torch.Tensor]:
    """Two steps, saved; what the weights are after two more."""
    want: list[torch.Tensor] = []
    for index, grouping in enumerate(groupings(2)):
        net, optimizer = wrapped(grouping)
        for number in range(2):
            step(net, optimizer, number)
        checkpoint.save(f"{folder}/{index}", net, optimizer)
        for number in range(2, 4):
            step(net, optimizer, number)
        want = [whole(parameter.detach()).clone() for parameter in net.parameters()]
    return want


def loaded_from_groups(folder: str, want: list[torch.Tensor]) -> None:
    """Each checkpoint goes on under another layout of the same ranks, or, on fewer, under the plain model."""
    others = groupings(2) if dist.get_world_size() == 4 else [None]
    for index in range(len(groupings(2))):
        net, optimizer = wrapped(others[(index + 1) % len(others)])
        checkpoint.load(f"{folder}/{index}", net, optimizer)
        for number in range(2, 4):
            step(net, optimizer, number)
        for parameter, expected in zip(net.parameters(), want, strict=True):
            assert difference(whole(parameter.detach()), expected) < 1e-5, index


def test_checkpoints_move_between_group_layouts(tmp_path: Path) -> None:
    want = run(4, saved_in_groups, str(tmp_path))[0]
    run(4, loaded_from_groups, str(tmp_path), want)
    run(2, loaded_from_groups, str(tmp_path), want)


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
