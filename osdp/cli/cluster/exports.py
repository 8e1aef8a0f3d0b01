"""``osdp cluster plan --export``: configurations of other frameworks, for which no model is built."""

from pathlib import Path

import typer

from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.export.frameworks import exports
from osdp.cluster.plan import ClusterPlan
from osdp.text import wrapped


def write_exports(folder: Path, plan: ClusterPlan, prices: ClusterPrices) -> None:
    """Write a plan as each framework is told it, and say what each cannot express.

    Args:
        folder: An existing folder.
        plan: The plan.
        prices: Costs of the workload on the cluster.

    Raises:
        OSError: A file cannot be written.
    """
    for export in exports(plan, prices.workload, prices.cluster.half):
        (folder / export.file).write_text(export.text, encoding="utf8")
        missing = f"; not expressed: {'; '.join(export.notes)}" if export.notes else ""
        typer.echo(wrapped(f"written: {export.file}{missing}"))
