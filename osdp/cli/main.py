"""The ``osdp`` command (extra ``cli``): parse, call one function, print.

``osdp profile`` describes and profiles a model and saves the results in a folder, ``osdp plan`` plans from
that folder on any machine, or for devices that are not at hand; ``show``, ``explain``, ``diff`` and
``whatif`` read saved plans, ``osdp cluster`` is the cluster planner, ``osdp checkpoint`` looks into
checkpoints.
Under torchrun (``torchrun --no-python osdp profile ...``), ``profile`` also measures the links between the
processes.
"""

import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from osdp import __version__, codec
from osdp.hardware.device_info import DeviceInfo
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.text import format_bytes

try:
    import typer
    from typer.core import TyperGroup
    from typer.main import get_group
except ImportError as error:
    raise SystemExit("error: the osdp command needs typer: pip install 'osdp[cli]'") from error

from osdp.cli import checkpoint as checkpoint_commands
from osdp.cli import planning
from osdp.cli.doctor import doctor
from osdp.cli.models import (
    CONFIGURATION,
    DEVICE,
    MODEL,
    PROFILE,
    SOURCE,
    TOKENS,
    TRAINING,
    ModelSource,
    build,
    parse_fields,
)
from osdp.cli.options import Out, flat_options


class _Commands(TyperGroup):
    """The commands, of which those of the cluster planner are imported when they are asked for.

    Importing them takes a tenth of what ``osdp explain`` takes as a whole.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "cluster":
            from osdp.cli.cluster.commands import app as cluster

            group = get_group(cluster)
            group.name = cmd_name
            return group
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Profile a model, find the fastest plan to train it, or plan for a cluster before it exists.",
)
# Stands for the planner's commands until they are imported.
app.add_typer(typer.Typer(), name="cluster")
app.add_typer(checkpoint_commands.app, name="checkpoint")

#: The extra that installs each library that commands import only when needed.
_EXTRA_OF = {
    "transformers": "hf", "tqdm": "cli", "yaml": "cli", "rich": "cli", "matplotlib": "report",
    "plotly": "report", "safetensors": "hf",
}  # fmt: skip

_ModelName = Annotated[
    str,
    typer.Argument(
        help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, a model type of transformers, a JSON configuration "
        "file with a model_type, or module:function, where the function returns (model, sample batch)"
    ),
]
_Fields = Annotated[list[str], typer.Option("--set", help="set a configuration field, for example n_layer=4")]
_Limit = Annotated[str | None, typer.Option(help="memory limit per device, for example 8GiB")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"osdp {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit"),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="also print what the search and the measurements do")
    ] = False,
) -> None:
    """Options without a command."""
    if verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("osdp").setLevel(logging.DEBUG)


@app.command()
def profile(
    model: _ModelName,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="samples per device in a microbatch; by default 1, or those of a function"),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="tokens per sample; by default 1024")] = None,
    fields: _Fields = [],  # noqa: B006  (typer copies it)
    optimizer: Annotated[str, typer.Option(help="a class in torch.optim")] = "AdamW",
    memory_limit: _Limit = None,
    estimate: Annotated[
        bool, typer.Option(help="estimate times from a roofline model instead of running MODEL")
    ] = False,
    param_dtype: Annotated[str | None, typer.Option(help="dtype to compute in, for example bfloat16")] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="profile the part of one of this many tensor-parallel ranks, for osdp cluster layers"
        ),
    ] = 1,
    out: Out = Path("described"),
) -> None:
    """Describe and profile MODEL on this device, and save the results in a folder."""
    from torch import cuda, distributed
    from torch.distributed.device_mesh import init_device_mesh

    from osdp.inputs import make_rank_model
    from osdp.profiler.measure import profile_model
    from osdp.profiler.roofline import estimate as estimate_profile
    from osdp.tracing.sample_batch import SampleBatch

    mesh = None
    if distributed.is_torchelastic_launched():
        on_gpus = cuda.is_available()
        if on_gpus:
            cuda.set_device(distributed.get_node_local_rank())
        distributed.init_process_group("nccl" if on_gpus else "gloo")
        mesh = init_device_mesh("cuda" if on_gpus else "cpu", (distributed.get_world_size(),))
    training = Training.stepped_by(optimizer, param_dtype=param_dtype)
    module, sample = build(model, parse_fields(fields), batch or 1, seq)
    model_desc = ModelDesc.from_module(module, sample)
    training = replace(training, local_batch=batch or model_desc.local_batch)
    part = make_rank_model(module, SampleBatch.of(sample), model_desc, tp, loss_fn=None, policy=None)
    module, model_desc = part.model, part.desc
    # A cached measurement is not what someone who asks for a profile wants.
    device_info = DeviceInfo.detect(memory_limit, cache_dir=None)
    if estimate:
        timed = estimate_profile(model_desc, device_info, training)
    else:
        timed = profile_model(module, model_desc, sample, training=training, mesh=mesh)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        named = {MODEL: model_desc, DEVICE: device_info, PROFILE: timed, TRAINING: training}
        for name, value in named.items():
            codec.save(value, out / name)
        samples = training.local_batch or 1
        codec.save(ModelSource(model, tuple(fields), samples, seq or TOKENS, tp), out / SOURCE)
        if model.endswith(".json"):
            (out / CONFIGURATION).write_text(codec.read_text(model), encoding="utf8")
        typer.echo(
            f"{model_desc.name} with {format_bytes(model_desc.nbytes)} of parameters is described in {out}"
        )
    if mesh is not None:
        # torchrun ends all ranks once one is gone that gloo has aborted: none leaves before what is written.
        distributed.barrier()
        distributed.destroy_process_group()


for command in (
    planning.plan,
    planning.memory,
    planning.show,
    planning.explain,
    planning.diff,
    planning.whatif,
    planning.report,
    doctor,
):
    app.command()(flat_options(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error ends it with one message and no traceback."""
    _refuse_cluster_planner(sys.argv[1:] if arguments is None else arguments)
    try:
        app(arguments, standalone_mode=True)
    except ImportError as error:
        raise SystemExit(f"error: {_explain_missing(error)}") from error
    except OSError as error:
        # Its own text begins with a number.
        facts = [str(each) for each in (error.filename, error.strerror) if each]
        raise SystemExit(f"error: {': '.join(facts) or error}") from error
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    except Exception as error:  # an error in the command, or in the function that makes the model
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SystemExit(
            f"error: {type(error).__name__}: {error} (line {last.lineno} of {last.filename})"
        ) from error


def _refuse_cluster_planner(words: Sequence[str]) -> None:
    """Point to the commands of the cluster planner, which are easily looked for here."""
    name = words[0] if words else ""
    on_cluster = {"--model", "--cluster"} & {word.partition("=")[0] for word in words}
    if (name == "plan" and on_cluster) or name in ("estimate", "layers", "calibrate"):
        raise SystemExit(f"error: this is a command of the cluster planner: osdp cluster {name}")


def _explain_missing(error: ImportError) -> str:
    """The message for a failed import: how to install the library if an extra does."""
    library = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(library)
    return f"this needs {library}: pip install 'osdp[{extra}]'" if extra is not None else str(error)


if __name__ == "__main__":
    main()
