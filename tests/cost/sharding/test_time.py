"""What each collective costs device and link, in numbers that can be checked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from osdp.cost.sharding.problem import RootUnitCost, StepSettings, build_problem, cost_root
from osdp.cost.sharding.shard_groups import shard_groups_of
from osdp.cost.sharding.simulate import simulate_units
from osdp.cost.sharding.strategies import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHARD_OPTIMIZER,
    UnitStrategy,
    strategy_table,
)
from osdp.cost.sharding.time import compute_after, compute_until, passes, unit_seconds
from osdp.cost.sharding.unit_costs import cost_units
from osdp.cost.sharding.units import UnitCosts
from osdp.hardware.device_info import COLLECTIVES, DeviceInfo, Link
from osdp.model.training import Training
from tests.helpers.problems import random_device, random_model, random_problem

SETTINGS = StepSettings(
    blocking=True,
    scales=False,
    issues=False,
    overlap=0.75,
    mixed_overlap=0.25,
    compute_overlap=0.5,
    unit_overhead=0.125,
    gradient_overhead=0.0,
    pass_overhead=0.0,
    agreement=0.0,
    copy_bandwidth=math.inf,
    microbatches=1,
    reduce_each=True,
)


def units(modes: list[UnitStrategy], gather: list[float], reduce: list[float]) -> UnitCosts:
    """Units of one operator each that cost nothing but these seconds."""
    count = len(modes)
    known = {
        "start": np.arange(count),
        "stop": np.arange(count) + 1,
        "mode": np.array([strategy.mode for strategy in modes]),
        "recomputed": np.zeros(count, dtype=bool),
        "gather_seconds": np.array(gather),
        "reduce_seconds": np.array(reduce),
    }
    names = [field.name for field in dataclasses.fields(UnitCosts)]
    return UnitCosts(**{name: known.get(name, np.zeros(count)) for name in names})


def test_the_only_gradient_of_a_bucket_is_scaled_where_the_backend_only_sums() -> None:
    """It is the bucket, and a pass over it was not counted: a table of 9 MB took 1 ms of 28 longer."""
    one = dataclasses.replace(units([NO_SHARD], [0.0], [0.0]), bucket=np.array([8.0]))
    for scales, seconds in ((False, 0.0), (True, 2.0)):
        settings = dataclasses.replace(SETTINGS, scales=scales, copy_bandwidth=4.0)
        assert unit_seconds(one, RootUnitCost(), settings).silent.tolist() == [seconds]


def test_where_nothing_is_sharded_an_all_reduce_is_hidden_as_measured_alone() -> None:
    price = unit_seconds(units([NO_SHARD], [0.0], [4.0]), RootUnitCost(), SETTINGS)
    assert price.backward.tolist() == [1.0]  # a quarter of it is not hidden
    assert price.link.tolist() == [4.0]  # the link has it for all of its time
    assert price.link_after.tolist() == [3.0]
    assert price.forward.tolist() == [0.0]


def test_beside_sharded_units_less_is_hidden() -> None:
    price = unit_seconds(units([NO_SHARD, FULL_SHARD], [0.0, 1.0], [4.0, 2.0]), RootUnitCost(), SETTINGS)
    assert price.backward.tolist() == [3.0, 0.125 + 1.0 + 2.0]
    assert price.link.tolist() == [4.0, 1.0 + 2.0]
    assert price.link_after.tolist() == [1.0, 0.0]
    assert price.forward.tolist() == [0.0, 0.125 + 1.0]


def test_hooks_of_replicated_gradients_take_device_time() -> None:
    some = dataclasses.replace(
        units([NO_SHARD, FULL_SHARD], [0.0, 0.0], [0.0, 0.0]), num_gradients=np.full(2, 3.0)
    )
    hooked = dataclasses.replace(SETTINGS, unit_overhead=0.0, gradient_overhead=0.5)
    price = unit_seconds(some, RootUnitCost(), hooked)
    assert price.backward.tolist() == price.silent.tolist() == [1.5, 0.0]
    assert price.link.tolist() == [0.0, 0.0]


def test_hooks_of_accelerators_take_the_host_s_time() -> None:
    some = dataclasses.replace(
        units([NO_SHARD, FULL_SHARD], [0.0, 1.0], [4.0, 2.0]),
        num_gradients=np.full(2, 3.0),
        host_gather=np.array([0.0, 0.5]),
        host_reduce=np.array([0.25, 0.75]),
    )
    price = unit_seconds(
        some,
        RootUnitCost(),
        dataclasses.replace(SETTINGS, blocking=False, issues=True, gradient_overhead=0.5),
    )
    assert price.forward.tolist() == [0.0, 0.0]
    assert price.silent.tolist() == [0.0, 0.0]
    assert price.host_forward.tolist() == [0.0, 0.125 + 0.5]
    # The sharded unit is gathered again.
    assert price.host_silent.tolist() == [3 * 0.5, 0.125 + 0.5]
    assert price.host_backward.tolist() == [3 * 0.5 + 0.25, 0.125 + 0.5 + 0.75]


def test_a_pass_takes_as_long_as_the_host_issues_it() -> None:
    """Plans for a ResNet-50 on an H200 took 1.7 times what was predicted: its kernels wait for the host."""
    problem = random_problem(3, 2, 2, blocking=False)
    chain = len(problem.timeline.chain)
    root = cost_root(problem, (), problem.timeline.root, has_unit=False)
    forward, backward = 100.0, 200.0  # longer than all device work

    def step_seconds(mode: UnitStrategy, **host: float) -> float:
        launched = dataclasses.replace(problem, timeline=dataclasses.replace(problem.timeline, **host))
        return simulate_units(launched, [(0, chain, mode)], root).seconds

    slow = step_seconds(NO_SHARD, host_forward=forward, host_backward=backward)
    optimizer = simulate_units(problem, [(0, chain, NO_SHARD)], root).optimizer_seconds
    passes = problem.settings.microbatches
    assert slow - optimizer == pytest.approx(passes * (forward + backward), rel=1e-2)
    assert slow - optimizer > passes * (forward + backward), "hooks and collectives are issued as well"
    # Seconds that the host does not need are not counted.
    idle = step_seconds(NO_SHARD, host_forward=0.0, host_backward=0.0)
    assert step_seconds(NO_SHARD, host_forward=1e-6, host_backward=1e-6) == pytest.approx(idle, rel=1e-3)


def test_a_backward_that_only_accumulates_waits_for_what_is_gathered_again() -> None:
    """It was priced as its compute alone, as if FSDP2 kept units gathered over the microbatches."""
    links = tuple(Link(name, "world", 4, 1.0, 1e9) for name in COLLECTIVES)  # far longer than all compute
    problem = random_problem(3, 3, 2, blocking=False, microbatches=4, reduce_each=False, links=links)
    count = len(problem.timeline.chain)

    def silent(mode: UnitStrategy) -> float:
        starts = list(range(count))
        found = cost_units(
            problem.costs, starts, [*starts[1:], count], strategy_table([mode] * count), problem.device
        )
        return passes(problem, found, cost_root(problem, (), problem.timeline.root, has_unit=False)).silent

    assert silent(FULL_SHARD) == pytest.approx(count - 1, rel=0.2)
    assert silent(SHARD_GRAD_OP) < 1


def test_units_of_many_small_parameters_take_longer_to_gather_and_to_reduce() -> None:
    """FSDP2 views and copies each: a ResNet's unit of 60 tensors took 1.2 times what its bytes say."""

    def cost(overhead: float) -> UnitCosts:
        problem = random_problem(3, 2, 2, parameter_overhead=overhead)
        spans = [0, 0], [1, len(problem.timeline.chain)]
        strategies = strategy_table([FULL_SHARD, FULL_SHARD])
        return cost_units(problem.costs, *spans, strategies, problem.device)

    chain = random_problem(3, 2, 2).timeline.chain
    parameters = [[p for operator in span for p in operator.parameters] for span in (chain[:1], chain)]
    free, dear = cost(0.0), cost(0.5)
    gather, reduce = dear.gather_seconds - free.gather_seconds, dear.reduce_seconds - free.reduce_seconds
    assert gather == pytest.approx([0.5 * len(found) for found in parameters])
    assert reduce == pytest.approx([0.5 * sum(p.trainable for p in found) for found in parameters])


def test_what_was_stepped_in_shards_is_sent_at_once() -> None:
    """A latency was counted for each unit: a ResNet's step was priced at twice what it took."""
    problem = random_problem(3, 3, 2)
    count = len(problem.timeline.chain)

    def step_seconds(starts: list[int]) -> float:
        strategies = strategy_table([SHARD_OPTIMIZER] * len(starts))
        found = cost_units(problem.costs, starts, [*starts[1:], count], strategies, problem.device)
        return float(found.step_seconds.sum())

    assert step_seconds(list(range(count))) == pytest.approx(step_seconds([0]))
    link = problem.costs.shard_group.messages
    one = problem.costs.shard_group.exchange_seconds(np.array([2.0**20]), np.array([1.0]), 2.0**22)
    assert one.tolist() == pytest.approx([(2**20 + 2**16) / link.bandwidth + link.latency / 4])


@pytest.mark.parametrize(("nodes", "ranks", "times"), [(1, 8, 1), (2, 8, 8 * 8 / 15), (4, 1, 1)])
def test_parts_cross_a_network_once_for_each_rank_behind_it(nodes: int, ranks: int, times: float) -> None:
    """They were priced as a ring, which crosses it once: less than a quarter of what two nodes of 8 send."""
    links = tuple(Link(name, "world", nodes * ranks, 1e-4, 1e10) for name in COLLECTIVES)
    device = DeviceInfo(memory_limit=2**30, kind="cuda", nodes=nodes, devices_per_node=ranks, links=links)
    flat = shard_groups_of(device)[0]
    assert flat.messages is not None
    assert flat.messages.bandwidth == pytest.approx(1e10 / times)


def test_what_a_pass_takes_outside_the_units() -> None:
    problem = random_problem(3, 2, 2)
    chain, outside = len(problem.timeline.chain), problem.timeline.root
    settings = dataclasses.replace(problem.settings, gradient_overhead=0.0, pass_overhead=0.0, agreement=0.0)

    def step_seconds(mode: UnitStrategy, **changed: float) -> float:
        changed_problem = dataclasses.replace(problem, settings=dataclasses.replace(settings, **changed))
        root = cost_root(changed_problem, (), outside, has_unit=False)
        return simulate_units(changed_problem, [(0, chain, mode)], root).seconds

    def more(mode: UnitStrategy, **changed: float) -> float:
        return step_seconds(mode, **changed) - step_seconds(mode)

    passes, reductions = settings.microbatches, settings.reductions
    replicated = sum(p.trainable for operator in outside for p in operator.parameters)
    assert more(NO_SHARD, pass_overhead=8.0) == pytest.approx(8.0 * passes)
    assert more(FULL_SHARD, gradient_overhead=8.0) == pytest.approx(8.0 * replicated * passes)
    assert more(FULL_SHARD, agreement=8.0) == pytest.approx(8.0 * reductions)
    assert more(NO_SHARD, agreement=8.0) == 0


def test_compute_beside_a_busy_link_lengthens_it_by_what_is_not_hidden() -> None:
    problem = random_problem(3, 3, 0)
    timeline = problem.timeline
    backward, forward = float(timeline.backward_seconds.sum()), float(timeline.forward_seconds.sum())
    # From the start of backward on, all compute that is not before the cut runs beside the link: half counts.
    ideal = dataclasses.replace(SETTINGS, compute_overlap=1.0)
    until, after = compute_until(timeline, ideal), compute_after(timeline, ideal)
    np.testing.assert_allclose(compute_until(timeline, SETTINGS), (until + backward) / 2)
    np.testing.assert_allclose(compute_after(timeline, SETTINGS), (after + forward) / 2)
    # A link that nothing is hidden behind is a third thing to do, after all compute.
    serial = dataclasses.replace(SETTINGS, compute_overlap=0.0)
    np.testing.assert_allclose(compute_until(timeline, serial), backward)


def test_only_plans_that_shard_nothing_step_plain_tensors() -> None:
    problem = random_problem(3, 2, 2)
    optimizer, chain = problem.profile.optimizer, problem.timeline.chain
    operators = (*chain, *problem.timeline.root)
    trainable = [p for operator in operators for p in operator.parameters if p.trainable]
    root = cost_root(problem, (), problem.timeline.root, has_unit=False)
    plain = simulate_units(problem, [(0, len(chain), NO_SHARD)], root)
    nbytes = sum(math.prod(p.shape) * 4 for p in trainable)
    expected = optimizer.per_tensor * len(trainable) + optimizer.per_byte * nbytes
    assert plain.optimizer_seconds == pytest.approx(expected)
    mixed = simulate_units(problem, [(0, 1, FULL_SHARD), (1, len(chain), NO_SHARD)], root)
    assert mixed.optimizer_seconds > optimizer.per_dtensor * len(trainable)


def test_ranks_that_share_a_core_step_their_optimizers_one_after_the_other() -> None:
    """An optimizer is measured in CPU time, as compute is."""
    (desc, profile), devices, training = random_model(3, 2, 2), random_device(3), Training(optimizer="AdamW")
    measured = dataclasses.replace(profile, measured=True)

    def optimizer_seconds(ranks_per_core: int) -> float:
        shared = dataclasses.replace(devices, ranks_per_core=ranks_per_core)
        found = build_problem(desc, measured, shared, training)
        root = cost_root(found, (), found.timeline.root, has_unit=False)
        return simulate_units(found, [(0, len(found.timeline.chain), NO_SHARD)], root).optimizer_seconds

    assert optimizer_seconds(3) == pytest.approx(3 * optimizer_seconds(1))
