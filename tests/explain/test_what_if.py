"""Planning again from a plan finds what planning anew finds, where nothing has to be scaled."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from osdp import DeviceInfo, InfeasibleError, Link, ModelDesc, Plan, Training, make_plan
from osdp.cluster.devices import device_info_of, parse_devices
from osdp.explain.difference import diff
from osdp.explain.frontier import batch_frontier, limit_frontier, ranks_frontier
from osdp.explain.scaling import device_with_bandwidth, device_with_ranks
from osdp.explain.what_if import what_if
from osdp.integrations.huggingface.models import language_model, token_batch
from osdp.report.explanation_table import difference_table
from tests.explain.conftest import FIELDS, device


def test_another_limit(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.9)
    less = what_if(plan, memory_limit=int(0.6 * plan.memory_limit))
    assert plan.basis is not None
    fresh = make_plan(None, plan.basis.model_desc, device(int(0.6 * plan.memory_limit)))
    assert less == fresh
    assert less.predicted.peak_bytes <= less.memory_limit < plan.predicted.peak_bytes
    with pytest.raises(InfeasibleError):
        what_if(plan, memory_limit="1MiB")


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_another_batch_of_an_estimate_is_the_estimate_at_that_batch(
    planned: Callable[..., Plan], batch: int
) -> None:
    plan = planned(fraction=20.0)
    other = what_if(plan, local_batch=batch)
    desc = ModelDesc.from_module(language_model("gpt2", FIELDS["gpt2"]), token_batch(batch, 32))
    fresh = make_plan(None, desc, device(plan.memory_limit))
    assert other.modes == fresh.modes
    assert other.predicted.peak_bytes == pytest.approx(fresh.predicted.peak_bytes, rel=0.02)
    assert other.predicted.step_seconds == pytest.approx(fresh.predicted.step_seconds, rel=5e-3)
    # The same roofline: a factor between the two batches would be one of measurements.
    assert not [note for note in other.notes if note.startswith("not measured")]


def test_another_optimizer(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=20.0)
    assert plan.basis is not None
    other = what_if(plan, optimizer="SGD")
    training = Training(optimizer="SGD", local_batch=plan.local_batch)
    fresh = make_plan(None, plan.basis.model_desc, device(plan.memory_limit), training=training)
    assert other.predicted.peak_bytes == fresh.predicted.peak_bytes
    assert other.modes == fresh.modes
    assert other.predicted.optimizer_seconds < plan.predicted.optimizer_seconds


def test_links_of_more_ranks_are_those_of_a_longer_ring() -> None:
    # n - 1 steps, or up and down a tree, which NCCL builds for all-reduces; (n - 1) / n of the bytes.
    for kind, steps in (("cpu", (7, 7)), ("device", (7, 6))):
        few = replace(device(ranks=4, bandwidth=1e9), kind=kind)
        more = device_with_ranks(few, 8)
        for name, number in zip(("all_gather", "all_reduce"), steps, strict=True):
            link, before = more.link(name), few.link(name)
            assert (more.world_size, link.size) == (8, 8)
            assert link.latency == pytest.approx(before.latency * number / 3)
            assert link.bandwidth == pytest.approx(before.bandwidth * (3 / 4) / (7 / 8))
    with pytest.raises(ValueError, match="cannot be told from one device"):
        device_with_ranks(replace(device(), devices_per_node=1, links=()), 2)


def specified(text: str) -> DeviceInfo:
    return device_info_of(parse_devices(text))


@pytest.mark.parametrize(("before", "after"), [("4", "2"), ("2", "4"), ("2", "16")])
def test_more_or_fewer_nodes_have_the_links_that_they_are_specified_with(before: str, after: str) -> None:
    """Groups were dropped, so that two-step routes and HYBRID_SHARD were gone with other numbers of nodes."""
    found = device_with_ranks(specified(f"{before} x 8 x H100, 400 Gbit/s"), 8 * int(after))
    wanted = specified(f"{after} x 8 x H100, 400 Gbit/s")
    assert {(link.collective, link.group) for link in found.links} == {
        (link.collective, link.group) for link in wanted.links
    }
    for link in wanted.links:
        other = found.link(link.collective, link.group)
        assert (other.size, other.latency) == (link.size, pytest.approx(link.latency))
        assert other.bandwidth == pytest.approx(link.bandwidth)


def test_groups_of_one_node_have_their_routes_among_more_ranks(planned: Callable[..., Plan]) -> None:
    """Their links were kept but for the route in two steps, without which nothing is planned."""
    plan = planned(fraction=20.0)
    assert plan.basis is not None
    links = [
        Link(name, group, size, 1e-5, bandwidth)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
        for group, size, bandwidth in (("inside 2", 2, 4e9), ("across 2", 2, 1e9), ("two_step 2", 4, 5e8))
    ]
    grouped = replace(plan.basis.device, links=(*plan.basis.device.links, *links))
    found = device_with_ranks(grouped, 8)
    assert found.group_sizes == (2,)
    hybrid = make_plan(None, plan.basis.model_desc, grouped, strategy="HYBRID_SHARD")
    assert what_if(hybrid, ranks=8).dp == 8


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_of_one_node_have_its_own_links(ranks: int) -> None:
    """They were given the network between nodes, which is eight times slower."""
    found = device_with_ranks(specified("2 x 8 x H100, 400 Gbit/s"), ranks)
    for link in specified(f"{ranks} x H100").links:
        assert found.link(link.collective).bandwidth == pytest.approx(link.bandwidth)


@pytest.mark.parametrize(
    ("text", "network"),
    [("2 x 8 x H100, {} Gbit/s", 400), ("4 x 8 x H100, {} Gbit/s", 50), ("2 x 8 x A10, {} Gbit/s", 400)],
)
def test_another_network_is_what_is_specified_with_it(text: str, network: int) -> None:
    """Routes in two steps were priced as a flat ring, and rings without the slower links inside a node."""
    found = device_with_bandwidth(specified(text.format(100)), network * 1e9 / 8)
    for link in specified(text.format(network)).links:
        assert found.link(link.collective, link.group).bandwidth == pytest.approx(link.bandwidth, rel=0.15)


def test_forced_groups_are_asked_for_where_there_are_some(planned: Callable[..., Plan]) -> None:
    """A report of such a plan ended in an IndexError of the search."""
    plan = planned(fraction=20.0)
    assert plan.basis is not None
    cluster = specified("4 x 8 x H100, 400 Gbit/s")
    hybrid = make_plan(None, plan.basis.model_desc, cluster, strategy="HYBRID_SHARD")
    for ranks in (1, 8):
        with pytest.raises(ValueError, match=f"shard in groups, which {ranks} ranks do not have"):
            what_if(hybrid, ranks=ranks)
    assert what_if(hybrid, ranks=16).dp == 16
    assert [point.x for point in ranks_frontier(hybrid).points] == [16, 32, 64, 128]


def test_what_is_not_asked_about_stays_as_it_is(planned: Callable[..., Plan]) -> None:
    """The plan was the best of several batches; an answer for its own batch had eight times the samples."""
    plan = planned(fraction=20.0, global_batch=8)
    assert plan.basis is not None
    assert len(plan.basis.trainings) > 1
    same = what_if(plan, local_batch=plan.local_batch)
    assert (same.local_batch, same.training) == (plan.local_batch, plan.training)
    assert what_if(plan, microbatches=3).local_batch == plan.local_batch
    for frontier in (limit_frontier(plan, points=3), batch_frontier(plan)):
        assert frontier.own.samples_per_second == pytest.approx(plan.samples_per_second)
    for wrong in ({"ranks": 0}, {"bandwidth": float("nan")}, {"local_batch": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            what_if(plan, **wrong)  # type: ignore[arg-type]


def test_what_was_scaled_once_is_said_of_what_is_made_of_it(planned: Callable[..., Plan]) -> None:
    slower = what_if(planned(fraction=20.0), bandwidth=1e8)
    note = [each for each in slower.notes if each.startswith("not measured")]
    assert note
    assert note[0] in what_if(slower, memory_limit=slower.memory_limit // 2).notes


def test_a_rank_alone_has_the_memory_of_its_machine(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=20.0)
    assert plan.basis is not None
    ranks = plan.basis.device.world_size
    one_node = replace(
        plan.basis.device, nodes=1, devices_per_node=ranks, copy_bandwidth=7e9, copy_alone=11e9
    )
    shared = replace(plan, basis=replace(plan.basis, device=one_node))
    steps = [what_if(shared, ranks=n).basis for n in (ranks, 1)]
    assert [basis and basis.device.copy_bandwidth for basis in steps] == [7e9, 11e9]
    per_byte = [basis and basis.profiles[0].optimizer.per_byte for basis in steps]
    assert per_byte[1] == pytest.approx(plan.basis.profiles[0].optimizer.per_byte * 7 / 11)


def test_a_rank_alone_on_a_cpu_has_no_hooks_and_no_neighbours(planned: Callable[..., Plan]) -> None:
    # A small ConvNeXt on one rank was predicted 14 % too long.
    plan = planned(fraction=20.0)
    assert plan.basis is not None
    hooks = {
        "unit_overhead": 1e-4,
        "parameter_overhead": 1e-6,
        "gradient_overhead": 2e-5,
        "pass_overhead": 1e-3,
    }
    machine = replace(plan.basis.device, kind="cpu", nodes=1, devices_per_node=2, **hooks)
    profiles = tuple(replace(profile, measured=True) for profile in plan.basis.profiles)
    basis = replace(plan.basis, device=machine, profiles=profiles)
    for kind, kept in (("cpu", 0.0), ("cuda", 1e-3)):
        alone = device_with_ranks(replace(machine, kind=kind), 1)
        assert (alone.unit_overhead, alone.parameter_overhead, alone.pass_overhead) == (0.0, 0.0, kept)
    crowded = replace(machine, devices_per_node=4, ranks_per_core=2)
    assert [device_with_ranks(crowded, ranks).ranks_per_core for ranks in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 2]
    answer = what_if(replace(plan, basis=basis), ranks=1)
    assert any("not measured: a step without collectives" in note for note in answer.notes)
    found = answer.basis
    assert found is not None
    for before, after in zip(basis.profiles[0].segments, found.profiles[0].segments, strict=True):
        wanted = max(before.forward.seconds - 1.5e-5, before.forward.seconds / 2)
        assert after.forward.seconds == pytest.approx(wanted)


def test_a_network_sends_what_a_ring_sends() -> None:
    slow = device_with_bandwidth(device(ranks=4), 125e6)
    copies = 2 / slow.copy_bandwidth
    sent = 0.75 / (125e6 * 1448 / 1538)
    assert slow.link("all_gather").bandwidth == pytest.approx(1 / (sent + copies))
    assert slow.link("all_reduce").bandwidth == pytest.approx(1 / (2 * sent + copies))
    # The measured half needed a core; of what the network adds, TCP's computing does.
    measured = replace(device(ranks=4), kind="cpu", overlap=0.5, compute_overlap=0.5)
    half = device_with_bandwidth(measured, 125e6)
    longer = device(ranks=4).link("all_reduce").bandwidth / slow.link("all_reduce").bandwidth
    computing = 1.5e-9 * 1.5 * slow.link("all_reduce").bandwidth  # 1.5 bytes are sent for each
    assert half.overlap == half.compute_overlap == pytest.approx(1 - 0.5 / longer - 0.5 * computing)
    # While a unit is gathered, which sends half as much as the all-reduce beside it, both have half the link.
    share = 1 - slow.link("all_reduce").bandwidth / slow.link("all_gather").bandwidth
    assert share == pytest.approx(0.5, rel=0.05)
    assert half.mixed_overlap == pytest.approx(0.5 + 0.5 * share * (1 - 1 / longer - computing))
    # gloo's own reduce-scatter is an all-reduce: parts are exchanged instead.
    on_gloo = device_with_bandwidth(replace(device(ranks=4), kind="cpu"), 125e6).link("reduce_scatter")
    assert on_gloo.by_exchange
    assert on_gloo.bandwidth == pytest.approx(1 / (sent + copies))


def test_differences_name_blocks_and_add_up(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.9)
    other = what_if(plan, memory_limit=int(0.45 * plan.memory_limit))
    found = diff(plan, other)
    assert found.same_operators + sum(len(each.operators) for each in found.changes) == len(plan.decisions)
    assert found.changes
    assert [row[0] for row in found.settings] == ["memory limit"]
    assert max(map(len, difference_table(found).splitlines())) <= 110
    alike = diff(plan, plan)
    assert (alike.changes, alike.settings) == ((), ())
    with pytest.raises(ValueError, match="plans of two models"):
        diff(plan, planned("llama"))


def test_frontiers_rise_with_memory(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=0.5)
    found = limit_frontier(plan, points=5)
    rates = [point.samples_per_second or 0.0 for point in found.points]
    assert rates == sorted(rates)
    assert found.here in [point.x for point in found.points]
    assert {point.x for point in batch_frontier(plan).points} >= {1, 2, 4}
    assert [point.x for point in ranks_frontier(plan).points] == [2, 4, 8, 16]


def test_another_number_of_samples_is_told(planned: Callable[..., Plan]) -> None:
    plan = planned(fraction=20.0, slices=(), recompute=False)
    more = what_if(plan, ranks=2 * plan.dp)
    assert f"a step has {2 * plan.global_batch} samples, not {plan.global_batch}" in more.notes
    assert not any("samples, not" in note for note in what_if(plan, bandwidth=1e8).notes)
