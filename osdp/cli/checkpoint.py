"""``osdp checkpoint``: look into checkpoints, check them, and export them, without GPUs or ranks."""

from pathlib import Path
from typing import Annotated

import typer

from osdp.text import format_bytes

app = typer.Typer(no_args_is_help=True, help="Show, verify or export the checkpoint of a training.")

_Path = Annotated[
    Path, typer.Argument(help="a folder of osdp.runtime.checkpoint.save, or one of several steps")
]


@app.command("show")
def show_checkpoint(
    path: _Path,
    all_weights: Annotated[bool, typer.Option("--all", help="every tensor, not the first twenty")] = False,
) -> None:
    """Print what a checkpoint has, after checking it."""
    from osdp.runtime.checkpoint import summarize

    found = summarize(path)
    sums = "every byte is what was saved" if found.is_summed else "without a manifest: sizes were checked"
    typer.echo(f"{found.folder}: {sums}")
    step = "not told" if found.step is None else str(found.step)
    count = found.world_size
    ranks = f"{count} rank{'s' if count > 1 else ''}" if count else "an unknown number of ranks"
    typer.echo(f"step {step}, saved by {ranks}, with {', '.join(found.kept) or 'nothing else'}")
    typer.echo(
        f"{len(found.weights)} tensors of {format_bytes(found.weight_bytes)}, optimizer states of "
        f"{format_bytes(found.optimizer_bytes)}"
    )
    listed = list(found.weights.items())
    for name, (shape, dtype) in listed if all_weights else listed[:20]:
        typer.echo(f"  {name:<60} {str(dtype).removeprefix('torch.'):<9} {' x '.join(map(str, shape))}")
    if not all_weights and len(listed) > 20:
        typer.echo(f"  and {len(listed) - 20} more: --all")


@app.command("verify")
def verify_checkpoint(path: _Path) -> None:
    """Compare every byte of a checkpoint with its manifest."""
    from osdp.runtime.checkpoint import verify

    verify(path)
    typer.echo(f"{path}: every byte is what was saved")


@app.command("export")
def export_checkpoint(
    path: _Path,
    output: Annotated[
        Path, typer.Argument(help="a folder for Hugging Face, or a file that ends in .pt, .pth or .bin")
    ],
    config: Annotated[
        Path | None, typer.Option(help="folder whose config.json goes along, for from_pretrained")
    ] = None,
) -> None:
    """Write the weights as a folder of safetensors, or as one file of torch."""
    from osdp.runtime.checkpoint import export

    export(path, output, config=config)
    typer.echo(f"wrote {output}")
