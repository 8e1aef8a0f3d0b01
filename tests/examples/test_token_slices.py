"""Collect, solve, evaluate: the scripts of token slices, and the benchmarks beside the published numbers."""

import math
from pathlib import Path

import pytest

from benchmarks import slice_search, token_pipeline_paper
from benchmarks.support.terapipe_numbers import BY_NUMBER, FOUND, LONG, SETTINGS, UNIFORM
from benchmarks.token_pipeline_paper import rank_correlation
from examples import collect_token_latency, evaluate_token_slices, solve_token_slices
from examples.evaluate_token_slices import Evaluations
from examples.solve_token_slices import Solution
from osdp import codec
from osdp.hardware.device_info import DeviceInfo, PointToPointLink
from osdp.hardware.token_latency import TokenSamples


def test_latencies_are_collected_slices_solved_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = ["--model", "gpt2", "--set", "n_embd=32", "--set", "n_head=2", "--layers", "1", "--length", "64"]
    samples, solution, evaluation, device = (tmp_path / f"{name}.json" for name in "abcd")
    collect_token_latency.main([*stage, "--batches", "1,2", "--repeats", "1", "--out", str(samples)])
    assert {sample.batch for sample in TokenSamples.load(samples).samples} == {1, 2}
    DeviceInfo(memory_limit=2**30, stage_link=PointToPointLink(1e-4, 1e8)).save(device)
    flags = ["--stages", "2,4", "--layers", "4", "--batch", "4", "--device-info", str(device)]
    solve_token_slices.main([str(samples), *flags, "--out", str(solution)])
    found = codec.load(Solution, solution)
    ways = {(outcome.best.num_stages, outcome.best.schedule) for outcome in found.outcomes}
    assert ways == {(2, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "1f1b")}
    for outcome in found.outcomes:
        outcome.best.slices.check(64)
        assert outcome.bound <= outcome.best.seconds
        assert outcome.uniform is not None and outcome.best.seconds <= outcome.uniform.seconds
    flags = [*stage, "--repeats", "1", "--out", str(evaluation)]
    with pytest.raises(SystemExit, match="is for 1 layers of gpt2 with 32 channels, the flags make 2 layers"):
        evaluate_token_slices.main([str(solution), *flags, "--layers", "2"])
    evaluate_token_slices.main([str(solution), *flags])
    evaluated = codec.load(Evaluations, evaluation)
    first = found.outcomes[0]
    others = [name for name in ("uniform", "whole") if getattr(first, name) != first.best]
    assert [entry.name for entry in evaluated.of] == ["best", *others]
    with pytest.raises(ValueError, match=r"is for sequences of 64 tokens, --length says 32"):
        evaluate_token_slices.main([str(solution), *flags, "--length", "32"])
    assert all(entry.measured_seconds > 0 and math.isfinite(entry.error) for entry in evaluated.of)
    assert "the fit is off by" in capsys.readouterr().out


def test_stages_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    stage = ["--set", "n_embd=32", "--set", "n_head=2", "--length", "64", "--repeats", "1"]
    collect_token_latency.main([*stage, "--out", str(path)])
    with pytest.raises(ValueError, match="3 stages must divide 4 devices and 4 layers"):
        solve_token_slices.main([str(path), "--stages", "3", "--devices", "4", "--layers", "4"])


def test_published_slices_fit_their_sequences() -> None:
    for number, lengths in FOUND.items():
        assert sum(lengths) == BY_NUMBER[number].length
    for number, counts in UNIFORM.items():
        assert counts[1] == BY_NUMBER[number].whole
    # The batch shrinks with the length, so that a step has as many tokens or fewer.
    assert all(setting.batch % setting.dp == 0 and setting.layers % setting.pp == 0 for setting in SETTINGS)
    assert [round(setting.speedup, 2) for setting in LONG] == [2.77, 4.97, 7.83]


def test_ranks_correlate_like_their_order() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 11.0, 12.0, 90.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1)
    # scipy.stats.spearmanr([1, 1, 2, 3], [1, 2, 2, 4])
    assert rank_correlation([1.0, 1.0, 2.0, 3.0], [1.0, 2.0, 2.0, 4.0]) == pytest.approx(0.8333333)


def test_the_curve_is_fitted_on_one_setting_and_predicts_another() -> None:
    curve = token_pipeline_paper.calibrate()
    assert 0 < curve.overhead < 1e-2 and 0.1 < curve.efficiency < 1
    row = token_pipeline_paper.predicted(BY_NUMBER["10"], curve)
    assert not row["fitted"] and row["simulated"]
    assert row["speedup"] == pytest.approx(BY_NUMBER["10"].speedup, rel=0.2)
    assert sum(row["slices"]) == 2048


def test_the_search_is_compared_with_the_published_one_and_with_all_ways() -> None:
    problem = slice_search.Problem("9", 256, 8)
    row = slice_search.row_of(problem, repeats=1)
    assert "error" not in row and row["slices_gap"] <= 1e-9 and row["published_excess"] >= -1e-9
    short = slice_search.brute_force(slice_search.Problem("5", 64, 4))
    assert "error" not in short and abs(short["excess"]) < 1e-9
