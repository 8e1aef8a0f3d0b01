"""Plot of step time and cost on parts of a cluster, as PNG (matplotlib) or HTML (plotly) by file suffix."""

from collections.abc import Sequence
from pathlib import Path

from osdp.cluster.export.table import nodes_text
from osdp.cluster.hardware import Cluster
from osdp.cluster.plan import ClusterPlan

_X, _Y = "seconds a step", "dollars a step"


def plot_plans(plans: Sequence[ClusterPlan], cluster: Cluster, path: str | Path) -> None:
    """Plot the step time and cost of plans.

    Args:
        plans: Plans for any parts of the cluster.
        cluster: Their cluster.
        path: Output file; ``.html`` is interactive, any other suffix is written by matplotlib.

    Raises:
        ValueError: A plan has no price.
        ImportError: The plotting library is not installed.
    """
    points = [(plan.step_seconds, plan.dollars_per_step, _label(plan, cluster)) for plan in plans]
    if any(dollars is None for _, dollars, _ in points):
        raise ValueError("a plot of time and cost needs the price of every node: add it to the cluster file")
    x, y, labels = zip(*points, strict=True)
    if Path(path).suffix == ".html":
        _html(x, y, labels, path)
    else:
        _picture(x, y, labels, path)


def _label(plan: ClusterPlan, cluster: Cluster) -> str:
    layout, degrees = plan.layout, plan.layout.degrees
    others = f" cp{layout.cp}" * (layout.cp > 1) + f" ep{layout.ep}" * (layout.ep > 1)
    return f"{nodes_text(plan, cluster)}: tp{degrees.tp} pp{degrees.pp} dp{degrees.dp}{others}"


def _html(x: Sequence[float], y: Sequence[float], labels: Sequence[str], path: str | Path) -> None:
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError("HTML plots need plotly: pip install 'osdp[report]'") from error
    figure = graph_objects.Figure(graph_objects.Scatter(x=x, y=y, text=labels, mode="lines+markers"))
    figure.update_layout(xaxis_title=_X, yaxis_title=_Y)
    figure.write_html(str(path))


def _picture(x: Sequence[float], y: Sequence[float], labels: Sequence[str], path: str | Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'osdp[report]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, y, "o-")
    for at, label in enumerate(labels):
        axes.annotate(label, (x[at], y[at]), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(_X)
    axes.set_ylabel(_Y)
    figure.savefig(path, dpi=150)
