"""``osdp cluster plan --export``: configurations of other frameworks, for which no model is built."""

from pathlib import Path

import typer

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import nodes_of
from osdp.cluster.export.frameworks import exports
from osdp.cluster.export.launch_scripts import node_table
from osdp.cluster.plan import ClusterPlan
from osdp.text import wrapped

#: How the files with words of a command line are given to it.
_USAGE = (
    'megatron_args.sh and torchtitan_overrides.sh hold words of a command line: eval "torchrun ... '
    'pretrain_gpt.py $(cat megatron_args.sh)"'
)


def write_exports(folder: Path, plan: ClusterPlan, prices: ClusterPrices, half: str | None = None) -> None:
    """Write a plan as each framework is told it, and what each cannot express, which is printed as well.

    Args:
        folder: Where; made if it does not exist.
        plan: The plan.
        prices: Costs of the workload on the cluster.
        half: The 16-bit format to compute in; that of the nodes of the plan if ``None``.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    half = half or prices.cluster.part(nodes_of(plan.slots)).half
    told = []
    for export in exports(plan, prices.workload, half):
        (folder / export.file).write_text(export.text, encoding="utf8")
        told.append(f"{export.file}: not expressed: {'; '.join(export.notes) or 'nothing'}")
        typer.echo(wrapped(f"written: {told[-1]}"))
    (folder / "nodes.csv").write_text(node_table(plan, prices.cluster), encoding="utf8")
    typer.echo("written: nodes.csv, the nodes in the order of their ranks")
    told.append(_USAGE)
    (folder / "exports.txt").write_text("\n".join(map(wrapped, told)) + "\n", encoding="utf8")
