"""Memory and time of a step, told apart, add up to what the judge predicts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from osdp import HostLink, Plan
from osdp.explain.memory_by_mode import memory_by_mode
from osdp.explain.step_memory import memory_timeline
from osdp.explain.step_time import unit_times
from osdp.plan.explanation import MemoryMoment, MemoryRow
from osdp.report.explanation_table import memory_table

PLANS = [("gpt2", 0.45), ("gpt2", 0.7), ("llama", 0.6), ("llama", 1.5)]


@pytest.mark.parametrize(("name", "fraction"), PLANS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_highest_moment_is_the_predicted_peak(
    planned: Callable[..., Plan], name: str, fraction: float, microbatches: int
) -> None:
    plan = planned(name, fraction, microbatches=(microbatches,))
    timeline = memory_timeline(plan)
    assert timeline.peak.total == pytest.approx(plan.predicted.peak_bytes, abs=1)
    assert timeline.peak.name == plan.predicted.peak_moment
    assert [moment.phase for moment in timeline.moments] == sorted(
        (moment.phase for moment in timeline.moments), key=["forward", "backward", "step"].index
    )
    for moment in timeline.moments:
        assert (
            min(moment.states, moment.parameters, moment.activations, moment.gradients, moment.buffers) >= 0
        )


@pytest.mark.parametrize(("name", "fraction"), PLANS)
def test_what_is_stored_is_there_at_all_moments(
    planned: Callable[..., Plan], name: str, fraction: float
) -> None:
    """Where a recomputed block was gathered in backward, a report's chart fell to zero: a kind of activations
    was subtracted, and not counted."""
    timeline = memory_timeline(planned(name, fraction))
    stored = timeline.moments[-1].states
    assert stored > 0
    assert [moment.states for moment in timeline.moments] == pytest.approx([stored] * len(timeline.moments))


@pytest.mark.parametrize(("name", "fraction"), PLANS)
def test_times_of_units_add_up_to_the_step(planned: Callable[..., Plan], name: str, fraction: float) -> None:
    plan = planned(name, fraction)
    times = unit_times(plan)
    total = sum(each.forward + each.backward + each.communication + each.optimizer for each in times)
    assert total == pytest.approx(plan.predicted.step_seconds)
    compute = sum(each.forward + each.backward for each in times)
    assert compute == pytest.approx(plan.predicted.compute_seconds)


def test_memory_by_mode_is_that_of_uniform_plans(planned: Callable[..., Plan]) -> None:
    plan = planned()
    assert plan.basis is not None
    rows = memory_by_mode(plan.basis, [1, 2])
    assert [row.local_batch for row in rows] == [1] * 5 + [2] * 5
    peaks = {row.choice: row.peak_bytes for row in rows[5:]}
    assert peaks["NO_SHARD"] > peaks["SHARD_OPTIMIZER"] > peaks["FULL_SHARD"] > peaks["least of any plan"]
    assert all(row.fits == (row.peak_bytes <= plan.memory_limit) for row in rows)


def test_the_least_memory_says_that_nothing_is_offloaded(planned: Callable[..., Plan]) -> None:
    """A plan that offloads takes less than "the least of any plan"."""
    plan = planned()
    assert plan.basis is not None
    profiles = tuple(replace(each, host_optimizer=each.optimizer) for each in plan.basis.profiles)
    beside_host = replace(
        plan.basis, profiles=profiles, device=replace(plan.basis.device, host=HostLink(1e10, 1e10, 2**36))
    )
    assert memory_by_mode(plan.basis)[-1].choice == "least of any plan"
    least = memory_by_mode(beside_host)[-1]
    assert least.choice == "least without offloading"
    # Beside numbers as wide as they get, too.
    widest = MemoryMoment("forward of h.0", "forward", *[1023 * 2.0**20] * 5)
    table = memory_table([MemoryRow("FULL_SHARD", 2, 1.0, widest, 1023 * 2**20, True), least])
    assert max(map(len, table.splitlines())) <= 110
