"""Calibration on steps that the model itself has made: coefficients are found again, others are predicted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planner_accuracy
from benchmarks.support import harness
from osdp import codec
from osdp.cluster.calibration.calibrate import (
    Calibration,
    FittedLinks,
    calibrate,
    cross_validation,
    fit,
    leave_out,
    relative_errors,
)
from osdp.cluster.calibration.measured_step import MeasuredStep
from osdp.cluster.calibration.step_model import Fitted, Setting, StepModel, assumed_recompute
from osdp.cluster.cost.corrections import LayerSize, correction_factor, corrections_of
from osdp.cluster.cost.even_step import EvenSteps, even_bounds, even_slot, slots_in_order
from osdp.cluster.cost.rates import (
    PUBLISHED,
    DeviceEfficiencies,
    Efficiencies,
    is_aligned,
    occupied_flops,
    together,
)
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.file import load_cluster
from osdp.cluster.hardware import Cluster, NetworkLink, NodeGroup
from osdp.cluster.plan import ParallelLayout, RecomputeLayers, Workload
from osdp.cluster.transformer import TransformerShape
from osdp.plan.dims import ParallelDims
from tests.helpers.measured import NODE, SETTING, TRUE, fitted, grid, timed, write_csv

INSIDE = NetworkLink(1.5e11, 1e-5)


@pytest.fixture(scope="module")
def steps() -> tuple[MeasuredStep, ...]:
    return timed(grid(), TRUE, INSIDE)


def test_coefficients_are_found_again(steps: tuple[MeasuredStep, ...]) -> None:
    found = fit(steps, SETTING, corrected=False)
    # What is published pulls: the true overlap of host and device is another.
    assert np.abs(relative_errors(steps, SETTING, found)).max() < 0.012
    assert np.abs(relative_errors(steps, SETTING, fitted())).mean() > 0.1
    # Vocabularies are padded, so that no product is unaligned.
    assert found.rates.unaligned_share == pytest.approx(PUBLISHED.unaligned_share)
    for name in ("matrix_share", "memory_share", "call_seconds"):
        assert getattr(found.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.06), name
    # What an all-reduce waits for and what its bytes take are told apart by few steps.
    node = found.cluster.groups[0].node
    assert node.inside.bandwidth == pytest.approx(INSIDE.bandwidth, rel=0.12)
    # No step left its node.
    assert node.outside == NODE.outside


def test_the_network_is_found_where_steps_cross_it() -> None:
    network = NetworkLink(1e10, 2e-5)
    wide = [
        replace(step, devices=8 * step.devices, dp=8 * step.dp, global_batch=8 * step.global_batch)
        for step in grid()[::3]
        if step.devices > 1
    ]
    steps = timed((*grid()[::3], *wide), TRUE, INSIDE, network)
    found = fit(steps, SETTING, corrected=False)
    assert np.abs(relative_errors(steps, SETTING, found)).max() < 0.025
    assert found.cluster.groups[0].node.outside.bandwidth == pytest.approx(network.bandwidth, rel=0.1)
    calibrated = calibrate(steps, SETTING)
    node = calibrated.apply_to(Cluster((NodeGroup(NODE, 8),))).groups[0].node
    assert calibrated.links == (FittedLinks("node", node.inside, node.outside),)
    assert node.outside.bandwidth == pytest.approx(network.bandwidth, rel=0.1)


def test_each_kind_of_gpu_is_found_where_steps_run_on_several() -> None:
    other = replace(NODE, name="other", gpu=replace(NODE.gpu, name="other"), devices=4)
    cluster = Cluster((NodeGroup(NODE, 1), NodeGroup(other, 2)))
    # Two stages of one node each, or three of which the middle one has both kinds; some on the first alone.
    wide = [replace(s, devices=16, pp=2 * s.pp) for s in grid()[::2] if s.devices == 8]
    uneven = [replace(s, devices=12, tp=4, dp=1, pp=3) for s in grid()[::5] if s.devices == 4]
    steps = [*wide, *uneven, *grid()[::6]]
    slow = DeviceEfficiencies("other", 0.5, 0.35, 0.3, 1.1e-4, 0.2)
    setting = Setting(cluster)
    seconds = StepModel(steps, setting).seconds(Fitted(replace(TRUE, devices=(slow,)), cluster))
    steps = [replace(step, seconds=s) for step, s in zip(steps, seconds.tolist(), strict=True)]
    found = fit(steps, setting, corrected=False)
    published = relative_errors(steps, setting, Fitted(PUBLISHED, cluster))
    assert np.abs(relative_errors(steps, setting, found)).mean() < 0.03 < np.abs(published).mean() / 3
    # The slower kind sets the pace, and what is published pulls.
    first, second = found.rates.devices
    assert (first.gpu, second.gpu) == ("gpu", "other")
    assert second.matrix_share < 0.9 * first.matrix_share and second.memory_share < 0.9 * first.memory_share


def test_what_rows_do_not_tell_stays_as_published(steps: tuple[MeasuredStep, ...]) -> None:
    alone = [step for step in steps if step.devices == step.pp]
    inside = fit(alone, SETTING).cluster.groups[0].node.inside
    assert inside.latency == pytest.approx(NODE.inside.latency, rel=0.2)


def test_larger_steps_are_met_from_smaller_ones(steps: tuple[MeasuredStep, ...]) -> None:
    errors = leave_out(steps, SETTING, lambda step: step.hidden > 1024)
    assert len(errors) == len(steps) // 2
    assert np.abs(errors).mean() < 0.04


def test_what_is_left_out_is_not_fitted(steps: tuple[MeasuredStep, ...]) -> None:
    # The held-out half is wrong by a factor, which nothing that saw only the other half can know.
    wrong = [replace(s, seconds=s.seconds * (1 + (s.hidden > 1024))) for s in steps]
    errors = leave_out(wrong, SETTING, lambda step: step.hidden > 1024)
    assert errors.mean() == pytest.approx(-0.5, abs=0.03)


def test_outliers_do_not_pull_the_others_along(steps: tuple[MeasuredStep, ...]) -> None:
    spoilt = [replace(s, seconds=s.seconds * (1 + 2 * (i % 10 == 0))) for i, s in enumerate(steps)]
    found = fit(spoilt, SETTING, corrected=False)
    assert np.median(np.abs(relative_errors(steps, SETTING, found))) < 0.03


def test_habits_of_layers_are_kept_for_layers_like_them(steps: tuple[MeasuredStep, ...]) -> None:
    slow = [replace(s, seconds=s.seconds * (1.25 if (s.tp, s.samples) == (2, 4) else 1.0)) for s in steps]
    alone = cross_validation(slow, SETTING, corrected=False, folds=3)
    corrected = cross_validation(slow, SETTING, folds=3)
    picked = np.array([(s.tp, s.samples) == (2, 4) for s in steps])
    assert np.abs(corrected[picked]).mean() < 0.5 * np.abs(alone[picked]).mean()
    assert np.abs(corrected[~picked]).mean() < 0.02


def test_the_same_steps_give_the_same_calibration(steps: tuple[MeasuredStep, ...], tmp_path: Path) -> None:
    few = steps[::3]
    found = calibrate(few, SETTING, folds=2)
    assert found == calibrate(few, SETTING, folds=2)
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == found
    errors = np.abs(cross_validation(few, SETTING, folds=2))
    assert (found.mean_error, found.median_error) == (errors.mean(), np.median(errors))
    assert found.steps == len(few)


def test_a_calibration_is_of_its_nodes() -> None:
    links = (FittedLinks("node", INSIDE, None),)
    found = Calibration(links, PUBLISHED, 1, 0.1, 0.1, 2, flash=False)
    assert found.apply_to(Cluster((NodeGroup(NODE, 2),))).groups[0].node.inside == INSIDE
    with pytest.raises(ValueError, match="of nodes 'node', the cluster has other"):
        found.apply_to(Cluster((NodeGroup(NODE, 1), NodeGroup(replace(NODE, name="other"), 1))))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit((), SETTING), "at least 1 measured step"),
        (lambda: cross_validation(grid()[:3], SETTING, folds=4), "3 steps cannot be divided into 4 folds"),
        (lambda: leave_out(grid()[:3], SETTING, lambda _: True), "3 of 3 steps are left out"),
        (lambda: replace(PUBLISHED, memory_share=0.0, blend=2.0), "wrong: memory_share, blend"),
    ],
)
def test_what_cannot_be_fitted_is_said(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_even_steps_cost_what_the_planner_says() -> None:
    modelled = StepModel(grid(), SETTING).seconds(fitted(TRUE, INSIDE))
    for step, seconds in zip(grid(), modelled, strict=True):
        shape = TransformerShape(
            name="measured", layers=step.layers, hidden=step.hidden, heads=step.heads,
            sequence=step.sequence, vocabulary=SETTING.vocabulary, positions=step.sequence,
        )  # fmt: skip
        cluster = Cluster((NodeGroup(replace(NODE, inside=INSIDE), 1),))
        load = Workload(
            shape=shape, global_batch=step.global_batch, flash=False, split_sends=True,
            vocabulary_multiple=128,
        )  # fmt: skip
        prices = ClusterPrices(cluster, load, TRUE)
        layout = StepModel([step], SETTING).layouts[0]
        slots = (even_slot(prices, layout),) * step.pp
        assert price(prices, layout, even_bounds(step.layers, step.pp), slots).step_seconds == pytest.approx(
            seconds
        )
        assert EvenSteps(prices).seconds(layout) == pytest.approx(seconds)


def test_vocabularies_that_are_not_padded_are_divided_as_they_are() -> None:
    step, found = MeasuredStep(2, 8, 4, 512, 8, 2, 512, 2, 1, 1, 1.0), fitted(TRUE, INSIDE)

    def seconds(vocabulary: int, tp: int = 2, *, pads: bool = False) -> float:
        setting = replace(SETTING, vocabulary=vocabulary, pads_vocabulary=pads)
        return StepModel([replace(step, devices=tp, tp=tp)], setting).seconds(found)[0]

    # Of two ranks each has 25,128 of 50,257, which allows the widest loads; one rank has them all.
    assert seconds(50257) == seconds(50256) < seconds(50257, pads=True)
    assert seconds(50257, 1) > seconds(50257, 1, pads=True)


def test_recomputation_is_assumed_where_a_step_could_not_have_run() -> None:
    assert assumed_recompute(grid(), SETTING) is RecomputeLayers.NONE
    large = MeasuredStep(512, 1536, 6, 12288, 96, 96, 2048, 8, 4, 16, 60.0)
    assert assumed_recompute([*grid(), large], SETTING) is RecomputeLayers.FULL
    full, found = replace(SETTING, recompute=RecomputeLayers.FULL), fitted(TRUE, INSIDE)
    longer = StepModel(grid(), full).seconds(found) / StepModel(grid(), SETTING).seconds(found)
    assert ((longer > 1.1) & (longer < 1.6)).all()


def test_corrections_fade_with_doublings() -> None:
    measured = LayerSize(1024, 16, 1024, 2, 4)
    found = corrections_of((measured,), np.array([np.log(1.2)]), np.array([1e-6]))
    factors = [
        correction_factor(found, replace(measured, samples=4 * 2**n, hidden=1024 * 2**n)) for n in range(4)
    ]
    assert factors[0] == pytest.approx(1.2)
    assert factors == sorted(factors, reverse=True)
    assert factors[3] == pytest.approx(1.0, abs=1e-3)
    assert correction_factor((), measured) == 1.0


def test_host_and_device_hide_behind_each_other() -> None:
    assert together(3.0, 2.0, 0.0) == 3.0
    assert together(3.0, 2.0, 1.0) == pytest.approx(5.0)
    assert 3.0 < together(2.0, 3.0, 0.3) < 5.0
    assert together(0.0, 3.0, 0.3) == 3.0
    assert codec.from_json(Efficiencies, codec.to_json(TRUE)) == TRUE


@pytest.mark.parametrize(
    ("sizes", "waves"),
    [((256, 128, 64), 1), ((256 * 9, 128 * 12, 64), 1), ((256 * 9, 128 * 12 + 1, 64), 2), ((1, 1, 64), 1)],
)
def test_products_take_whole_waves_of_tiles(sizes: tuple[int, int, int], waves: int) -> None:
    assert occupied_flops(*sizes, 1, 108) == waves * 108 * 2 * 256 * 128 * 64
    assert is_aligned(*sizes) == (sizes[0] % 8 == 0 and sizes[1] % 8 == 0)


def test_kendall_counts_pairs() -> None:
    order = np.array([1.0, 2.0, 3.0, 4.0])
    assert planner_accuracy.kendall_tau(order, order**2) == 1.0
    assert planner_accuracy.kendall_tau(order, -order) == -1.0
    assert planner_accuracy.kendall_tau(order, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)
    assert planner_accuracy.kendall_tau(order, np.ones(4)) is None


def test_the_larger_half_is_extrapolated(steps: tuple[MeasuredStep, ...]) -> None:
    assert planner_accuracy.larger_half(steps, "hidden") == {2048}
    assert planner_accuracy.larger_half(steps, "samples") == {8}
    assert planner_accuracy.larger_half(steps, "devices") == {8}
    assert planner_accuracy.larger_half(steps, "sequence") == set()


def test_the_benchmark_writes_its_summary(steps: tuple[MeasuredStep, ...], tmp_path: Path, capsys) -> None:
    data = write_csv(tmp_path / "steps.csv", [s for s in steps if s.layers == 8 and s.dp == 1])
    status = planner_accuracy.main(["--data", str(data), "--json", str(tmp_path / "found.json")])
    # No two of them are of one model and batch: there is no regret.
    assert status == harness.UNMEASURED
    found = codec.json.loads((tmp_path / "found.json").read_text())
    assert set(found["summary"]) == {
        "mape_zero_shot", "kendall_tau_zero_shot", "regret_zero_shot", "mape_cv", "median_cv", "kendall_tau",
        "regret", "leave_out_gpus", "leave_out_hidden", "leave_out_microbatch", "interval_coverage",
        "interval_half_width", "interval_coverage_new_layers", "interval_half_width_new_layers",
    }  # fmt: skip
    # Nine tenths of many rows; of the few here, with one number of layers, two more or less may lie outside.
    assert 0.6 < found["summary"]["interval_coverage"] <= 1 and found["summary"]["interval_half_width"] < 0.12
    assert found["summary"]["mape_cv"] < 0.05 < found["summary"]["mape_zero_shot"]
    with pytest.raises(SystemExit, match="No such file"):
        planner_accuracy.main(["--data", str(tmp_path / "none.csv")])


def test_the_benchmark_takes_mixed_machines_and_few_steps(tmp_path: Path) -> None:
    """Measured sets of other machines are told apart from vTrain's by --cluster; it was not there."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "nodes:\n  - {gpu: V100, count: 1, devices: 4, network: 10 Gbit/s}\n"
        "  - {gpu: T4, count: 2, devices: 2, network: 10 Gbit/s}\n"
    )
    # Six layers in four stages, two of them on T4; then all ranks of two stages on one node of V100.
    steps = [
        MeasuredStep(8, 16, 1, 1024, 16, 6, 512, 2, 1, 4, 1.0),
        MeasuredStep(8, 16, 2, 1024, 16, 6, 512, 2, 1, 4, 0.9),
        MeasuredStep(4, 16, 1, 1024, 16, 6, 512, 1, 2, 2, 0.5),
    ]
    data = write_csv(tmp_path / "steps.csv", steps)
    words = ["--data", str(data), "--cluster", str(cluster), "--json", str(tmp_path / "found.json")]
    # All are of one hidden size: what is left out is said.
    assert planner_accuracy.main(words) == harness.UNMEASURED
    found = codec.json.loads((tmp_path / "found.json").read_text())
    assert found["command"].endswith("--data steps.csv --cluster cluster.yaml")
    assert found["summary"]["mape_zero_shot"] > 0 and found["summary"]["regret_zero_shot"] is not None
    write_csv(data, steps[:1])
    assert planner_accuracy.main(words) == harness.UNMEASURED
    assert codec.json.loads((tmp_path / "found.json").read_text())["summary"]["mape_cv"] is None
    write_csv(data, [MeasuredStep(16, 16, 1, 1024, 16, 6, 512, 2, 2, 4, 1.0)])
    with pytest.raises(SystemExit, match="a step ran on 16 devices, but the cluster has 8"):
        planner_accuracy.main(words)


def test_vocabularies_are_padded_on_other_machines_than_vtrains(tmp_path: Path) -> None:
    """Steps of Megatron-LM on V100 were predicted with the odd vocabulary of vTrain's program."""
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"nodes": [{"gpu": "V100", "count": 1, "devices": 4, "network": "10 Gbit/s"}]}')
    setting = Setting(load_cluster(cluster))
    step = MeasuredStep(4, 16, 1, 1024, 16, 6, 512, 1, 4, 1, 1.0)
    (seconds,) = StepModel([step], setting).seconds(Fitted(PUBLISHED, setting.cluster)).tolist()
    data = write_csv(tmp_path / "steps.csv", [replace(step, seconds=seconds)])
    out = tmp_path / "found.json"
    planner_accuracy.main(["--data", str(data), "--cluster", str(cluster), "--json", str(out)])
    found = codec.json.loads(out.read_text())
    assert found["summary"]["mape_zero_shot"] == pytest.approx(0.0, abs=1e-9)


def test_stages_take_the_devices_in_their_order() -> None:
    fast, slow = replace(NODE, name="fast", devices=4), replace(NODE, name="slow", devices=2)
    cluster = Cluster((NodeGroup(fast, 1), NodeGroup(slow, 4)))

    def slots(tp: int, dp: int, pp: int) -> list[tuple[tuple[int, ...], int]]:
        layout = ParallelLayout(ParallelDims(pp, dp, tp), 1, 4)
        return [(slot.nodes, slot.shares) for slot in slots_in_order(cluster, layout)]

    assert slots(2, 1, 4) == [((1, 0), 2), ((1, 0), 2), ((0, 1), 1), ((0, 1), 1)]
    assert slots(2, 3, 2) == [((1, 1), 1), ((0, 3), 1)]
    assert slots(1, 1, 2) == [((1, 0), 2), ((1, 0), 2)]
    with pytest.raises(ValueError, match="16 ranks need as many devices; there are 12"):
        slots(2, 2, 4)
