"""``osdp cluster plan`` and ``estimate``: tables, files, and what a user can mend."""

import csv
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osdp.cluster import runnable as cluster_run
from osdp.cluster.known_transformers import shape_of
from osdp.cluster.plan import ClusterPlan
from osdp.errors import InfeasibleError
from osdp.plan.plan import Plan
from tests.cli.test_main import run
from tests.helpers.load import slowdown

CLUSTER = """\
nodes:
  - gpu: A100
    count: 1
    devices: 2
    network: 40 Gbit/s
    price: {per_hour: 8, date: 2026-01-01, source: a test}
  - gpu: A10
    count: 1
    devices: 2
    network: 40 Gbit/s
    price: {per_hour: 4, date: 2026-01-01, source: a test}
"""
#: Those of ZeROSearch, in its order, with one count for each kind of GPU.
COLUMNS = [
    "rank", "real_rank", "m", "mbs", "tp", "pp", "dp", "dp_method", "A100", "A10", "estimated time(s/step)",
    "pipeline time", "DP all-reduce time", "Emb layer all-reduce time", "gpumem", "is_oom", "node placement",
    "exp_partition", "partition", "train_cost", "price_per_step",
]  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf8")
    return [
        "--model", "gpt2", "--set", "layers=4", "--cluster", str(path), "--global-batch", "8", "--seq", "128",
    ]  # fmt: skip


def test_the_table_is_printed_and_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, listed = tmp_path / "table.csv", tmp_path / "table.json"
    files = ["--csv", str(table), "--json", str(listed)]
    run("cluster", "plan", *words, "--top", "3", "--steps", "1000", *files)
    printed = capsys.readouterr().out
    assert "no layout that is certain to fit is better than the first row" in " ".join(printed.split())
    assert "proven best in its space" in printed
    with table.open(encoding="utf8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: len(COLUMNS)] == COLUMNS
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    times = [float(row["estimated time(s/step)"]) for row in rows]
    assert times == sorted(times)
    assert float(rows[0]["train_cost"]) == pytest.approx(1000 * float(rows[0]["price_per_step"]))
    assert sum(map(int, rows[0]["partition"].split("-"))) == 6
    assert json.loads(listed.read_text(encoding="utf8"))[0]["rank"] == 1


def test_all_layouts_can_be_listed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    full = ["--reserve", "20.3GiB", "--set", "layers=12", "--micro-batch", "8"]
    run("cluster", "plan", *words, "--every", "--csv", str(table), *full)
    capsys.readouterr()
    with table.open(encoding="utf8") as file:
        rows = list(csv.DictReader(file))
    assert {row["is_oom"] for row in rows} == {"True", "False"}
    assert all((row["real_rank"] == "0") == (row["is_oom"] == "True") for row in rows)


def test_all_layouts_are_listed_where_none_fits(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were asked for, and the error came without them."""
    table = tmp_path / "table.csv"
    with pytest.raises(RuntimeError, match="nothing fits the memory limit"):
        run("cluster", "plan", *words, "--every", "--top", "3", "--reserve", "21.98GiB", "--csv", str(table))
    assert "(!)" in capsys.readouterr().out
    assert len(table.read_text(encoding="utf8").splitlines()) == 4


def test_ways_may_be_chosen_layer_by_layer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    mixed = ["--zero", "mixed", "--recomputation", "mixed"]
    degrees = ["--tp", "1", "--pp", "1", "--dp", "4", "--micro-batch", "2"]
    run(
        "cluster",
        "estimate",
        *words,
        *degrees,
        *mixed,
        "--set",
        "layers=48",
        "--seq",
        "1024",
        "--reserve",
        "18GiB",
    )
    told = capsys.readouterr().out
    assert "mixed" in told and "zero2, recompute full" in told
    # What is best alike is told as that.
    run("cluster", "plan", *words, *degrees, *mixed, "--every", "--top", "1")
    assert "mixed" not in capsys.readouterr().out


def test_an_objective_chooses_a_part(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run("cluster", "plan", *words, "--objective", "cost", "--subsets", "--top", "1")
    cheap = capsys.readouterr().out
    run("cluster", "plan", *words, "--objective", "pareto")
    assert "1 A100 + 1 A10" not in cheap
    assert "$" in capsys.readouterr().out


def test_what_a_search_leaves_unproven_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--subsets", "--search-seconds", "1e-9"]
    for objective, text in (
        (
            "time",
            r"no layout that is certain to fit saves more than \d+\.\d% of the time of the first row",
        ),
        (
            "pareto",
            r"no layout that is certain to fit undercuts all rows by more than \d+\.\d% in time or in cost;",
        ),
    ):
        run("cluster", "plan", *words, "--objective", objective, *short)
        printed = " ".join(capsys.readouterr().out.split())
        assert re.search(text, printed) and "(--search-seconds)" in printed
        assert "parts of the cluster" in printed and "proven to within" in printed
    run("cluster", "plan", *words, "--objective", "pareto")
    assert "no layout that is certain to fit undercuts a row" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "library"), [("front.png", "matplotlib"), ("front.html", "plotly")])
def test_time_and_cost_are_drawn(name: str, library: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip(library)
    run("cluster", "plan", *words, "--objective", "pareto", "--plot", str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000


def test_an_estimate_prices_one_layout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ["--tp", "1", "--pp", "2", "--dp", "2", "--micro-batch", "2"]
    run("cluster", "estimate", *words, *degrees)
    best = capsys.readouterr().out
    run("cluster", "estimate", *words, *degrees, "--partition", "4-2")
    uneven = capsys.readouterr().out
    assert re.findall(r"^\d  +1 A\d+  +(\d)  ", uneven, re.M) == ["3", "1"]
    with pytest.raises(RuntimeError, match="--partition 4-3 has 7 items in 2 stages; 2 stages have 6"):
        run("cluster", "estimate", *words, *degrees, "--partition", "4-3")
    run("cluster", "estimate", *words, *degrees, "--reserve", "22GiB", "--set", "layers=48", "--seq", "1024")
    assert "it does not fit: " in capsys.readouterr().out
    run("cluster", "estimate", *words, *degrees, "--reserve", "20.5GiB")
    assert re.search("it may not fit: .* at the low end of its interval it would", capsys.readouterr().out)
    assert best != uneven


def test_an_estimate_has_context_parallelism(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ["--tp", "1", "--pp", "1", "--dp", "2", "--micro-batch", "1"]
    run("cluster", "estimate", *words, *degrees, "--cp", "2")
    printed = capsys.readouterr().out
    assert "1/1/2 cp2" in printed and "context parallelism" in printed


def test_peaks_may_have_to_fit_whatever_is_measured(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where nearly all of a device is reserved most layouts fit only as predicted.
    tight = ["--reserve", "17.4GiB", "--top", "5", "--json", str(tmp_path / "rows.json")]
    found = []
    for more in (["--no-certain"], [], ["--certain"]):
        run("cluster", "plan", *words, *tight, *more)
        found.append(json.loads((tmp_path / "rows.json").read_text(encoding="utf8")))
    printed = capsys.readouterr().out
    assert any(row["may be oom"] for row in found[0]) and "(?) may not fit" in printed
    assert "no layout that is certain to fit is better" in " ".join(printed.split())
    assert found[1] and not any(row["may be oom"] or row["is_oom"] for row in found[1])
    assert found[2] == found[1]
    seconds = [rows[0]["estimated time(s/step)"] for rows in found]
    assert seconds[0] <= seconds[1]


def test_what_fits_as_predicted_is_better_than_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No layout is certain to fit beside such a reserve, and some are predicted to.
    tight = ["--reserve", "20.5GiB", "--top", "3", "--json", str(tmp_path / "rows.json")]
    run("cluster", "plan", *words, *tight)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf8"))
    assert rows and all(row["may be oom"] for row in rows)
    assert "no layout is certain to fit: these may run out of memory" in capsys.readouterr().out


def test_what_limits_leave_out_may_be_certain_to_fit(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("cluster", "plan", *words, "--reserve", "20.5GiB", "--deadline", "1000h", "--steps", "10")
    assert "no layout within these limits is certain to fit" in capsys.readouterr().out


def test_every_layout_that_fits_as_predicted_is_listed_so(words: list[str], tmp_path: Path) -> None:
    tight = ["--reserve", "17.4GiB", "--zero", "0", "--recomputation", "none"]
    fitting = []
    for more in (["--no-certain"], []):
        run("cluster", "plan", *words, *tight, "--every", "--json", str(tmp_path / "rows.json"), *more)
        rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf8"))
        fitting.append(sum(not row["is_oom"] for row in rows))
    assert fitting[0] == fitting[1] > 0


#: Fields of a small mixture of experts.
MIXTURE = ["--set", "experts=4", "--set", "experts_per_token=2", "--set", "expert_width=512"]


def test_experts_are_divided_over_ranks(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, page = tmp_path / "table.json", tmp_path / "plan.html"
    files = ["--json", str(table), "--report", str(page), "--export", str(tmp_path / "exports")]
    run("cluster", "plan", *words, *MIXTURE, "--ep", "2", "--tp", "1", "--pp", "1", *files)
    printed = capsys.readouterr().out
    assert "1/1/4 ep2" in printed and "expert parallelism" in printed
    assert {row["ep"] for row in json.loads(table.read_text(encoding="utf8"))} == {2}
    html = page.read_text(encoding="utf8")
    assert "Expert parallelism over 2 devices" in html and "divide the experts" in html
    arguments = (tmp_path / "exports" / "megatron_args.sh").read_text(encoding="utf8")
    assert "--expert-model-parallel-size 2" in arguments
    degrees = ["--tp", "1", "--pp", "1", "--dp", "4", "--micro-batch", "1"]
    run("cluster", "estimate", *words, *MIXTURE, *degrees)
    whole = capsys.readouterr().out
    run("cluster", "estimate", *words, *MIXTURE, *degrees, "--ep", "4")
    assert "ep4" not in whole and "1/1/4 ep4" in capsys.readouterr().out


def test_other_frameworks_get_what_the_runtime_does_not_have(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = ["--tp", "2", "--pp", "1", "--dp", "1", "--cp", "2", "--micro-batch", "1"]
    names = {"megatron_args.sh", "deepspeed.json", "accelerate_fsdp.yaml", "torchtitan_overrides.sh"}
    for command in ("plan", "estimate"):
        folder = tmp_path / command
        run("cluster", command, *words, *degrees, "--sequence-parallel", "--export", str(folder))
        printed = capsys.readouterr().out
        assert "FlashAttention, sequence parallelism" in printed
        assert {path.name for path in folder.iterdir()} == {*names, "exports.txt", "nodes.csv"}
        assert all(name in printed for name in names)
        nodes = (folder / "nodes.csv").read_text(encoding="utf8").splitlines()
        assert nodes[0].startswith("node,name,first rank") and nodes[1:] == ["0,A100,0,1,0", "1,A10,2,3,0"]
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in (folder / "exports.txt").read_text(encoding="utf8")
        arguments = (folder / "megatron_args.sh").read_text(encoding="utf8")
        assert "--context-parallel-size 2" in arguments and "--sequence-parallel" in arguments


def test_the_target_says_the_precision(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Float16 was asked for and priced, and bfloat16 written; and the other way round on a V100."""
    run("cluster", "plan", *words, "--target", "megatron-fp16", "--export", str(tmp_path))
    assert "--fp16" in (tmp_path / "megatron_args.sh").read_text(encoding="utf8")
    old = tmp_path / "old.yaml"
    old.write_text("nodes: [{gpu: V100, count: 1, devices: 2, network: 40 Gbit/s}]\n", encoding="utf8")
    words = [str(old) if word.endswith("cluster.yaml") else word for word in words]
    with pytest.raises(RuntimeError, match="megatron-bf16 computes in bfloat16, which V100 does not have"):
        run("cluster", "plan", *words, "--target", "megatron-bf16")
    capsys.readouterr()
    run("cluster", "plan", *words, "--target", "megatron-fp16")
    assert "assumes attention that stores its scores" in capsys.readouterr().out


def test_sequence_parallelism_keeps_less(words: list[str], tmp_path: Path) -> None:
    degrees = ["--tp", "2", "--pp", "1", "--dp", "2", "--micro-batch", "2", "--recomputation", "none"]
    peaks = []
    for more in ([], ["--sequence-parallel"]):
        path = tmp_path / "row.json"
        run("cluster", "plan", *words, *degrees, "--zero", "1", *more, "--json", str(path))
        peaks.append(float(json.loads(path.read_text(encoding="utf8"))[0]["gpumem"]))
    assert peaks[1] < peaks[0]


def test_a_runnable_plan_shares_sequences_as_its_layout_does(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run("cluster", "plan", *words, "--tp", "2", "--pp", "2", "--sequence-parallel", "--out", str(out))
    shared = Plan.load(out).tensor
    assert shared is not None and shared.sequence is not None


@pytest.mark.parametrize("target", ["deepspeed-bf16", "fsdp", "megatron-bf16"])
def test_only_layouts_that_the_target_runs_are_searched(
    target: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    run("cluster", "plan", *words, "--target", target, "--every", "--json", str(path))
    rows = json.loads(path.read_text(encoding="utf8"))
    assert {row["token slices"] for row in rows} == {1}
    assert not {"mixed"} & {word for row in rows for word in (row["dp_method"], row["recompute"])}
    sharded = {(row["dp_method"], row["pp"] > 1, row["tp"] > 1) for row in rows if row["dp"] > 1}
    kinds = {kind for kind, _, _ in sharded}
    if target == "deepspeed-bf16":
        assert {row["schedule"] for row in rows} == {"1f1b"}
        assert kinds == {"zero0", "zero1", "zero2", "zero3"}
        assert not {("zero2", True, False), ("zero3", True, False), ("zero3", False, True)} & sharded
        assert ("zero2", False, True) in sharded
        run("cluster", "plan", *words, "--target", target, "--zero", "2", "--pp", "2", "--dp", "2")
    else:
        in_groups = {"zero2 in 2", "zero3 in 2"}  # of the ranks of a node
        fsdp = {"zero0", "zero2", "zero3", *in_groups}
        assert kinds == (fsdp if target == "fsdp" else {"zero0", "zero1"})
    if target == "megatron-bf16":
        groups = ["--shard-degree", "2", "--dp", "4", "--json", str(path)]
        run("cluster", "plan", *words, "--target", target, *groups)
        assert {row["dp_method"] for row in json.loads(path.read_text(encoding="utf8"))} == {"zero1 in 2"}


def test_memory_is_what_the_target_keeps(words: list[str], tmp_path: Path) -> None:
    degrees = ["--tp", "1", "--pp", "1", "--dp", "4", "--micro-batch", "2"]
    degrees += ["--zero", "0", "--recomputation", "none"]
    found = []
    for target in ("megatron-bf16", "megatron-fp16"):
        path = tmp_path / "row.json"
        run("cluster", "plan", *words, *degrees, "--target", target, "--json", str(path))
        found.append(json.loads(path.read_text(encoding="utf8"))[0]["gpumem"])
    # 18 and 20 bytes of a parameter, with the vocabulary padded as Megatron-LM pads it.
    numbers = replace(shape_of("gpt2"), layers=4, vocabulary=50304).num_parameters
    assert float(found[1]) - float(found[0]) == pytest.approx(2 * numbers / 2**30)


def test_a_plan_is_written_that_runs_and_how_to_start_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    degrees = ["--pp", "2", "--dp", "2", "--micro-batch", "1", "--schedule", "1f1b", "--zero", "0"]
    small = ["--set", "hidden=64", "--set", "heads=2", "--set", "vocabulary=512"]
    run("cluster", "plan", *words, *small, *degrees, "--out", str(out))
    printed = capsys.readouterr().out
    plan, layout = Plan.load(out), ClusterPlan.load(tmp_path / "plan.layout.json")
    assert (plan.pp, plan.dp, plan.tp, plan.schedule, plan.training.microbatches) == (2, 2, 1, "1f1b", 4)
    held = [sum(module.startswith("transformer.h.") for module in stage.modules) for stage in plan.stages]
    items = [stop - start for start, stop in zip(layout.bounds[:-1], layout.bounds[1:], strict=True)]
    assert held == [items[0] - 1, items[1] - 1]
    assert {decision.mode.value for stage in plan.stages for decision in stage.sharding.decisions} == {
        "NO_SHARD"
    }
    assert "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2" in (tmp_path / "launch.sh").read_text()
    assert "#SBATCH hetjob" in (tmp_path / "launch.sbatch").read_text()
    assert "--pipeline-model-parallel-size 2" in (tmp_path / "megatron_args.sh").read_text()
    assert json.loads((tmp_path / "deepspeed.json").read_text())["train_batch_size"] == 8
    assert "not expressed" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "gpt3"], "unknown model 'gpt3'; there are gpt2, .*did you mean"),
        (
            ["--dp", "3"],
            "no layout is possible: dp=3 does not divide the global batch of 8; dp=3 does not make the 4",
        ),
        (["--tp", "4"], "no layout is possible: tp=4 does not divide the 2 devices of A100"),
        (
            ["--tp", "2", "--set", "heads=3", "--set", "head_width=64"],
            "tp=2 does not divide the 3 heads of gpt2",
        ),
        (
            ["--dp", "2", "--micro-batch", "3"],
            "microbatches of 3 do not divide the 4 samples of each data-parallel rank at dp=2",
        ),
        (["--schedule", "zb"], "does not support schedule 'zb'; it supports 1f1b"),
        (["--objective", "fame"], "--objective fame: there are time, cost, pareto"),
        (["--search-seconds", "0"], "--search-seconds 0: must be positive and finite"),
        (["--budget", "3"], "--budget and --deadline are for the whole training: give --steps, too"),
        (
            ["--deadline", "3w", "--steps", "5"],
            "a time is a positive, finite number followed by s, m, h or d",
        ),
        (
            ["--deadline", "0.001s", "--steps", "100"],
            "no step takes at most 10.0 us; the fastest without a limit takes",
        ),
        (
            ["--deadline", "0.001s", "--steps", "100", "--certain"],
            "the fastest without a limit takes .*, of those that are certain to fit",
        ),
        (
            ["--token-slices", "4", "--recomputation", "full", "--pp", "2"],
            "no layout is possible: token slices cannot be combined with recomputation",
        ),
        (["--token-slices", "4", "--zero", "3", "--dp", "2"], "token slices need ZeRO 0 or 1"),
        (
            ["--schedule", "interleaved", "--pp", "4", "--set", "layers=4"],
            "interleaved needs 2 x pp=4 stages, more than the 6 items",
        ),
        (
            ["--schedule", "interleaved", "--pp", "4", "--set", "layers=12", "--micro-batch", "4"],
            "interleaved needs at least pp=4 microbatches; the number of microbatches is 2",
        ),
        (["--set", "causal=False"], "causal='False' is not of type bool"),
        (
            ["--set", "gated=true", "--out", "plan.json"],
            "has the architecture of gpt2: learnt positions=True where a llama",
        ),
        (["--virtual-stages", "3", "--schedule", "1f1b"], "needs --schedule interleaved, not 1f1b"),
        (["--virtual-stages", "2", "--pp", "1"], "--virtual-stages 2 needs several stages, but --pp is 1"),
        (["--virtual-stages", "4", "--pp", "2"], "interleaved needs 4 x pp=2 stages, more than the 6 items"),
        (["--cp", "3"], "cp=3 needs sequences of 6 equal parts, which 128 tokens do not have"),
        (["--cp", "2", "--no-flash"], "cp=2 needs FlashAttention"),
        (["--cp", "2", "--token-slices", "2"], "token slices cannot be combined with context parallelism"),
        (["--cp", "2", "--out", "plan.json"], "has no context parallelism: leave --cp 2 out"),
        (["--ep", "2"], "ep=2: gpt2 has no experts"),
        ([*MIXTURE, "--ep", "3"], "ep=3 does not divide the 4 experts of a layer"),
        ([*MIXTURE, "--ep", "4", "--dp", "2"], "ep=4 does not divide the dp x cp = 2 ranks"),
        ([*MIXTURE, "--out", "plan.json"], "no expert parallelism, and gpt2 has experts"),
        (
            [*MIXTURE, "--tp", "2", "--target", "megatron-bf16"],
            "experts beside tensor parallelism with sequence parallelism alone: add --sequence-parallel",
        ),
        (["--set", "experts_per_token=2"], "has no experts; experts_per_token=2 need experts"),
        (["--zero", "4"], "--zero 4: ZeRO has the stages 0, 1, 2, 3, and mixed"),
        (
            ["--every", "--subsets", "--budget", "3", "--steps", "5"],
            "--every lists all layouts on the whole cluster without limits: leave out --subsets, --budget",
        ),
        (["--deadline", "nand", "--steps", "5"], "a time is a positive, finite number .* got 'nand'"),
        (["--budget", "-3", "--steps", "5"], "--budget -3: must be positive"),
        (["--budget", "nan", "--steps", "5"], "--budget nan: must be positive"),
        (
            ["--csv", "/nowhere/a.csv", "--plot", "a.xyz"],
            "--csv /nowhere/a.csv: folder /nowhere does not exist; --plot a.xyz: must end in .png or .html",
        ),
        (["--export", "/nowhere/a"], "--export /nowhere/a: folder /nowhere does not exist"),
        (
            ["--sequence-parallel", "--tp", "2", "--seq", "127"],
            "tp=2 does not divide the 127 tokens of a sequence, which are shared",
        ),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--objective", "pareto", "--budget", "3", "--steps", "5"], "leave out --budget and --deadline"),
        (["--schedule", "zb-h1"], "which 16-bit weights do not allow"),
        (["--recomputation", "selective"], "use --no-flash, or --recomputation full"),
        (["--token-slices", "3"], "3 token slices do not divide the 128 tokens of a sequence"),
        (["--micro-batch", "3"], "microbatches of 3 do not divide the global batch of 8"),
        (["--reserve", "21.5GiB", "--certain"], "--no-certain: this is what has to be left"),
        (
            ["--subsets", "--tp", "2", "--pp", "1", "--dp", "1", "--reserve", "60GiB"],
            "nothing fits the memory limit of",
        ),
        (["--reserve", "21.98GiB"], "nothing fits the memory limit of 21.99 GiB: .*\n.*embedding"),
    ],
)
def test_what_a_user_can_mend_is_one_message(more: list[str], message: str, words: list[str]) -> None:
    with pytest.raises(RuntimeError, match=f"error: (?s:.*){message}"):
        run("cluster", "plan", *words, *more)


def test_a_layout_needs_all_its_degrees(words: list[str]) -> None:
    with pytest.raises(RuntimeError, match="an estimate needs --pp, --micro-batch, too"):
        run("cluster", "estimate", *words, "--tp", "1", "--dp", "4")


@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize("option", ["--model", "--cluster", "--global-batch"])
def test_what_is_asked_for_is_needed(
    command: str, option: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    place = words.index(option)
    with pytest.raises(RuntimeError, match="2"):
        run("cluster", command, *words[:place], *words[place + 2 :])
    assert "Missing option" in (told := capfd.readouterr().err) and option in told


def test_the_next_row_is_written_where_the_first_does_not_fit_when_it_is_traced(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = cluster_run.runnable_plan, []

    def never_the_first(plan: ClusterPlan, *rest: Any, **options: Any) -> Any:
        asked.append(plan)
        if len(asked) == 1:
            raise InfeasibleError(limit=1, best_peak=2, largest=(), suggestions=())
        return real(plan, *rest, **options)

    monkeypatch.setattr(cluster_run, "runnable_plan", never_the_first)
    small = ["--set", "hidden=64", "--set", "heads=2", "--set", "vocabulary=512", "--pp", "2"]
    run("cluster", "plan", *words, *small, "--out", str(tmp_path / "plan.json"))
    assert "row 1 does not fit when its stages are traced: nothing fits" in capsys.readouterr().out
    assert ClusterPlan.load(tmp_path / "plan.layout.json") == asked[1] != asked[0]
    asked.clear()
    with pytest.raises(RuntimeError, match="nothing fits the memory limit"):
        run("cluster", "plan", *words, *small, "--top", "1", "--out", str(tmp_path / "plan.json"))


def test_a_job_fails_as_its_steps_do(words: list[str], tmp_path: Path) -> None:
    small = ["--set", "hidden=64", "--set", "heads=2", "--set", "vocabulary=512"]
    run("cluster", "plan", *words, *small, "--pp", "2", "--dp", "2", "--out", str(tmp_path / "plan.json"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (("srun", 'case "$1" in *=1) exit 7 ;; esac'), ("scontrol", "echo host")):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf8")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    job = subprocess.run(["bash", "launch.sbatch"], cwd=tmp_path, env={"PATH": path}, timeout=30 * slowdown())
    assert job.returncode == 7
    sheet = subprocess.run(
        ["bash", str(tmp_path / "launch.sh"), "0"], capture_output=True, text=True, timeout=30 * slowdown(),
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert sheet.returncode != 0 and "MASTER_ADDR: address of node 0" in sheet.stderr
