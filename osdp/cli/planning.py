"""``osdp plan``, ``memory``, ``show``, ``explain``, ``diff``, ``whatif`` and ``report``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from osdp import codec
from osdp.cli.described import Described, DescribeOptions, from_folder, on_the_spot
from osdp.cli.models import MODEL, load_described_model
from osdp.cli.options import Out, TrustCode
from osdp.errors import InfeasibleError
from osdp.plan.plan import Plan
from osdp.text import format_bytes, format_seconds, wrapped

_PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="JSON file of a plan")]
_Page = Annotated[
    Path | None,
    typer.Option("--report", help="also write the page of osdp report; if nothing fits, of the lowest peak"),
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="folder written by osdp profile; or with --devices a model by name (llama3-8b, a model type of "
        "transformers), a configuration in JSON or its folder, or module:function",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SearchChoices:
    """Options of the search: what it may choose, and what is given."""

    microbatches: Annotated[
        int | None, typer.Option(min=1, help="microbatches per step; by default 1, or 4 x pp with stages")
    ] = None
    strategy: Annotated[
        str | None, typer.Option(help="use this sharding strategy everywhere, for example FULL_SHARD")
    ] = None
    slices: Annotated[bool, typer.Option(help="allow operators to run in slices")] = True
    recompute: Annotated[bool, typer.Option(help="allow recomputation of blocks")] = True
    offload: Annotated[bool, typer.Option(help="allow offloading of sharded states to host memory")] = True
    search_seconds: Annotated[
        float | None, typer.Option(help="time limit of the search; by default about a second")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Options of the layout of ranks: degrees, and the schedule of stages."""

    pp: Annotated[int, typer.Option(min=1, help="pipeline-parallel degree")] = 1
    dp: Annotated[
        int | None, typer.Option(min=1, help="data-parallel degree; the number of devices described")
    ] = None
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel degree")] = 1
    schedule: Annotated[str | None, typer.Option(help="pipeline schedule; by default the fastest")] = None


def plan(
    model: _Model,
    described: DescribeOptions,
    choices: SearchChoices,
    layout: LayoutOptions,
    device: Annotated[Path | None, typer.Option(help="JSON file of another device description")] = None,
    trust_code: TrustCode = False,
    page: _Page = None,
    out: Out = Path("plan.json"),
) -> None:
    """Find the fastest plan for MODEL, save it and print it."""
    from osdp.api import make_plan
    from osdp.plan.search_options import SLICES

    _require_two_files(out, page)
    found = _described(model, described, device)
    device_info = found.device
    dp, microbatches = layout.dp, choices.microbatches
    if dp not in (None, device_info.world_size):
        mend = (
            f"name {dp} in --devices"
            if described.devices is not None
            else f"profile on {dp} devices (torchrun --nproc-per-node {dp} --no-python osdp profile ...), or "
            "pass their description with --device"
        )
        raise ValueError(
            f"--dp {dp} does not match the number of devices described, {device_info.world_size}: {mend}"
        )
    options: dict[str, Any] = {
        "training": replace(found.training, microbatches=microbatches or 1),
        "profile": found.profile,
        "strategy": choices.strategy,
        "slices": SLICES if choices.slices else (),
        "recompute": choices.recompute,
        "offload": choices.offload,
        "search_seconds": choices.search_seconds,
    }
    if layout.pp > 1 or layout.tp > 1:
        if described.devices is not None:
            raise ValueError("--devices plans data parallelism; stages of a cluster: osdp cluster plan")
        options |= {"pp": layout.pp, "dp": device_info.world_size, "tp": layout.tp}
        options["schedule"] = layout.schedule
        options["microbatches"] = () if microbatches is None else (microbatches,)
        module, sample = load_described_model(Path(model), trust_code=trust_code)
        with _shortfall_in(page):
            made = make_plan(module, sample, device_info, **options)
    elif layout.schedule is not None:
        raise ValueError(f"--schedule {layout.schedule} is for pipeline stages: pass --pp as well")
    else:
        with _shortfall_in(page):
            made = make_plan(None, found.model_desc, device_info, **options)
    made.save(out)
    typer.echo(made)
    if made.basis is not None:
        typer.echo(_verdict(made))
    if page is not None:
        _write_page(made, page)


def _require_two_files(out: Path | None, page: Path | None) -> None:
    if out is not None and page is not None and out.absolute() == page.absolute():
        raise ValueError(f"the plan and its page cannot both be written to {out}: name two files")


@contextmanager
def _shortfall_in(page: Path | None, beside_json: bool = False) -> Iterator[None]:
    """Writes the page of the plan with the lowest peak, to show what is missing where, if nothing fits."""
    try:
        yield
    except InfeasibleError as error:
        if page is not None and error.lowest is None:
            typer.echo(f"{page} is not written: there is none of models that are cut into stages", err=True)
        elif page is not None:
            try:
                _write_page(error.lowest, page, beside_json)
            except (ImportError, OSError) as fault:  # what nothing fits is the larger fault
                typer.echo(f"{page} is not written: {fault}", err=True)
        raise


def _write_page(made: Plan, path: Path, beside_json: bool = False) -> None:
    made.report(path)
    typer.echo(f"written: {path}", err=beside_json)


def _described(model: str, options: DescribeOptions, device: Path | None = None) -> Described:
    if Path(model, MODEL).is_file() or (options.devices is None and Path(model).is_dir()):
        if given := options.given():
            raise ValueError(f"{model} is described already: {', '.join(given)} would have no effect")
        return from_folder(Path(model), device, options.memory_limit)
    if device is not None:
        raise ValueError(
            f"--device {device} describes the devices of a folder written by osdp profile, which {model} is "
            "not: name them with --devices alone"
        )
    return on_the_spot(model, options)


def _verdict(made: Plan) -> str:
    """Whether it fits, how fast it is, what limits it and how sure that is."""
    from osdp.explain.unit_choices import limits_of

    assert made.basis is not None
    limit, peak = made.memory_limit, made.predicted.peak_bytes
    rate = f"{made.samples_per_second:.3g} samples/s"
    if tokens := made.basis.model_desc.tokens_per_sample:
        rate += f", {made.samples_per_second * tokens:.3g} tokens/s"
    sure = (
        "times were measured on this kind of device"
        if made.measured_profile
        else "times are estimated from the specifications of the devices, memory from the trace"
    )
    if made.predicted.spread:
        sure += f", and good to ± {made.predicted.spread:.1%} by their spread"
    lines = [
        f"fits: {format_bytes(peak)} of {format_bytes(limit)}",
        f"speed: {format_seconds(made.predicted.step_seconds)} a step, {rate}",
        f"limited by: {limits_of(made)}",
        f"how sure: {sure}",
    ]
    return "\n".join(["", *map(wrapped, lines)])


def memory(
    model: _Model,
    described: DescribeOptions,
    batches: Annotated[list[int], typer.Option("--batches", help="a local batch; several times")] = [],  # noqa: B006
    as_json: _Json = False,
) -> None:
    """Print what a step of MODEL takes by sharding mode and batch: states, activations and the rest."""
    from osdp.explain.memory_by_mode import memory_by_mode
    from osdp.plan.basis import Basis
    from osdp.plan.search_options import SHARDING
    from osdp.profiler.progress import progress_bar
    from osdp.profiler.roofline import estimate
    from osdp.report.explanation_table import memory_table

    found = _described(model, described)
    profile = found.profile or estimate(found.model_desc, found.device, found.training)
    training = replace(found.training, local_batch=profile.local_batch)
    basis = Basis(found.model_desc, found.device, (training,), (profile,), SHARDING)
    wanted, rows = batches or [profile.local_batch], []
    bar = progress_bar(len(wanted), "batches")
    try:
        for batch in wanted:
            rows += memory_by_mode(basis, [batch])
            bar.update()
    finally:
        bar.close()
    if as_json:
        typer.echo(codec.to_json(rows), nl=False)
        return
    typer.echo(
        f"{found.model_desc.name}, {found.model_desc.num_parameters:,} parameters, {training.optimizers}, "
        f"{found.device.world_size} x {found.device.kind} of {format_bytes(found.device.memory_limit)}; "
        "at the peak of a step:"
    )
    typer.echo(memory_table(rows))


def show(
    path: _PlanFile,
    written_for: Annotated[
        str | None,
        typer.Option(
            "--for", help="write it for another library instead: fully_shard (Python) or transformers (JSON)"
        ),
    ] = None,
) -> None:
    """Print the plan saved in PLAN."""
    found = Plan.load(path)
    if written_for is None:
        typer.echo(found)
        return
    from osdp.integrations.plan_export import to_fully_shard, to_transformers

    writers = {"fully_shard": to_fully_shard, "transformers": to_transformers}
    if written_for not in writers:
        raise ValueError(f"--for {written_for}: there are {', '.join(writers)}")
    exported = writers[written_for](found)
    text = exported.content
    typer.echo(text if isinstance(text, str) else json.dumps(text, indent=2))
    for line in exported.lost:
        typer.echo(f"lost: {line}", err=True)


def explain(
    path: _PlanFile,
    unit: Annotated[str | None, typer.Option(help="only units with this operator or module")] = None,
    as_json: _Json = False,
) -> None:
    """Print for each unit of PLAN what its other choices would cost, and what would make them better."""
    from osdp.report.explanation_table import explanation_table

    found = Plan.load(path).explain(unit)
    typer.echo(codec.to_json(found) if as_json else explanation_table(found), nl=not as_json)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="JSON file of a plan")],
    after: Annotated[Path, typer.Argument(metavar="B", help="JSON file of another plan of the same model")],
    as_json: _Json = False,
) -> None:
    """Print which operators two plans decide differently, and what that does to time and memory."""
    from osdp.explain.difference import diff as difference_of
    from osdp.report.explanation_table import difference_table

    found = difference_of(Plan.load(before), Plan.load(after))
    typer.echo(codec.to_json(found) if as_json else difference_table(found), nl=not as_json)


def whatif(
    path: _PlanFile,
    memory_limit: Annotated[str | None, typer.Option(help="per device, for example 6GiB")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="network between nodes, or between ranks of one, for example 10Gbit/s")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples per device in a microbatch")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="microbatches per step")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks")] = None,
    optimizer: Annotated[str | None, typer.Option(help="a class in torch.optim")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="also save the new plan")] = None,
    page: _Page = None,
    as_json: _Json = False,
) -> None:
    """Plan again under other settings, from the same measurements, and compare with PLAN."""
    from osdp.explain.difference import diff as difference_of
    from osdp.explain.what_if import what_if
    from osdp.report.explanation_table import difference_table
    from osdp.text import parse_rate

    _require_two_files(out, page)
    before = Plan.load(path)
    with _shortfall_in(page, as_json):
        after = what_if(
            before,
            memory_limit=memory_limit,
            bandwidth=None if bandwidth is None else parse_rate(bandwidth),
            local_batch=batch,
            microbatches=microbatches,
            ranks=ranks,
            optimizer=optimizer,
        )
    if out is not None:
        after.save(out)
    if page is not None:
        _write_page(after, page, as_json)
    found = difference_of(before, after)
    if as_json:
        typer.echo(codec.to_json(found), nl=False)
        return
    typer.echo(difference_table(found))
    for note in after.notes:
        typer.echo(f"note: {note}")


def report(
    path: _PlanFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write")] = Path("plan.html"),
    png: Annotated[
        Path | None, typer.Option(help="also draw memory, time and frontier, as PNG or SVG by its suffix")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="file written by model.memory_report().save(...), drawn beside")
    ] = None,
) -> None:
    """Write a page about PLAN, one HTML file: what was decided and why, memory, time, and what if."""
    from osdp.explain.collect import collect
    from osdp.plan.measured import MemoryReport
    from osdp.report.html.page import html_page

    _require_two_files(path, out)
    plan, run = Plan.load(path), None if measured is None else MemoryReport.load(measured)
    if run is not None and run.predicted_peak_bytes != plan.predicted.peak_bytes:
        raise ValueError(
            f"{measured} is of a run under another plan: its predicted peak is "
            f"{format_bytes(run.predicted_peak_bytes)}, and that of {path} is "
            f"{format_bytes(plan.predicted.peak_bytes)}"
        )
    found = collect(plan, run)
    out.write_text(html_page(found), encoding="utf8")
    typer.echo(f"written: {out}")
    if png is not None:
        from osdp.report.picture import draw

        draw(found, png)
        typer.echo(f"written: {png}")
