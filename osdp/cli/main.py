"""The ``osdp`` command (extra ``cli``): parse, call one function, print.

``osdp profile`` describes and times a model and saves what it found in a folder, ``osdp plan`` plans from
that folder on any machine, or lays a transformer over a cluster, ``osdp estimate`` prices one layout of it,
``osdp show`` prints a saved plan. Under torchrun (``torchrun --no-python osdp
profile ...``) ``profile`` measures the links between the processes too.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from osdp import __version__, codec
from osdp.cli import cluster as cli_cluster
from osdp.cluster.layer_profile import merged
from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.plan.pipeline import PipelinePlan
from osdp.plan.plan import Plan
from osdp.text import format_bytes, parse_bytes

try:
    import typer
except ImportError as error:
    raise SystemExit("error: the osdp command needs typer: pip install 'osdp[cli]'") from error

from osdp.cli.exclusive_options import refuse_others
from osdp.cli.models import (
    DEVICE,
    MODEL,
    PROFILE,
    SOURCE,
    TRAINING,
    ModelSource,
    build,
    described_model,
    measured_layers,
    model_label,
    parse_fields,
    require_described,
    require_whole,
)
from osdp.cli.outputs import OutputFiles

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=__doc__,
)

#: Libraries that commands import when they need them, by the extra that brings them.
_EXTRA_OF = {
    "transformers": "hf", "tqdm": "cli", "yaml": "cli", "rich": "cli", "matplotlib": "report",
    "plotly": "report",
}  # fmt: skip

_ModelName = Annotated[
    str,
    typer.Argument(
        help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, a model_type of transformers, a JSON file of a "
        "configuration with its model_type, or module:function, which returns (model, sample batch)"
    ),
]
_Fields = Annotated[list[str], typer.Option("--set", help="configuration field, for example n_layer=4")]
_ShapeFields = Annotated[list[str], typer.Option("--set", help="number of the model, for example layers=40")]
_Out = Annotated[Path, typer.Option(help="where to write")]
_Limit = Annotated[str | None, typer.Option(help="per device, for example 8GiB")]
_Shape = Annotated[
    str | None,
    typer.Option(
        help="with --cluster: name of a transformer, or a JSON file of its configuration or numbers"
    ),
]
_Cluster = Annotated[Path | None, typer.Option(help="YAML or JSON file of the nodes there are")]
_Batch = Annotated[int | None, typer.Option(min=1, help="samples of a step")]
_Seq = Annotated[int | None, typer.Option(min=1, help="tokens of a sample")]
_Micro = Annotated[int | None, typer.Option(min=1, help="samples of a microbatch")]
_Flash = Annotated[
    bool | None,
    typer.Option(
        "--flash/--no-flash", help="whether scores of attention are never written; as calibrated, or yes"
    ),
]
_Recompute = Annotated[str | None, typer.Option("--recomputation", help="none, selective, full or mixed")]
_Zero = Annotated[str | None, typer.Option(help="stage of ZeRO, 0 to 3, or mixed: decided layer by layer")]
_TokenSlices = Annotated[int | None, typer.Option(min=1, help="equal slices of each sequence")]
_Overlap = Annotated[float, typer.Option(help="part of the collectives that compute hides, 0 to 1")]
_LayerTimes = Annotated[
    list[Path], typer.Option("--layer-times", help="file that osdp layers wrote; one for each kind of GPU")
]
_Reserve = Annotated[str, typer.Option(help="of each device, for the framework")]
_TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="run the code that a described folder names to build its model; see osdp profile"
    ),
]
_Calibration = Annotated[Path | None, typer.Option(help="file that osdp calibrate wrote, of these nodes")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"osdp {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options of no command."""


@app.command()
def profile(
    model: _ModelName,
    batch: Annotated[int, typer.Option(help="samples per device and microbatch")] = 1,
    seq: Annotated[int, typer.Option(help="tokens of a sample")] = 1024,
    fields: _Fields = [],  # noqa: B006  (typer copies it)
    optimizer: Annotated[str, typer.Option(help="name of a torch.optim class")] = "AdamW",
    memory_limit: _Limit = None,
    estimate: Annotated[bool, typer.Option(help="from a roofline, without running the model")] = False,
    param_dtype: Annotated[str | None, typer.Option(help="to compute in, for example bfloat16")] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="time what one of so many ranks computes, for osdp layers")
    ] = 1,
    out: _Out = Path("described"),
) -> None:
    """Describe MODEL and its device, time it, and save what was found in a folder."""
    from torch import cuda, distributed
    from torch.distributed.device_mesh import init_device_mesh

    from osdp.profiler.measure import profile_model
    from osdp.profiler.roofline import estimate as estimate_profile
    from osdp.rank_model import one_rank
    from osdp.tracing.sample_batch import SampleBatch

    mesh = None
    if distributed.is_torchelastic_launched():
        on_gpus = cuda.is_available()
        if on_gpus:
            cuda.set_device(distributed.get_node_local_rank())
        distributed.init_process_group("nccl" if on_gpus else "gloo")
        mesh = init_device_mesh("cuda" if on_gpus else "cpu", (distributed.get_world_size(),))
    module, sample = build(model, parse_fields(fields), batch, seq)
    training = Training(optimizer=optimizer, local_batch=batch, param_dtype=param_dtype)
    model_desc = ModelDesc.from_module(module, sample)
    part = one_rank(module, SampleBatch.of(sample), model_desc, tp, loss_fn=None, policy=None)
    module, model_desc = part.model, part.desc
    # Who asks for a profile wants it measured now.
    device_info = DeviceInfo.detect(memory_limit, cache_dir=None)
    if estimate:
        timed = estimate_profile(model_desc, device_info, training)
    else:
        timed = profile_model(module, model_desc, sample, training=training, mesh=mesh)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        named = {MODEL: model_desc, DEVICE: device_info, PROFILE: timed, TRAINING: training}
        for name, value in named.items():
            codec.save(value, out / name)
        codec.save(ModelSource(model, tuple(fields), batch, seq, tp), out / SOURCE)
        typer.echo(f"{format_bytes(model_desc.nbytes)} of parameters described in {out}")


@app.command()
def plan(
    context: typer.Context,
    described: Annotated[Path | None, typer.Argument(help="folder that osdp profile wrote")] = None,
    memory_limit: _Limit = None,
    device: Annotated[Path | None, typer.Option(help="another device description")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="microbatches of a step; by default 1, or 4 x pp"),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="force this mode everywhere")] = None,
    slices: Annotated[bool, typer.Option(help="whether operators may run in slices")] = True,
    recompute: Annotated[bool, typer.Option(help="whether blocks may be recomputed")] = True,
    offload: Annotated[bool, typer.Option(help="whether states may live in host memory")] = True,
    pp: Annotated[
        int | None, typer.Option(min=1, help="ranks of a pipeline, each with stages of the model")
    ] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks, those described")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="ranks that compute each layer together")] = None,
    schedule: Annotated[str | None, typer.Option(help="order of the stages; by default the fastest")] = None,
    out: Annotated[Path | None, typer.Option(help="where to write; plan.json for what was described")] = None,
    model: _Shape = None,
    cluster: _Cluster = None,
    global_batch: _Batch = None,
    seq: _Seq = None,
    fields: _ShapeFields = [],  # noqa: B006  (typer copies it)
    micro_batch: _Micro = None,
    recomputation: _Recompute = None,
    zero: _Zero = None,
    token_slices: _TokenSlices = None,
    flash: _Flash = None,
    overlap: _Overlap = 0.0,
    reserve: _Reserve = "1GiB",
    calibration: _Calibration = None,
    layer_times: _LayerTimes = [],  # noqa: B006  (typer copies it)
    trust_code: _TrustCode = False,
    objective: Annotated[
        str, typer.Option(help="time, cost, or pareto over all parts of the cluster")
    ] = "time",
    top: Annotated[int | None, typer.Option(help="rows of the table; 10, or all with --every")] = None,
    subsets: Annotated[bool, typer.Option(help="whether nodes may be left out")] = False,
    budget: Annotated[float | None, typer.Option(help="dollars for all --steps")] = None,
    deadline: Annotated[str | None, typer.Option(help="time for all --steps, for example 36h")] = None,
    steps: Annotated[int | None, typer.Option(help="of the whole training")] = None,
    every: Annotated[bool, typer.Option(help="list all layouts, those that do not fit as well")] = False,
    csv: Annotated[Path | None, typer.Option(help="table as CSV")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="table as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(help="time and cost, PNG or HTML")] = None,
) -> None:
    """Plan for what was DESCRIBED, or lay --model over --cluster; save the plan and print it."""
    if cluster is None and described is None:
        raise ValueError("say what to plan for: a folder that osdp profile wrote, or --model and --cluster")
    refuse_others(context, on_cluster=cluster is not None)
    if cluster is None and described is not None:
        chosen = _PlanOptions(
            microbatches, strategy, slices, recompute, offload, pp or 1, dp, tp or 1, schedule, trust_code
        )
        _plan_described(described, chosen, memory_limit, device, out or Path("plan.json"))
        return
    request = _request(
        model, cluster, global_batch, seq=seq, fields=parse_fields(fields), tp=tp, pp=pp, dp=dp,
        micro_batch=micro_batch, schedule=schedule, recompute=recomputation, zero=zero,
        token_slices=token_slices, flash=flash, overlap=overlap, reserve=reserve, calibration=calibration,
        layer_times=tuple(layer_times), trust_code=trust_code,
    )  # fmt: skip
    cli_cluster.plan_on_cluster(
        request,
        OutputFiles(csv=csv, json=json_file, plot=plot, out=out, steps=steps),
        objective=objective, top=top, parts=subsets, budget=budget, deadline=deadline, every=every,
        echo=typer.echo, progress=_progress,
    )  # fmt: skip


@app.command()
def estimate(
    model: _Shape,
    cluster: _Cluster,
    global_batch: _Batch,
    tp: Annotated[int, typer.Option(min=1, help="ranks that compute each layer together")],
    pp: Annotated[int, typer.Option(min=1, help="stages")],
    dp: Annotated[int, typer.Option(min=1, help="data-parallel ranks")],
    micro_batch: _Micro,
    schedule: Annotated[str, typer.Option(help="order of the stages")] = "1f1b",
    recomputation: _Recompute = None,
    zero: _Zero = None,
    token_slices: _TokenSlices = None,
    flash: _Flash = None,
    partition: Annotated[str | None, typer.Option(help="items of each stage, as in 13-12-12-13")] = None,
    seq: _Seq = None,
    fields: _ShapeFields = [],  # noqa: B006  (typer copies it)
    overlap: _Overlap = 0.0,
    reserve: _Reserve = "1GiB",
    calibration: _Calibration = None,
    layer_times: _LayerTimes = [],  # noqa: B006  (typer copies it)
    trust_code: _TrustCode = False,
) -> None:
    """Price one given layout of --model on --cluster, and say what each number is made of."""
    request = _request(
        model, cluster, global_batch, seq=seq, fields=parse_fields(fields), tp=tp, pp=pp, dp=dp,
        micro_batch=micro_batch, schedule=schedule, recompute=recomputation, zero=zero,
        token_slices=token_slices, flash=flash, overlap=overlap, reserve=reserve, calibration=calibration,
        layer_times=tuple(layer_times), trust_code=trust_code,
    )  # fmt: skip
    cli_cluster.estimate_layout(request, partition, typer.echo)


@app.command()
def layers(
    described: Annotated[
        list[Path],
        typer.Argument(help="folders that osdp profile wrote, of several batches, lengths and --tp"),
    ],
    gpu: Annotated[str, typer.Option(help="name of the GPU in cluster files")],
    model: Annotated[str, typer.Option(help="name of the model in osdp plan --model")],
    out: Annotated[Path, typer.Option(help="where to write")] = Path("layers.json"),
) -> None:
    """Save what osdp profile measured of a transformer's layers, for osdp plan --layer-times."""
    found = merged([measured_layers(folder, gpu, model_label(model)) for folder in described])
    found.save(out)
    cases = sorted({(time.samples, time.sequence, time.tp) for time in found.times})
    told = ", ".join(f"{samples} x {sequence} on tp={tp}" for samples, sequence, tp in cases)
    typer.echo(f"{model} on {gpu}: layers in {found.dtype} at {told} in {out}")


def _request(
    model: str | None, cluster: Path | None, global_batch: int | None, **options: Any
) -> cli_cluster.ClusterRequest:
    if model is None or cluster is None or global_batch is None:
        raise ValueError("a layout on a cluster needs --model, --cluster and --global-batch")
    return cli_cluster.ClusterRequest(model=model, cluster=cluster, global_batch=global_batch, **options)


def _progress(what: str) -> Callable[[int, int], None]:
    """A bar on stderr, where somebody watches."""
    from tqdm import tqdm

    bar = tqdm(desc=what, leave=False, disable=None)

    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return advance


@dataclass(frozen=True, slots=True)
class _PlanOptions:
    """Options of a plan for what was described."""

    microbatches: int | None
    strategy: str | None
    slices: bool
    recompute: bool
    offload: bool
    pp: int
    dp: int | None
    tp: int
    schedule: str | None
    trust_code: bool


def _plan_described(
    described: Path, chosen: _PlanOptions, memory_limit: str | None, device: Path | None, out: Path
) -> None:
    from osdp.api import make_pipeline_plan, make_plan
    from osdp.search.options import SLICES

    require_described(described, (MODEL, DEVICE, PROFILE, TRAINING))
    require_whole(described)
    device_info = DeviceInfo.load(device or described / DEVICE)
    if memory_limit is not None:
        device_info = replace(device_info, memory_limit=parse_bytes(memory_limit))
    if chosen.dp not in (None, device_info.world_size):
        raise ValueError(
            f"--dp {chosen.dp}: {device_info.world_size} devices were described; describe as many (torchrun "
            f"--nproc-per-node {chosen.dp} --no-python osdp profile ...), or name a description of them by "
            "--device"
        )
    options: dict[str, Any] = {
        "training": replace(
            codec.load(Training, described / TRAINING), microbatches=chosen.microbatches or 1
        ),
        "profile": Profile.load(described / PROFILE),
        "strategy": chosen.strategy,
        "slices": SLICES if chosen.slices else (),
        "recompute": chosen.recompute,
    }
    made: Plan | PipelinePlan
    if chosen.pp > 1 or chosen.tp > 1:
        options |= {"pp": chosen.pp, "dp": device_info.world_size, "tp": chosen.tp}
        options["schedule"] = chosen.schedule
        options["microbatches"] = () if chosen.microbatches is None else (chosen.microbatches,)
        model, sample = described_model(described, trust_code=chosen.trust_code)
        made = make_pipeline_plan(model, sample, device_info, **options)
    elif chosen.schedule is not None:
        raise ValueError(f"--schedule {chosen.schedule} orders the stages of a pipeline: pass --pp, too")
    else:
        made = make_plan(
            None, ModelDesc.load(described / MODEL), device_info, offload=chosen.offload, **options
        )
    made.save(out)
    typer.echo(made)


@app.command()
def calibrate(
    data: Annotated[Path, typer.Option(help="CSV file of measured steps, in vTrain's columns")],
    cluster: Annotated[Path, typer.Option(help="YAML or JSON file of the nodes they ran on")],
    vocabulary: Annotated[int, typer.Option(help="entries of the embedding")] = 50257,
    flash: Annotated[bool, typer.Option(help="whether attention never wrote its scores")] = False,
    recomputation: Annotated[
        str | None,
        typer.Option(help="none, selective or full; by default full if a step did not fit otherwise"),
    ] = None,
    out: Path = Path("calibration.json"),
) -> None:
    """Fit the time model to measured steps, for osdp plan and osdp estimate; print how far to trust it."""
    from osdp.cli.calibrate import calibrate_steps

    calibrate_steps(
        data, cluster, vocabulary=vocabulary, flash=flash, recompute=recomputation, out=out, echo=typer.echo
    )


@app.command()
def show(path: Annotated[Path, typer.Argument(metavar="PLAN", help="file of a plan")]) -> None:
    """Print a saved plan."""
    typer.echo(Plan.load(path))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what goes wrong is said in one message, without a traceback."""
    try:
        app(arguments, standalone_mode=True)
    except ImportError as error:
        raise SystemExit(f"error: {_missing(error)}") from error
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except Exception as error:  # a fault of the command, or of the function that makes a model
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SystemExit(
            f"error: {type(error).__name__}: {error} (line {last.lineno} of {last.filename})"
        ) from error


def _missing(error: ImportError) -> str:
    """What cannot be imported, and what to type where an extra has it."""
    library = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(library)
    return f"this needs {library}: pip install 'osdp[{extra}]'" if extra is not None else str(error)


if __name__ == "__main__":
    main()
