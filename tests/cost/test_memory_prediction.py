"""Predicted peaks against the true peak of live bytes, of real tensors under the fake process group."""

import pytest
import torch

from benchmarks.memory_accuracy import BASE, Point, Ranks, check
from benchmarks.support.candidates import UNLIMITED, Setting, make_setting
from benchmarks.support.models import CASES, gpt2
from osdp import DeviceInfo, Link
from osdp.hardware.device_info import COLLECTIVES


@pytest.mark.parametrize("case", ["gpt2-small", "mlp"])
def test_the_prediction_is_within_five_percent_and_never_exceeded(case: str) -> None:
    torch.set_num_threads(1)
    setting = make_setting(CASES[case], BASE)
    for world_size in (2, 64):
        ranks = Ranks(1, world_size, backend="fake")
        for plan in ({"strategy": "FULL_SHARD"}, 0.5):
            row = check(Point(case, ranks, plan, BASE), setting, "cpu")
            assert abs(row["relative_error"]) <= 0.05, row
            assert not row["exceeds"], row


def in_groups(nodes: int, per_node: int, *, by_exchange: bool) -> DeviceInfo:
    """Links of equal speed: peaks do not ask."""
    size = nodes * per_node
    groups = {"world": size, f"inside {per_node}": per_node, f"across {per_node}": nodes}
    links = tuple(
        Link(name, group, ranks, 1e-4, 1e9, by_exchange=by_exchange and name == "reduce_scatter")
        for group, ranks in (groups | {f"two_step {per_node}": size}).items()
        for name in COLLECTIVES
    )
    return DeviceInfo(
        memory_limit=UNLIMITED,
        nodes=nodes,
        devices_per_node=per_node,
        links=links,
        copies_messages=False,
    )


@pytest.fixture(scope="module")
def setting() -> Setting:
    """A model whose tied embedding is a large part, in the root's unit."""
    torch.set_num_threads(1)
    return make_setting(gpt2("gpt2-words", layers=2, width=64, heads=2, length=32, vocab=4000), BASE)


@pytest.mark.parametrize("by_exchange", [False, True])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 8)])
def test_no_route_takes_more_than_predicted(
    setting: Setting, nodes: int, per_node: int, by_exchange: bool
) -> None:
    device = in_groups(nodes, per_node, by_exchange=by_exchange)
    for options in (
        {"strategy": "FULL_SHARD", "two_step": False},
        {"strategy": "FULL_SHARD", "two_step": True},
        {"strategy": "HYBRID_SHARD"},
    ):
        plan = setting.plan(device, **options)
        assert any(unit.root for unit in plan.units)
        peak = setting.candidate(device, plan).memory(nodes * per_node).peak
        predicted = plan.predicted.peak_bytes
        assert 0.999 * peak <= predicted <= 1.05 * peak, (options, plan.predicted.peak_moment)
