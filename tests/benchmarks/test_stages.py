"""Emulated layers and cuts for the claims about pipelines."""

import time
from dataclasses import replace

import pytest
import torch

from benchmarks.support.candidates import UNLIMITED, Setting
from benchmarks.support.models import loss_of
from benchmarks.support.stages import LayerKind, Line, Naps, SharedSleeper, Sleeper, most_in_flight, sleepers
from osdp import DeviceInfo, ModelDesc, Training
from osdp.hardware.device_info import PointToPointLink
from osdp.profiler.roofline import estimate

NAPS = [Naps(0.004, 0.003, 0.002), *[Naps(0.001, 0.001, 0.001)] * 3]


def line(pp: int = 2) -> Line:
    case, training = sleepers("sleepers", NAPS), Training(local_batch=2)
    desc = ModelDesc.from_module(case.model(device="meta"), case.sample(2))
    device = DeviceInfo(
        memory_limit=UNLIMITED, flops=1e9, memory_bandwidth=1e9, stage_link=PointToPointLink(1e-3, 1e9)
    )
    return Line.of(Setting(case, training, desc, estimate(desc, device, training)), device, pp)


@pytest.mark.parametrize("kind", [Sleeper, SharedSleeper])
def test_an_emulated_layer_sleeps_in_both_passes_and_counts_its_microbatches(kind: LayerKind):
    case = sleepers("sleepers", NAPS, kind=kind)
    model, batch = case.model(), case.sample(2)
    most_in_flight()
    start = time.perf_counter()
    losses = [loss_of(model(**batch)) for _ in range(3)]
    forward = time.perf_counter() - start
    for loss in losses:
        loss.backward()
    assert forward >= 3 * 0.007
    assert time.perf_counter() - start - forward >= 3 * (0.005 + 3 * 0.002)
    assert most_in_flight() == 3
    assert most_in_flight() == 0


@pytest.mark.parametrize("kind", [Sleeper, SharedSleeper])
def test_awake_it_computes_the_same(kind: LayerKind):
    batch = sleepers("a", NAPS).sample(2)
    sleepy, awake = (sleepers("a", NAPS, awake=awake, kind=kind).model()(**batch) for awake in (False, True))
    assert torch.equal(sleepy, awake)


def test_even_splits_count_layers_and_modules():
    # Steps: first, four layers, last.
    assert line().by_layers(2) == (0, 3, 6)
    assert line().by_modules(2) == (0, 3, 6)
    assert line(3).by_layers(3) == (0, 2, 4, 6)


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 1, 6)])
def test_a_plan_has_the_cuts_it_was_given(bounds: tuple[int, ...]):
    found = line()
    plan = found.cut(bounds, "1f1b", 4)
    assert found.bounds_of(plan) == bounds
    assert plan.training.microbatches == 4
    assert max(plan.peaks) == plan.predicted.peak_bytes


def test_cuts_that_do_not_fit_the_schedule_are_refused():
    with pytest.raises(ValueError, match="3 stages are given, schedule '1f1b' has 2 on 2 ranks"):
        line().cut((0, 2, 3, 6), "1f1b", 4)
    with pytest.raises(ValueError, match="would have no step"):
        line().cut((0, 0, 6), "1f1b", 4)


def test_plans_without_a_link_send_for_nothing():
    found = line()
    free = replace(found, device=replace(found.device, stage_link=None))
    bounds, times = (0, 3, 6), []
    for each in (found, free):
        times.append(each.cut(bounds, "1f1b", 4).predicted.step_seconds)
    assert times[0] > times[1] + 2e-3
