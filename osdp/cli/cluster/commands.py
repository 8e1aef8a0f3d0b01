"""``osdp cluster plan``, ``estimate`` and ``layers``: from options to calls of the planner."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from osdp.cli.cluster.calibrate import calibrate_steps
from osdp.cli.cluster.exports import write_exports
from osdp.cli.cluster.goal import GoalOptions
from osdp.cli.cluster.measure import measure_layout, write_layouts
from osdp.cli.cluster.outputs import OutputFiles
from osdp.cli.cluster.report import write_page
from osdp.cli.cluster.request import ClusterRequest
from osdp.cli.cluster.runnable import (
    is_measurable,
    require_buildable,
    require_measurable,
    runnable_space,
    traced_prices,
    write_runnable,
)
from osdp.cli.models import load_layer_profile, model_label
from osdp.cli.options import Out, flat_options
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.export.breakdown import breakdown
from osdp.cluster.export.pareto_plot import plot_plans
from osdp.cluster.export.table import csv_table, json_table, rows_of, text_table, ties_text
from osdp.cluster.layer_profile import merge_profiles
from osdp.cluster.plan import ClusterPlan, ParallelLayout, num_layers
from osdp.cluster.search.infeasible import check_space, no_plan_error
from osdp.cluster.search.layouts import SearchResult, best_arrangement, every_layout
from osdp.cluster.search.measured_times import MeasuredTimes, with_measured
from osdp.cluster.search.objectives import Objective, best_plans, pareto
from osdp.cluster.search.space import LayoutSpace, families
from osdp.plan.deadline import Deadline
from osdp.plan.schedules import ONE_STAGE
from osdp.text import format_bytes, format_seconds, wrapped

app = typer.Typer(
    no_args_is_help=True,
    help="The cluster planner: parallel layouts of transformers on clusters, without any device.",
)


@app.command()
@flat_options
def plan(request: ClusterRequest, goal: GoalOptions, outputs: OutputFiles) -> None:
    """Find the best layouts of --model on --cluster; print them, and write the requested files."""
    outputs.check()
    sought = goal.goal()
    prices = request.prices()
    space = request.space(prices.workload)
    if outputs.runs:
        space = runnable_space(space)
    _require_consistent(request, goal, outputs)
    check_space(prices, space, parts=goal.parts)
    shape, cluster = prices.workload.shape, prices.cluster
    if outputs.runs or request.measured:
        prices = _as_built(prices, request)
    times = request.measured_times(prices)
    found = _search(times, space, goal)
    if not found.plans and request.certain is None:
        # What fits as predicted is better than nothing.
        prices = prices.as_predicted
        times = request.measured_times(prices)
        found = _search(times, space, goal)
    plans: Sequence[ClusterPlan] = found.plans
    if goal.every:
        every = [times.corrected(plan) for plan in every_layout(prices, space) if not times.ran_out(plan)]
        every.sort(key=lambda plan: (not plan.fits, prices.certain and plan.may_not_fit, plan.step_seconds))
        plans = every if goal.top is None else with_measured(every, goal.top)
    if not plans:
        raise no_plan_error(times, space, sought, Deadline.after(goal.search_seconds))
    rows = rows_of(plans, cluster, shape, goal.steps)
    if outputs.csv is not None:
        outputs.csv.write_text(csv_table(rows), encoding="utf8")
    if outputs.json is not None:
        outputs.json.write_text(json_table(rows), encoding="utf8")
    if outputs.plot is not None:
        plot_plans(plans, cluster, outputs.plot)
    typer.echo(text_table(plans, cluster, goal.steps))
    if not found.plans:
        # The rows of --every show how much memory each of them lacks.
        raise no_plan_error(times, space, sought, Deadline.after(goal.search_seconds))
    if told := times.told():
        typer.echo(wrapped(told))
    # On a front every plan has nodes of its own, and is best on these.
    if not goal.pareto and (
        tied := ties_text(plans, outputs.measure is None and is_measurable(request, shape))
    ):
        typer.echo(tied)
    typer.echo(wrapped(_proof(found, goal, certain=prices.certain)))
    if request.certain is None and not prices.certain:
        within = " within these limits" * (min(sought.step_seconds, sought.step_dollars) < math.inf)
        typer.echo(f"no layout{within} is certain to fit: these may run out of memory")
    typer.echo(wrapped(_basis(prices)))
    typer.echo("")
    typer.echo(breakdown(found.plans[0], cluster, shape))
    chosen = found.plans[0]
    if outputs.out is not None:
        chosen = write_runnable(found.plans, prices, request, outputs.out)
    if outputs.measure is not None:
        write_layouts(outputs.measure, found.plans, prices, request)
    # A runnable plan has them beside it.
    if outputs.export is not None and (outputs.out is None or outputs.export != outputs.out.parent):
        write_exports(outputs.export, chosen, prices, request.half)
    if outputs.report is not None:
        write_page(outputs.report, chosen, found, plans, times, space, goal, _basis(prices), _progress)
        typer.echo(f"written: {outputs.report}")


@app.command()
@flat_options
def estimate(
    request: ClusterRequest,
    partition: Annotated[
        str | None, typer.Option(help="number of items of each stage, for example 13-12-12-13")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="folder for the layout as configurations of Megatron-LM, DeepSpeed and others"),
    ] = None,
) -> None:
    """Estimate time and memory of one layout of --model on --cluster, with a breakdown of each.

    --tp, --pp, --dp and --micro-batch are required; the defaults are 1f1b, no recomputation and ZeRO 0.
    """
    prices = request.prices()
    space = replace(
        request.space(prices.workload),
        token_slices=(request.token_slices or 1,),
        cp=(request.cp or 1,),
        ep=(request.ep or 1,),
    )
    missing = [name for name in ("tp", "pp", "dp", "micro_batch") if getattr(request, name) is None]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"an estimate needs {options}, too")
    check_space(prices, space)
    if request.pp == 1 and request.schedule_name != ONE_STAGE:
        raise ValueError(f"--schedule {request.schedule_name} needs several stages, but --pp is 1")
    if request.measured:
        prices = _as_built(prices, request)
    family = next(families(prices.cluster, prices.cluster.counts, prices.workload, space))
    layout: ParallelLayout = replace(
        family.plain,
        schedule=request.schedule_name,
        virtual_stages=0 if request.virtual_stages == 2 else request.virtual_stages or 0,
        recompute=request.recompute_layers,
        zero=request.zero_stage,
        shard_degree=request.shard_degree or 0,
    )
    plan = best_arrangement(prices, layout, family.cells)
    if plan is None:
        raise ValueError(
            f"{len(prices.items)} items cannot be cut into {layout.degrees.pp} stages of this schedule"
        )
    if partition is not None:
        bounds = _bounds(partition)
        _require_all(partition, bounds, prices, layout.degrees.pp)
        plan = price(prices, layout, bounds, plan.slots)
    times = request.measured_times(prices)
    plan = times.corrected(plan)
    typer.echo(text_table([plan], prices.cluster))
    if told := times.told():
        typer.echo(wrapped(told))
    typer.echo(wrapped(_basis(prices)))
    if times.ran_out(plan):
        typer.echo("it ran out of memory when it was measured")
    elif not plan.fits:
        may = plan.fits_if(plan.spread.peak_low)
        typer.echo(
            f"it {'may' if may else 'does'} not fit: it needs {format_bytes(plan.peak.total)}, the limit is "
            f"{format_bytes(plan.peak.limit)}" + ", and at the low end of its interval it would" * may
        )
    elif plan.may_not_fit:
        typer.echo(
            f"it is not certain to fit: its peak may be {format_bytes(plan.peak_interval[1])}, the limit is "
            f"{format_bytes(plan.peak.limit)}"
        )
    typer.echo("")
    typer.echo(breakdown(plan, prices.cluster, prices.workload.shape))
    if export is not None:
        write_exports(export, plan, prices, request.half)


@app.command()
def layers(
    described: Annotated[
        list[Path],
        typer.Argument(help="folders written by osdp profile, for different batch sizes, lengths and --tp"),
    ],
    gpu: Annotated[str, typer.Option(help="name of the GPU, as in cluster files")],
    model: Annotated[str, typer.Option(help="name of the model, as in osdp cluster plan --model")],
    out: Out = Path("layers.json"),
) -> None:
    """Collect the layer times measured by osdp profile, for --layer-times of the other commands."""
    found = merge_profiles([load_layer_profile(folder, gpu, model_label(model)) for folder in described])
    found.save(out)
    cases = sorted({(layer.case.samples, layer.case.sequence, layer.case.tp) for layer in found.layers})
    sizes = ", ".join(f"{samples} x {sequence} on tp={tp}" for samples, sequence, tp in cases)
    typer.echo(wrapped(f"{model} on {gpu}: layers in {found.dtype} at {sizes} written to {out}"))


app.command("calibrate")(calibrate_steps)
app.command("measure")(measure_layout)


def _search(times: MeasuredTimes, space: LayoutSpace, goal: GoalOptions) -> SearchResult:
    """The best layouts by corrected times, or the Pareto front."""
    until = Deadline.after(goal.search_seconds)
    if goal.pareto:
        return pareto(times.prices, space, _progress("parts"), deadline=until)
    sought, what = goal.goal(), "parts" if goal.parts else "layouts"
    found = best_plans(times.prices, space, times.wider(sought), _progress(what), until)
    return times.ranked(found, space, sought)


def _proof(found: SearchResult, goal: GoalOptions, *, certain: bool) -> str:
    """What the search has considered, and what it has proven of the plans that it found, as text."""
    on = f" on {found.parts:,} parts of the cluster" * goal.parts
    said = (
        f"{found.candidates:,} layouts with {found.placements:,} placements{on}; {found.arranged:,} of them "
        "were cut and placed, "
    )
    gap = math.ceil(found.plans[0].gap * 1000) / 1000  # rounded up to what is printed
    which = " that is certain to fit" * certain
    if goal.pareto and gap:
        proven = f"no layout{which} undercuts all rows by more than {gap:.1%} in time or in cost"
    elif goal.pareto:
        proven = f"no layout{which} undercuts a row in both time and cost"
    elif gap:
        what = "cost" if goal.objective == Objective.COST else "time"
        proven = f"no layout{which} saves more than {gap:.1%} of the {what} of the first row"
    else:
        proven = f"no layout{which} is better than the first row"
    limited = (
        f"; not all layouts or orders of the nodes were tried in {format_seconds(goal.search_seconds)} "
        "(--search-seconds)"
    ) * (gap > 0)
    return f"{said}{proven}{limited}"


def _require_consistent(request: ClusterRequest, goal: GoalOptions, outputs: OutputFiles) -> None:
    """Refuse options about measured layouts that contradict others."""
    if outputs.measure is not None:
        require_measurable(request)
        if goal.every:
            raise ValueError("--measure writes the best rows, and --every lists all: leave one of them out")
    if goal.pareto and (outputs.measure is not None or request.measured):
        raise ValueError(
            "every row of --objective pareto has nodes of its own, whose times --measure and --measured do "
            "not compare: leave one of them out"
        )


def _as_built(prices: ClusterPrices, request: ClusterRequest) -> ClusterPrices:
    """The same costs with the activations of the model itself, as layouts to measure are priced."""
    require_buildable(request, prices.workload.shape)
    return traced_prices(prices, request)


def _basis(prices: ClusterPrices) -> str:
    """Assumptions of the estimates, as text."""
    attention = "FlashAttention" if prices.workload.flash else "attention that stores its scores"
    split = ", sequence parallelism" * prices.workload.sequence_parallel
    kept = "traced from the model" if prices.traced else "as with fused kernels"
    load = prices.workload
    tensors = f", and {load.tensor_overlap:.0%} of the tensor-parallel ones," * (load.tensor_overlap > 0)
    whole = "; pipelines keep sharded weights and gradients whole" * (not load.reduces_in_stages)
    measured = [found.gpu for found in prices.profiles]
    layers = f"; layers measured on {', '.join(measured)}" if measured else ""
    return (
        f"assumes {attention}{split}; activations {kept}{layers}; {prices.workload.overlap:.0%} of the "
        f"collectives of gradients and weights{tensors} overlap with compute{whole}"
    )


def _progress(what: str) -> Callable[[int, int], None]:
    """A progress bar on stderr, if that is a terminal."""
    from tqdm import tqdm

    bar = tqdm(desc=what, leave=False, disable=None)

    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return advance


def _bounds(partition: str) -> tuple[int, ...]:
    try:
        sizes = [int(word) for word in partition.split("-")]
    except ValueError as error:
        raise ValueError(f"--partition must look like 13-12-12-13, got {partition!r}") from error
    return (0, *accumulate(sizes))


def _require_all(partition: str, bounds: Sequence[int], prices: ClusterPrices, pp: int) -> None:
    if len(bounds) != pp + 1 or bounds[-1] != len(prices.items):
        raise ValueError(
            f"--partition {partition} has {bounds[-1]} items in {len(bounds) - 1} stages; {pp} stages have "
            f"{len(prices.items)} together: {num_layers(prices.items)} layers, embeddings and the head"
        )
