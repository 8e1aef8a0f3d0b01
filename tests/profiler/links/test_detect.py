"""Measured collectives: the fit, the wiring, and real groups of two and four ranks."""

import gc
import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from osdp.cost.sharding.shard_groups import shard_groups_of
from osdp.hardware.device_info import COLLECTIVES, DOUBTFUL_RESIDUAL, DeviceInfo, Link
from osdp.plan.sharding import Route
from osdp.profiler.links import detect as collectives
from osdp.profiler.links import machine, toy_model
from osdp.profiler.links.fitting import fit, fit_links, with_mixed_route, without_parameters
from osdp.profiler.links.fsdp_probe import UNITS, Probe, StepTimes, UnitTimes
from osdp.profiler.links.overlap import OverlapProbe, hidden_part
from osdp.profiler.links.timing import WALL_CLOCK, fast_quartile, timing_beside, trimmed_mean
from tests.helpers.distributed import run

SIZES = [2**power for power in (16, 18, 20, 22, 24)]
FEW = tuple(2**power for power in (12, 14, 16))
#: Times of a unit by bytes.
_SAMPLES = {b: UnitTimes(1e-3 + b / 1e9, 1e-4, 2e-3 + b / 2e9, 3e-3 + b / 4e9) for b in SIZES}


@given(latency=st.floats(1e-6, 1e-1), bandwidth=st.floats(1e6, 1e12))
def test_fit_recovers_a_line(latency: float, bandwidth: float) -> None:
    seconds = [latency + size / bandwidth for size in SIZES]
    found = fit(SIZES, seconds)
    for size, true in zip(SIZES, seconds, strict=True):
        assert found[0] + size / found[1] == pytest.approx(true, rel=1e-6)
    assert found[2] < 1e-6


@given(st.lists(st.floats(1e-6, 10.0), min_size=5, max_size=5))
def test_fit_is_physical_and_says_how_wrong_it_is(seconds: list[float]) -> None:
    latency, bandwidth, residual = fit(SIZES, seconds)
    assert latency >= 0 and bandwidth > 0 and math.isfinite(bandwidth)
    errors = [abs((latency + b / bandwidth) / t - 1) for b, t in zip(SIZES, seconds, strict=True)]
    assert residual == pytest.approx(max(errors))


def test_one_odd_time_at_either_end_does_not_decide_the_fit() -> None:
    true = [1e-3 + size / 1e9 for size in SIZES]
    # Relative errors alone would let a small message that passed at once bend the whole line.
    latency, bandwidth, _ = fit(SIZES, [true[0] / 3, *true[1:]])
    assert latency + SIZES[-1] / bandwidth == pytest.approx(true[-1], rel=0.05)
    # Absolute ones would let the largest do it.
    latency, bandwidth, _ = fit(SIZES, [*true[:-1], true[-1] * 1.3])
    assert latency + SIZES[0] / bandwidth == pytest.approx(true[0], rel=0.5)


def test_large_messages_that_take_more_than_their_share_leave_the_latency() -> None:
    """Beside other programs a latency was once fitted to 0, and the search made dozens of tiny units."""
    seconds = [1e-3 + size / 1e9 for size in SIZES]
    seconds[-1] *= 6
    latency, bandwidth, residual = fit(SIZES, seconds)
    assert latency == pytest.approx(1e-3, rel=0.1)
    assert residual > DOUBTFUL_RESIDUAL
    link = Link("all_gather", "world", 2, latency, bandwidth, residual)
    device = DeviceInfo(memory_limit=2**30, devices_per_node=2, links=(link,), contention=2.0)
    load, doubt = device.doubts
    assert load.startswith("other programs took 50% of a rank's core")
    assert doubt.startswith(f"times of all_gather in world are up to {residual:.0%} off the line")


def test_times_of_a_busy_moment_do_not_count_where_the_fast_ones_do() -> None:
    quiet, disturbed = _steps_of(UnitTimes(1e-3, 1e-4, 2e-3, 3e-3)), StepTimes(*[1.0] * 5)
    steps = [quiet, quiet, disturbed, disturbed, disturbed]
    assert UnitTimes.of(steps, fast_quartile).all_reduce == pytest.approx(3e-3)
    assert UnitTimes.of(steps, trimmed_mean).all_reduce > 0.1
    assert UnitTimes.of([quiet], fast_quartile).unshard == pytest.approx(1e-3)


def test_a_step_takes_the_mean_of_times_that_are_one_of_two() -> None:
    """Threads that gloo wakes at once or late: the median of these is one of both, a step has either."""
    assert trimmed_mean([1.0, 1.0, 1.0, 3.0, 3.0]) == pytest.approx(5 / 3)
    assert trimmed_mean([1.0] * 10 + [100.0] * 3) == pytest.approx(1.0)
    assert trimmed_mean([2.0]) == 2.0


def test_ranks_of_a_core_are_counted_not_measured(tmp_path: Path) -> None:
    """Beside other programs three ranks were once found on a core that one rank had to itself."""
    own, other = machine.CoreShare("a", "a", (0,)), machine.CoreShare("a", "a", (1,))
    assert machine.ranks_per_core([own, other]) == 1
    assert machine.ranks_per_core([own, own, other]) == 2
    assert machine.ranks_per_core([own, machine.CoreShare("b", "b", (0,))]) == 1
    free = machine.CoreShare("a", "a", tuple(range(8)))
    on_cores = [machine.CoreShare("a", "a", (core,)) for core in range(8)]
    assert machine.ranks_per_core([free, *on_cores]) == 1.125
    # Containers of one machine share its cores, and each has a quota of its own.
    assert machine.ranks_per_core([own, machine.CoreShare("a", "b", (0,))]) == 2
    limited = [machine.CoreShare("a", host, tuple(range(8)), quota=2.0) for host in "aaaab"]
    assert machine.ranks_per_core(limited) == 2
    cpu_max = tmp_path / "cpu.max"
    assert machine.cpu_quota(cpu_max) is None
    for text, quota in (("max 100000", None), ("150000 100000", 1.5)):
        cpu_max.write_text(text)
        assert machine.cpu_quota(cpu_max) == quota


def test_links_take_their_times() -> None:
    links = fit_links("inside 8", 8, {Route.FLAT: _SAMPLES})
    assert [(link.collective, link.group, link.size) for link in links] == [
        (name, "inside 8", 8) for name in COLLECTIVES
    ]
    assert [link.latency for link in links] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert [link.bandwidth for link in links] == pytest.approx([1e9, 2e9, 4e9])


def test_between_machines_the_largest_unit_decides_the_rate() -> None:
    """A token bucket lets the first bytes after a pause pass at once: units seemed faster than the wire."""
    rate, burst = 48e6, 2**18
    seconds = {size: max(7e-4, (size - burst) / rate) for size in (2**10, 2**20, 2**21, 2**22)}
    times = {size: UnitTimes(took, 0.0, took, took) for size, took in seconds.items()}
    inside, between = (
        fit_links("world", 2, {Route.FLAT: times}, on_one_machine=where)[0] for where in (True, False)
    )
    assert between.seconds(2**22) == pytest.approx(seconds[2**22])
    assert inside.seconds(2**22) < 0.95 * seconds[2**22]
    assert inside.latency == between.latency == pytest.approx(7e-4, rel=0.05)


def test_the_largest_unit_decides_above_the_least_latency_as_well() -> None:
    sizes, seconds = (1, 1000, 2000, 4000), (1.0, 2.8, 3.2, 6.0)
    least = seconds[0] - seconds[3] / sizes[3]
    for decides in (False, True):
        latency, bandwidth, _ = fit(sizes, seconds, largest_decides=decides)
        assert latency > least
        assert (latency + sizes[3] / bandwidth == pytest.approx(seconds[3])) is decides


def test_the_backends_own_reduce_scatter_stays_known_beside_a_faster_exchange() -> None:
    slow = {b: UnitTimes(1e-3 + b / 1e9, 1e-4, 4e-3 + b / 1e9, 3e-3 + b / 4e9) for b in SIZES}
    fast = {b: UnitTimes(1e-3 + b / 1e9, 1e-4, 2e-3 + b / 2e9, 3e-3 + b / 4e9) for b in SIZES}
    links = fit_links("world", 4, {Route.FLAT: slow, Route.EXCHANGE: fast})
    device = DeviceInfo(memory_limit=2**30, devices_per_node=4, links=tuple(links))
    assert device.link("reduce_scatter").by_exchange
    assert device.link("reduce_scatter").latency == pytest.approx(2e-3)
    chosen, own = shard_groups_of(device)
    assert (chosen.route, chosen.searched) == (Route.EXCHANGE, True)
    assert (own.route, own.searched) == (Route.FLAT, False)
    assert own.reduce.latency == pytest.approx(4e-3)
    inside = fit_links("inside 2", 2, {Route.FLAT: slow, Route.EXCHANGE: fast})
    assert len(inside) == 3


def test_gathers_by_messages_are_taken_where_they_are_faster() -> None:
    # gloo's own reach two thirds of the rate between two hosts, every now and then.
    own = {b: UnitTimes(2e-3 + b / 6e8, 1e-4, 4e-3 + b / 1e9, 3e-3 + b / 4e9) for b in SIZES}
    both = {b: replace(times, unshard=1e-3 + b / 9e8, reduce=2e-3 + b / 2e9) for b, times in own.items()}
    times = with_mixed_route({Route.FLAT: own, Route.EXCHANGE_ALL: both})
    # What is timed on two routes says what the third takes, which has the gathers of one of them.
    assert times[Route.EXCHANGE] == {b: replace(each, reduce=both[b].reduce) for b, each in own.items()}
    slow = {b: replace(times, unshard=1.0) for b, times in both.items()}
    links = fit_links("world", 4, with_mixed_route({Route.FLAT: own, Route.EXCHANGE_ALL: slow}))
    assert [link.by_exchange for link in links] == [False, True, False, False]
    device = DeviceInfo(memory_limit=2**30, devices_per_node=4, links=tuple(fit_links("world", 4, times)))
    chosen, flat = shard_groups_of(device)
    assert (chosen.route, chosen.gather.latency) == (Route.EXCHANGE_ALL, pytest.approx(1e-3))
    assert chosen.messages is chosen.gather and chosen.gather_buffers == 0
    assert (flat.route, flat.searched, flat.gather.latency) == (Route.FLAT, False, pytest.approx(2e-3))
    as_fast = {b: replace(each, reduce=both[b].reduce * 1.01) for b, each in own.items()}
    links = fit_links("world", 4, with_mixed_route({Route.FLAT: own, Route.EXCHANGE_ALL: as_fast}))
    assert [link.by_exchange for link in links[:2]] == [True, True]
    # Optimizer shards are sent by messages on any route.
    assert flat.messages is chosen.gather
    inside = fit_links("inside 2", 2, times)
    assert [link.by_exchange for link in inside] == [True, True, False]


def test_a_time_that_noise_swallowed_does_not_count() -> None:
    samples = _SAMPLES | {SIZES[0]: UnitTimes(0.0, 1e-4, 0.0, 3e-3)}
    links = fit_links("world", 8, {Route.FLAT: samples})
    assert [link.bandwidth for link in links[:2]] == pytest.approx([1e9, 2e9])
    nothing = dict.fromkeys(SIZES, UnitTimes(0.0, 0.0, 0.0, 0.0))
    assert all(link.seconds(SIZES[-1]) < 1e-6 for link in fit_links("world", 8, {Route.FLAT: nothing}))


def test_hidden_part_stays_in_its_range() -> None:
    assert hidden_part(1.0, 1.0, 0.5) == 1.0
    assert hidden_part(1.0, 1.0, 3.0) == 0.0
    assert hidden_part(1.0, 0.0, 1.0) == 0.0


def test_one_device_needs_no_group() -> None:
    info = DeviceInfo.detect("1GiB", device="cpu")
    assert (info.memory_limit, info.world_size, info.links, info.kind) == (2**30, 1, (), "cpu")
    assert info.flops > 0 and info.memory_bandwidth == 2 * info.copy_bandwidth > 0
    assert info.measured


def test_memory_is_what_is_free_divided_among_ranks(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:   32 kB\n")
    assert machine.available_memory(torch.device("cpu"), 2, meminfo) == 16 * 1024
    with pytest.raises(ValueError, match=r"give memory_limit='8GiB'"):
        machine.available_memory(torch.device("cpu"), 2, tmp_path / "nothing")


def test_a_control_group_is_full_before_the_machine_is(tmp_path: Path) -> None:
    """A job that was given 64 GiB of a machine of 1 TiB planned for all of it, and was killed."""
    cgroups, mount = tmp_path / "cgroup", tmp_path / "mount"
    left = partial(machine.memory_left_by_control_groups, cgroups, mount)
    assert left() is None
    step = mount / "job" / "step"
    step.mkdir(parents=True)
    cgroups.write_text("3:cpu:/elsewhere\n0::/job/step\n")
    assert left() is None
    for folder, limit in ((step, "max"), (step.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert left() == 1000 - 700 + 150
    # The first version, in a container that sees its own group as the root.
    cgroups.write_text("4:cpu,memory:/docker/0123\n")
    root = mount / "memory"
    root.mkdir()
    (root / "memory.limit_in_bytes").write_text("400\n")
    (root / "memory.usage_in_bytes").write_text("500\n")
    (root / "memory.stat").write_text("total_inactive_file 0\n")
    assert left() == 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:   32 kB\n")
    with mock.patch.object(machine, "memory_left_by_control_groups", lambda: 10 * 1024):
        assert machine.available_memory(torch.device("cpu"), 2, meminfo) == 5 * 1024


def draws_before_and_after_detection() -> list[bool]:
    before = torch.get_rng_state()
    DeviceInfo.detect("1GiB", sizes=FEW, repeats=2, seconds=0.2, cache_dir=None)
    return [torch.equal(before, torch.get_rng_state())]


def test_measuring_draws_none_of_the_users_random_numbers() -> None:
    """A first start, which measures, and a second one trained with other dropout masks under one seed."""
    assert run(2, draws_before_and_after_detection) == [[True]] * 2


def links_found_without_gradients() -> int:
    with torch.no_grad():
        return len(DeviceInfo.detect("1GiB", sizes=FEW, repeats=2, seconds=0.2, cache_dir=None).links)


def test_links_are_measured_whatever_the_caller_has_switched_off() -> None:
    """``with torch.no_grad(): OSDP(...)`` ended in "does not require grad", where FSDP(model) works."""
    assert min(run(2, links_found_without_gradients)) >= len(COLLECTIVES)


@pytest.mark.parametrize(
    "limit, error", [("eight", "cannot read"), (-1, "cannot read"), ("0GiB", "positive")]
)
def test_bad_limits(limit, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        DeviceInfo.detect(limit, device="cpu")


def test_the_latency_of_a_unit_is_not_that_of_its_parameters() -> None:
    """They are counted for each unit, however many it has: a ResNet's has 60, a timed one twelve."""
    gather = Link("all_gather", "world", 2, latency=1e-3, bandwidth=1e9)
    assert without_parameters(gather, 2e-5).latency == pytest.approx(1e-3 - 12 * 2e-5)
    assert without_parameters(gather, 1e-3).latency == pytest.approx(2.5e-4)  # noise never makes units free
    whole = Link("all_reduce", "world", 2, latency=1e-3, bandwidth=1e9)
    assert without_parameters(whole, 2e-5) == whole


def _detected() -> tuple[DeviceInfo, list[str]]:
    info = DeviceInfo.detect("64MiB", sizes=FEW, repeats=3, seconds=0.2)
    refused = []
    for wrong in ({"sizes": (1024,)}, {"sizes": FEW[::-1]}, {"devices_per_node": 3}):
        try:
            DeviceInfo.detect("1GiB", **wrong)
        except ValueError as error:
            refused.append(str(error))
    return info, refused


def _units_left() -> int:
    gc.disable()
    DeviceInfo.detect("64MiB", sizes=FEW, repeats=2, seconds=0.1)
    return sum(isinstance(each, toy_model.ToyUnit) for each in gc.get_objects())


def test_nothing_of_what_was_timed_stays() -> None:
    """40 MiB of wrapped units, which refer to themselves in circles, lay beside a model of 24 MiB."""
    assert run(2, _units_left) == [0, 0]


@pytest.mark.alone
def test_two_ranks_agree() -> None:
    (info, refused), (other, _) = run(2, _detected)
    assert info == other
    assert (info.nodes, info.devices_per_node, info.blocking, info.measured) == (1, 2, True, True)
    assert info.copies_messages
    assert [(link.collective, link.group, link.size) for link in info.links[:3]] == [
        (name, "world", 2) for name in COLLECTIVES
    ]
    # The backend's own collectives are known even where exchanges are faster.
    exchanged = [name for name in COLLECTIVES[:2] if info.link(name).by_exchange]
    for name in COLLECTIVES[:2]:
        own = [link for link in info.links if link.collective == name and not link.by_exchange]
        assert len(own) == 1
    assert len(info.links) == 3 + len(exchanged)
    assert all(link.latency + link.residual > 0 for link in info.links)
    assert 0 < info.unit_overhead < info.link("all_gather").seconds(2**20)
    assert info.gradient_overhead >= 0 and info.pass_overhead >= 0
    assert 0 <= info.overlap_spread <= 0.5 and 0 <= info.overhead_spread < math.inf
    assert 0 < info.parameter_overhead < info.link("all_gather").seconds(2**20)
    assert DeviceInfo(memory_limit=2**26).memory_limit == info.memory_limit
    assert len(refused) == 3 and "ascending" in refused[0] and "nodes of 3" in refused[2]


def _on_two_nodes() -> tuple[DeviceInfo, list[tuple[str, int]], str]:
    from torch.distributed.device_mesh import init_device_mesh

    told = collectives._groups(collectives.world_mesh(None, "cpu", 4), (2,), True)
    mesh = init_device_mesh("cpu", (2, 2))
    refused = ""
    try:
        DeviceInfo.detect("64MiB", mesh=mesh, devices_per_node=4)
    except ValueError as error:
        refused = str(error)
    # Which links there are is asked, not how fast they are.
    with mock.patch.object(toy_model, "_SWEPT", 1):
        info = DeviceInfo.detect("64MiB", mesh=mesh, sizes=FEW, repeats=2, seconds=0.1)
    return info, [(name, group.mesh.size()) for name, group in told.items()], refused


def test_two_nodes_have_links_inside_and_between() -> None:
    answers = run(4, _on_two_nodes)
    info, told, refused = answers[0]
    assert all(other == info for other, _, _ in answers)
    assert (info.nodes, info.devices_per_node) == (2, 2)
    assert list(dict.fromkeys((link.group, link.size) for link in info.links)) == told
    assert told == [("world", 4), ("inside 2", 2), ("across 2", 2), ("two_step 2", 4)]
    assert len(info.links) == 12 + sum(info.link(name).by_exchange for name in COLLECTIVES[:2])
    assert info.group_sizes == (2,)
    assert "is 4, but axis 1 of the mesh has 2" in refused


def _all_reduces(probe: Probe) -> int:
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        probe.step()
    return reduce.call_count


def _probed() -> tuple[list[int], UnitTimes, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
    group = mesh.get_group()
    counts = collectives._affordable_counts(
        collectives._Group(mesh), Route.FLAT, group, cpu, SIZES, 5, 0.0, time.perf_counter
    )
    probe = Probe(2**20, mesh, cpu)
    times = UnitTimes.of([probe.step() for _ in range(5)], trimmed_mean)
    # As between machines: each timed all-reduce, and one on top for what passes at once.
    counts_of = [_all_reduces(Probe(2**20, mesh, cpu, drains=drains)) for drains in (False, True)]
    assert counts_of[1] - counts_of[0] == UNITS
    beside = OverlapProbe(dist.group.WORLD, cpu, repeats=2)
    overlaps = [beside.overlap(), beside.mixed_overlap(), beside.compute_overlap()]
    return [one.nbytes for one in counts], times, overlaps


def test_time_that_small_sizes_do_not_use_goes_to_the_large_ones() -> None:
    """Of five seconds the units of 16 MiB, which decide the rate, got one: two samples of them."""
    assert collectives.counts_within([0.01, 0.02, 0.1, 0.3], 5.0, 12) == [12, 12, 12, 11]
    assert collectives.counts_within([0.01, 2.0, 3.0], 1.0, 12) == [12, 2, 2]


def test_no_time_left_still_measures_three_sizes_and_probes_leave_nothing_out() -> None:
    answers = run(2, _probed)
    sizes, times, overlaps = answers[0]
    # With a third size, half of the larger.
    assert len(sizes) == 3
    assert all(
        abs(size / wanted - 1) < 0.1
        for size, wanted in zip(sizes, (SIZES[0], SIZES[2] // 2, SIZES[2]), strict=True)
    )
    # Differences of times: of a machine that is busy with other things, noise may leave nothing of one.
    assert min(times.hooks, times.all_reduce) > 0 and min(times.unshard, times.reduce) >= 0
    assert len(overlaps) == 3 and all(0 <= overlap <= 1 for overlap in overlaps)
    assert answers[1][2] == overlaps, "all ranks know the same"


def _on_named_hosts(names: str) -> tuple[int, int]:
    with mock.patch("socket.gethostname", lambda: names[dist.get_rank()]):
        return collectives.resolve_shape(None, None)


def _on_all_named_hosts() -> list[tuple[int, int]]:
    return [_on_named_hosts(names) for names in ("aaaa", "aabb", "abcd", "abbb", "abab")]


def _given_samples(group, *_) -> dict[Route, dict[int, list[StepTimes]]]:
    return {
        route: {nbytes: [_steps_of(times)] for nbytes, times in _SAMPLES.items()} for route in group.routes
    }


def _steps_of(times: UnitTimes) -> StepTimes:
    """The passes of units that take these times."""
    forward, backward = times.hooks, times.hooks + times.reduce
    return StepTimes(forward + times.unshard, backward + times.unshard, forward, backward, times.all_reduce)


def _detected_after_a_disturbance() -> DeviceInfo:
    disturbed = {nbytes: UnitTimes(*4 * [1.0]) for nbytes in SIZES[-1:]}
    attempts = iter((_SAMPLES | disturbed, _SAMPLES))

    def time_units(group, *_) -> dict[Route, dict[int, list[StepTimes]]]:
        seen = {nbytes: [_steps_of(times)] for nbytes, times in next(attempts).items()}
        return dict.fromkeys(group.routes, seen)

    with (
        mock.patch.object(collectives, "_time_units", time_units),
        mock.patch.object(collectives, "measure_contention", lambda *_: 1.0),
        mock.patch.object(OverlapProbe, "_hidden_part", lambda *_: 0.0),
    ):
        return DeviceInfo.detect("1GiB", sizes=SIZES, repeats=2, seconds=0.1, cache_dir=None)


def test_links_that_fit_no_line_are_measured_again() -> None:
    info = run(2, _detected_after_a_disturbance)[0]
    seconds = info.link("all_reduce").seconds(SIZES[-1])
    assert seconds == pytest.approx(_SAMPLES[SIZES[-1]].all_reduce, rel=DOUBTFUL_RESIDUAL)


def _detected_on_named_hosts() -> list[tuple[int, set[tuple[str, int]]]]:
    """World size and links where each rank has a machine of its own, and where two share one."""
    found = []
    for names in ("abcd", "aabb"):
        with (
            mock.patch("socket.gethostname", lambda names=names: names[dist.get_rank()]),
            mock.patch.object(collectives, "_time_units", _given_samples),
            mock.patch.object(OverlapProbe, "_hidden_part", lambda *_: 0.0),
        ):
            info = DeviceInfo.detect("1GiB", sizes=(1024, 2048, 4096), repeats=2, seconds=0.1)
        found.append((info.world_size, {(link.group, link.size) for link in info.links}))
    return found


def test_the_links_of_machines_told_by_name_join_all_ranks() -> None:
    """The world was once the ranks of one machine; two machines of one device each had no links at all."""
    in_pairs = {("world", 4), ("inside 2", 2), ("across 2", 2), ("two_step 2", 4)}
    assert run(4, _detected_on_named_hosts) == [[(4, {("world", 4)}), (4, in_pairs)]] * 4


def test_machines_are_told_by_their_names() -> None:
    answers = run(4, _on_all_named_hosts)
    assert all(answer == [(1, 4), (2, 2), (4, 1), (1, 4), (1, 4)] for answer in answers)


def test_beside_other_programs_ranks_of_one_machine_count_their_cpu_time() -> None:
    """Each message there waits for the scheduler: links were fitted to 14 ms and no bytes per second."""
    assert timing_beside(False, True, 1) is WALL_CLOCK
    alone = timing_beside(True, True, 1)
    began = alone.clock()
    time.sleep(0.3)
    assert alone.clock() - began < 0.2, "it stands still while the process waits"
    assert timing_beside(True, True, 3).clock() > 2 * alone.clock(), "a core works for all of its ranks"
    between = timing_beside(True, False, 1)
    assert between.clock is time.perf_counter and between.typical is fast_quartile


def _where_ranks_are() -> tuple[bool, bool]:
    with mock.patch("socket.gethostname", lambda: str(dist.get_rank())):
        apart = machine.on_one_machine(dist.group.WORLD)
    return machine.on_one_machine(dist.group.WORLD), apart


def _ranks_per_core_in_containers() -> float:
    with mock.patch("socket.gethostname", lambda: str(dist.get_rank())):
        return machine.find_ranks_per_core(torch.device("cpu"), [dist.group.WORLD])


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="names a machine on Linux")
def test_containers_of_one_machine_share_its_cores() -> None:
    """On two hosts of two ranks, emulated on two cores, compute was predicted at half of what it took."""
    cores = len(os.sched_getaffinity(0))
    assert run(4, _ranks_per_core_in_containers) == [max(1.0, 4 / cores)] * 4


def _ranks_in_containers() -> int:
    with mock.patch("socket.gethostname", lambda: str(dist.get_rank())):
        return machine.ranks_on_this_machine(dist.group.WORLD)


def _limit_in_containers(meminfo: str) -> int:
    """What a container plans for that nobody has given a limit."""
    available = partial(machine.available_memory, meminfo=Path(meminfo))
    with (
        mock.patch("socket.gethostname", lambda: str(dist.get_rank())),
        mock.patch.object(machine, "memory_left_by_control_groups", lambda: None),
        mock.patch.object(collectives, "available_memory", available),
        mock.patch.object(collectives, "_measure_groups", lambda *_: DeviceInfo(memory_limit=1, nodes=2)),
    ):
        return DeviceInfo.detect(cache_dir=None).memory_limit


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="names a machine on Linux")
def test_containers_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    """Each of eight containers without a limit planned for all of the machine, and was killed."""
    meminfo, cpu = tmp_path / "meminfo", torch.device("cpu")
    meminfo.write_text("MemAvailable:   32 kB\n")
    for left, expected in ((None, 8 * 1024), (10 * 1024, 8 * 1024), (6 * 1024, 6 * 1024)):
        with mock.patch.object(machine, "memory_left_by_control_groups", lambda left=left: left):
            assert machine.available_memory(cpu, 1, meminfo, on_machine=4) == expected
    assert run(2, _ranks_in_containers) == [2, 2]
    assert run(2, _limit_in_containers, str(meminfo)) == [16 * 1024] * 2


def test_ranks_with_different_host_names_are_not_on_one_machine() -> None:
    assert run(2, _where_ranks_are) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("rank", "used", "chosen", "expected"),
    [("1", False, 0, 1), ("1", True, 0, 0), ("1", False, 3, 3), ("9", False, 0, 0)],
)
def test_each_process_measures_on_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, used: bool, chosen: int, expected: int
) -> None:
    """All measured on GPU 0, where nobody had called torch.cuda.set_device."""
    current = [chosen]
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    assert collectives.resolve_where("cuda", None) == torch.device("cuda", expected)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_probes_send_the_same_bytes_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    """Lightning sets it around configure_model: all-reduces of half the bytes made links twice as fast."""
    before, here = torch.get_default_dtype(), torch.device("cpu")
    torch.set_default_dtype(default)
    try:
        unit = toy_model.ToyUnit(2**20, here, toy_model.ComputeClock(here, time.perf_counter))
        probe = OverlapProbe(mock.Mock(), here, 2**20)
    finally:
        torch.set_default_dtype(before)
    assert sum(parameter.nbytes for parameter in unit.parameters()) == pytest.approx(2**20, rel=0.02)
    assert probe._bucket.nbytes == 2**20
