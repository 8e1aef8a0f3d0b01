"""Writes ``docs/results.md`` and its plots from what the benchmarks left under ``benchmarks/results/``.

python -m benchmarks.results_page [--folder FOLDER]
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

#: Hardware and month of the committed measurements.
MEASURED = "cpu2-x86-64_202611"

MIB = 2**20

#: No dates, and identifiers of a fixed salt, so that the same results give the same file.
_SVG: dict[str, Any] = {"format": "svg", "metadata": {"Date": None, "Creator": None}}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Attributes:
        title: Its heading.
        text: What was measured, and what the plot shows.
        claim: The benchmark that measured it.
        figure: The plot; ``None`` for a table alone.
        table: Markdown.
    """

    title: str
    text: str
    claim: str
    figure: Figure | None = None
    table: str = ""


def results_of(claim: str) -> dict[str, Any] | None:
    """What the benchmark of this name left, or ``None``."""
    path = RESULTS / f"{claim}_{MEASURED}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf8")) if path.exists() else None
    return found


def throughput(rows: Sequence[dict[str, Any]]) -> Figure:
    """Samples per second over memory limits: OSDP's plan for each, and each baseline from its peak on."""
    panels = list(dict.fromkeys((row["case"], row["network"]) for row in rows))
    columns = len({network for _, network in panels})
    figure = Figure(figsize=(4 * columns, 3 * len(panels) / columns), layout="constrained")
    axes = figure.subplots(len(panels) // columns, columns, squeeze=False).ravel()
    for axis, (case, network) in zip(axes, panels, strict=True):
        inside = sorted(
            (row for row in rows if (row["case"], row["network"]) == (case, network)),
            key=lambda row: row["limit"],
        )
        limits = [row["limit"] / MIB for row in inside]
        axis.plot(limits, [row["samples_per_second"] for row in inside], "o-", label="OSDP", zorder=3)
        for baseline in inside[0]["baseline_peaks"]:
            speeds = []
            for row in inside:
                samples = row["samples_per_second"] * median(row["seconds"])
                fits = row["baseline_peaks"][baseline] <= row["limit"]
                seconds = row["baseline_seconds"].get(baseline)
                speeds.append(samples / median(seconds) if fits and seconds else float("nan"))
            if not all(map(isnan, speeds)):
                axis.plot(limits, speeds, "s--", label=baseline, alpha=0.8)
        axis.set_title(f"{case}, {network}", fontsize=9)
        axis.set_xlabel("memory limit of a rank, MiB", fontsize=8)
        axis.set_ylabel("samples/s", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    return figure


#: Kinds of rivals of the contest that are drawn as one curve, by the first word of their names.
FAMILIES = {
    "DDP": ("ddp",),
    "ZeRO-1": ("zero",),
    "FSDP2, HSDP": ("fsdp2", "fsdp2-keep", "fsdp2-root", "hsdp"),
}


def over_limits(rows: Sequence[dict[str, Any]]) -> Figure:
    """Samples per second of each family's fastest rival that fits, over OSDP's: each row, and their median.

    Rivals that were not among the fastest in the screening have its seconds.
    """
    networks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        _, network, _, limit = row["name"].split(", ")
        networks.setdefault(network, {}).setdefault(limit, []).append(row)
    figure = Figure(figsize=(4 * len(networks), 3.5), layout="constrained")
    axes = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axis, (network, by_limit) in zip(axes, sorted(networks.items(), reverse=True), strict=True):
        limits = sorted(by_limit)  # "no limit" comes after numbers
        axis.axhline(1, color="black", label="OSDP")
        for number, (family, kinds) in enumerate(FAMILIES.items()):
            found = {
                place: [speed for row in by_limit[limit] if (speed := _relative_speed(row, kinds))]
                for place, limit in enumerate(limits)
            }
            middles = [median(speeds) if speeds else float("nan") for speeds in found.values()]
            axis.plot(list(found), middles, "o-", color=f"C{number}", label=family)
            dots = [(place, speed) for place, speeds in found.items() for speed in speeds]
            axis.plot(*zip(*dots, strict=True) if dots else ([], []), ".", color=f"C{number}", alpha=0.3)
        axis.set_xticks(range(len(limits)), limits)
        axis.set_title(network, fontsize=9)
        axis.set_xlabel("memory limit, from all sharded (0) to all replicated (1)", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("samples/s over OSDP's", fontsize=8)
    axes[0].legend(fontsize=7)
    return figure


def _relative_speed(row: dict[str, Any], kinds: Sequence[str]) -> float | None:
    """Samples per second of the fastest fitting rival of these kinds, over OSDP's; ``None`` if none fits."""
    seconds = row.get("screened_seconds", {}) | {
        name: median(values) for name, values in row["rival_seconds"].items()
    }
    inside = [value for name, value in seconds.items() if name.split()[0] in kinds]
    return median(row["seconds"]) / min(inside) if inside else None


def contest_table(rows: Sequence[dict[str, Any]]) -> str:
    """How many times as fast as the best rival OSDP is, by network and number of ranks."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        _, network, ranks, _ = row["name"].split(", ")
        groups.setdefault(f"{network}, {ranks}", []).append(row)
    ordered = {name: groups[name] for name in sorted(groups)} | {"all": list(rows)}
    ordered["models held back"] = [row for row in rows if row.get("held_back")]
    return _table(
        ("network and ranks", "rows", "worst over the best rival", "median", "median over FSDP2"),
        (
            (name, len(inside), *(f"{figure:.2f}" for figure in _figures(inside)))
            for name, inside in ordered.items()
            if inside
        ),
    )


def _over_greedy(rows: Sequence[dict[str, Any]]) -> str:
    """How often the search pays beside a greedy choice of whole blocks, and how much; both are predicted."""
    over = [row["exact_over_greedy"] for row in rows if "exact_over_greedy" in row]
    if len(over) < 2:
        return ""
    low, middle, high = quantiles(over, n=4)
    return (
        f" A greedy choice, blocks by the seconds lost per byte saved and in plain modes, is predicted to be "
        f"slower by more than 1 % in {sum(ratio > 1.01 for ratio in over)} of {len(over)} rows, by a factor "
        f"of {middle:.2f} in the median (quartiles {low:.2f} and {high:.2f})."
    )


def free_batch_table(rows: Sequence[dict[str, Any]]) -> str:
    """The most samples per second at each limit, with any batch."""
    lines = []
    for row in rows:
        low, high = row["throughput_interval"]
        lines.append(
            (
                row["name"],
                f"{row['osdp_rate']:.2f}",
                f"{row['microbatches']} x {row['best_batch']}",
                row["best_rival"],
                f"{row['rival_rate']:.2f}",
                f"{row['throughput_ratio']:.2f} [{low:.2f}, {high:.2f}]",
                f"{row['over_by_operator']:.2f}" if "over_by_operator" in row else "-",
            )
        )
    heads = (
        "model, network, limit",
        "OSDP, samples/s",
        "its batch",
        "best rival",
        "samples/s",
        "ratio, 95 %",
        "over FSDP2 by operator",
    )
    return _table(heads, lines)


def choices_table(rows: Sequence[dict[str, Any]]) -> str:
    """By kind: at how many places it is used, and what leaving it out costs where that fits the limit."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows if "place" in row):
        inside = [row for row in rows if row.get("kind") == kind]
        used = [row for row in inside if row.get("used", True)]
        fitting = [row for row in used if row.get("fits")]
        ratios = [row["without_over_all"] for row in fitting]
        best = max(fitting, key=lambda row: row["without_over_all"], default=None)
        lines.append(
            (
                kind,
                len(used) if "used" in inside[0] else "-",
                len(used) - len(fitting),
                sum(row["wins"] for row in fitting),
                sum(row["loses"] for row in fitting),
                f"{best['without_over_all']:.2f} ({best['place']})" if best else "-",
                f"{min(ratios):.2f}" if ratios else "-",
            )
        )
    heads = ("left out", "used", "does not fit without", "wins", "loses", "most it wins", "least")
    return _table(heads, lines)


def _gathers(row: dict[str, Any]) -> str:
    """What FSDP2 would gain by asynchronous gathers."""
    low, high = row["interval"]
    return (
        f" {row['name']}: {row['without_over_all']:.2f} [{low:.2f}, {high:.2f}] times as fast as with "
        "gathers that block."
    )


def _figures(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    over = [row["over_best_rival"] for row in rows]
    return min(over), median(over), median(row["over_fsdp2"] for row in rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def predicted_over_measured(rows: Sequence[dict[str, Any]], unit: str, scale: float) -> Figure:
    """Each prediction over its measurement, on logarithmic axes beside the diagonal."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    ends = [limit(row["measured"] for row in rows) / scale for limit in (min, max)]
    axis.loglog(ends, ends, color="grey", linewidth=0.8)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for kind in kinds:
        inside = [row for row in rows if row["kind"] == kind]
        axis.loglog(
            [row["measured"] / scale for row in inside],
            [row["predicted"] / scale for row in inside],
            ".",
            label=kind,
        )
    axis.set_xlabel(f"measured, {unit}")
    axis.set_ylabel(f"predicted, {unit}")
    axis.legend(fontsize=8)
    return figure


def sections() -> Iterator[Section]:
    """The parts of the page, as far as there are results; the first plot is the README's, too."""
    if (found := results_of("contest")) and (rows := [row for row in found["rows"] if "best_rival" in row]):
        yield Section(
            "Any model, limit and network",
            f"{len(rows)} rows drawn by a seed from models, memory limits, networks and numbers of ranks. "
            "Each rival trains the same batch as it pleases (recomputation, microbatches, buckets), and is "
            "drawn where its true peak fits: lines are medians over models, dots are rows. "
            "AdamW steps as torch does by itself under the rivals; under OSDP by torch's fused kernel, in "
            "the rows of commits that have it (the file names the commit of each). "
            f"{sum(row['too_noisy'] for row in rows)} rows were too noisy to be judged."
            + _over_greedy(rows)
            + (" The run was ended before the others." if not found["complete"] else ""),
            "contest",
            over_limits(rows),
            contest_table(rows),
        )
    if found := results_of("throughput"):
        summary = found["summary"]
        yield Section(
            "Throughput at a memory limit",
            "Two ranks with one core each train two GPT-2 shapes; DDP and FSDP2 are drawn where their true "
            f"peak fits. OSDP is {summary['worst_over_best_baseline']:.2f} times as fast as the best of them "
            f"that fits, or faster, and up to {summary['best_over_fsdp2']:.2f} times as fast as FSDP2.",
            "throughput",
            throughput(found["rows"]),
        )
    if (found := results_of("batch_size")) and (
        rows := [row for row in found["rows"] if "best_rival" in row]
    ):
        yield Section(
            "Any batch at a memory limit",
            "OSDP and each rival at the batch, recomputation and microbatches with which it trains the most "
            "samples a second under the limit. On the slow link OSDP's model computes its loss in slices of "
            "the vocabulary."
            + (
                " The published models are those below in small: a sixteenth as wide, on two ranks."
                if any("over_by_operator" in row for row in rows)
                else ""
            ),
            "batch_size",
            table=free_batch_table(rows),
        )
    if (found := results_of("choices")) and (rows := [row for row in found["rows"] if "same_program" in row]):
        yield Section(
            "What each kind of choice wins",
            "The plan found among all choices and those without one kind of them, in turns at "
            f"{len({row['place'] for row in rows if 'place' in row})} places: models on networks at limits. "
            "A kind wins or loses where the whole interval of the ratio lies beyond 1 % and beyond that of "
            "the same program twice. The last line is a rival instead."
            + "".join(map(_gathers, (row for row in rows if "place" not in row))),
            "choices",
            table=choices_table(rows),
        )
    if found := results_of("memory_accuracy"):
        rows = [row | {"kind": row.get("backend", "")} for row in found["rows"] if "measured" in row]
        summary = found["summary"]
        yield Section(
            "Memory: predicted and measured",
            f"{summary['rows']} plans on real gloo ranks, counted in the process, and {summary['fake_rows']} "
            "in larger worlds under the fake group. On gloo the worst error is "
            f"{summary['worst_error']:.1%}, and {summary['false_feasible']} plans exceed the limit that they "
            "were said to fit.",
            "memory_accuracy",
            predicted_over_measured(rows, "MiB", MIB),
        )
    if found := results_of("time_accuracy"):
        rows = [row | {"kind": row["group"].partition(", ")[2]} for row in found["rows"] if "measured" in row]
        summary = found["summary"]
        yield Section(
            "Time: predicted and measured",
            f"{summary['points']} plans on loopback and on two hosts with limited uplinks: mean absolute "
            f"error {summary['mape']:.1%}, worst {summary['worst']:.1%}, bias {summary['bias']:+.1%} (from "
            f"the profile before the steps alone {summary['mape_before']:.1%} and "
            f"{summary['bias_before']:+.1%}; the machine drifts, so there are more between and after them, "
            "and their median counts); the mean "
            "of Kendall's tau within the plans of one model, batch and network is "
            f"{summary['mean_tau_within_groups']:.2f}.",
            "time_accuracy",
            predicted_over_measured(rows, "ms", 1e-3),
        )
    if found := results_of("published_cases"):
        yield Section(
            "The published cases",
            "Predicted on 8 simulated RTX TITAN; no such machine was at hand. The published ratios compare "
            "with FSDP that wraps each linear layer alone, the second one at half the batch.",
            "published_cases",
            table=_table(
                (
                    "case",
                    "OSDP over the best FSDP2",
                    "its setup",
                    "over FSDP2 by operator",
                    "bound by compute",
                    "published",
                ),
                (
                    (
                        row["name"],
                        f"{row['over_fsdp2']:.2f}",
                        row["fsdp2"],
                        f"{row['over_by_operator']:.2f}",
                        f"{row['bound']:.2f}",
                        f"{row['published']:.2f}",
                    )
                    for row in found["rows"]
                ),
            ),
        )


def write(folder: Path) -> None:
    """Write the page and its plots into ``folder``."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    page = [
        "# Results",
        "",
        "Each figure is of the machine that its file names; see [Benchmarks](benchmarks.md).",
    ]
    for section in sections():
        page += ["", f"## {section.title}", "", section.text, ""]
        if section.figure is not None:
            with matplotlib.rc_context({"svg.hashsalt": section.claim}):
                section.figure.savefig(images / f"{section.claim}.svg", **_SVG)
            page += [f"![{section.title}](images/{section.claim}.svg)", ""]
        if section.table:
            page += [section.table, ""]
        page.append(
            f"`python -m benchmarks.{section.claim}` wrote "
            f"`benchmarks/results/{section.claim}_{MEASURED}.json`."
        )
    (folder / "results.md").write_text("\n".join(page) + "\n", encoding="utf8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where it is written (docs)")
    write(parser.parse_args(arguments).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
