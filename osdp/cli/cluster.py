"""``osdp plan --cluster`` and ``osdp estimate``: from what was written to calls of the planner.

Times are told in seconds and prices in dollars, as the cluster file has them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from osdp.cli.models import changed_fields, named_shape
from osdp.cli.outputs import OutputFiles
from osdp.cli.runnable import require_buildable, traced_prices, write_runnable
from osdp.cluster.calibration.calibrate import Calibration
from osdp.cluster.cost.schedule import BUBBLE_SHARE
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.export.pareto_plot import plot_plans
from osdp.cluster.export.table import breakdown, csv_table, json_table, rows_of, text_table
from osdp.cluster.file import load_cluster
from osdp.cluster.hardware import Cluster
from osdp.cluster.layer_profile import LayerProfile
from osdp.cluster.plan import MIXED, ClusterPlan, ParallelLayout, RecomputeLayers, Workload, num_layers
from osdp.cluster.search.infeasible import check_space, nothing_fits
from osdp.cluster.search.layouts import arrange, every_layout
from osdp.cluster.search.objectives import Objective, PlannerGoal, best_plans, pareto
from osdp.cluster.search.space import LayoutSpace, families
from osdp.model.description import DTYPE_BYTES
from osdp.text import format_bytes, parse_bytes

#: Of the table, unless asked otherwise.
_ROWS = 10

_STAGES = ("0", "1", "2", "3")

_HOURS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0}


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What the command line asked for; ``None`` and empty are "whatever is best".

    Attributes:
        model: Name or configuration file.
        cluster: Cluster file.
        global_batch: Samples of a step.
        seq: Tokens of a sample.
        fields: Fields of the model's shape.
        tp: Degree, as ``pp`` and ``dp``.
        pp: Degree.
        dp: Degree.
        micro_batch: Samples of a microbatch.
        schedule: Name of a schedule.
        recompute: What is computed again.
        zero: Stage of ZeRO, or ``mixed``: decided item by item; likewise ``recompute``.
        token_slices: Equal slices of each sequence.
        flash: Whether scores of attention are never written; as calibrated, or true.
        overlap: Part of communication that compute hides.
        reserve: Bytes of each device that the framework keeps, as text.
        calibration: File that ``osdp calibrate`` wrote.
        layer_times: Files that ``osdp layers`` wrote, one for each kind of device.
        trust_code: Whether code that a described folder names may be run.
    """

    model: str
    cluster: Path
    global_batch: int
    seq: int | None = None
    fields: dict[str, Any]
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    zero: str | None = None
    token_slices: int | None = None
    flash: bool | None = None
    overlap: float = 0.0
    reserve: str = "1GiB"
    calibration: Path | None = None
    layer_times: tuple[Path, ...] = ()
    trust_code: bool = False

    def prices(self) -> ClusterPrices:
        """The model and the cluster, priced.

        Raises:
            ValueError: A name or a file is wrong, or the calibration is of the other kind of attention.
        """
        found = None if self.calibration is None else Calibration.load(self.calibration)
        if found is not None and self.flash not in (None, found.flash):
            raise ValueError(
                f"{self.calibration} was fitted to steps with flash={found.flash}, and --"
                f"{'' if self.flash else 'no-'}flash was asked for; calibrate on such steps"
            )
        sizes = {} if self.seq is None else {"sequence": self.seq}
        shape = named_shape(self.model, {**sizes, **self.fields}, trust_code=self.trust_code)
        workload = Workload(
            shape=shape,
            global_batch=self.global_batch,
            flash=found.flash if found is not None else self.flash is not False,
            overlap=self.overlap,
            reserve=parse_bytes(self.reserve),
        )
        cluster = load_cluster(self.cluster)
        profiles = [LayerProfile.load(path) for path in self.layer_times]
        _require_measured(profiles, workload, cluster, changed_fields(self.model, self.fields))
        if found is None:
            return ClusterPrices(cluster, workload, profiles=profiles)
        return ClusterPrices(found.applied(cluster), workload, found.rates, profiles)

    def space(self, workload: Workload) -> LayoutSpace:
        """What is left to choose for a workload.

        Raises:
            ValueError: A schedule, a way to recompute or a stage of ZeRO is unknown.
        """
        if self.schedule not in (None, *BUBBLE_SHARE):
            raise ValueError(
                f"schedule {self.schedule!r} is not known here; there are {', '.join(BUBBLE_SHARE)}"
            )
        if self.schedule == "zb-h1":
            raise ValueError(
                "schedule 'zb-h1' computes gradients of weights apart, which 16-bit weights do not "
                "allow; plans on a cluster compute in 16 bits"
            )
        if self.recompute not in (None, MIXED, *RecomputeLayers):
            raise ValueError(
                f"--recomputation {self.recompute}: there are {', '.join(RecomputeLayers)}, {MIXED}"
            )
        if self.recompute == RecomputeLayers.SELECTIVE and workload.flash:
            raise ValueError(
                "--recomputation selective drops the scores of attention, which flash attention never keeps; "
                "say --no-flash, or full"
            )
        if self.zero not in (None, MIXED, *_STAGES):
            raise ValueError(f"--zero {self.zero}: ZeRO has the stages {', '.join(_STAGES)}, and {MIXED}")
        space = LayoutSpace(
            tp=_only(self.tp), pp=_only(self.pp), dp=_only(self.dp), samples=_only(self.micro_batch)
        )
        if self.schedule is not None:
            space = replace(space, schedules=(self.schedule,))
        if self.token_slices is not None:
            space = replace(space, token_slices=(self.token_slices,))
        if self.recompute is not None:
            space = replace(space, recompute=(self.way_to_recompute,))
        return space if self.zero is None else replace(space, zero=(self.stage_of_zero,))

    @property
    def stage_of_zero(self) -> int | None:
        """The stage asked for, 0 by default; ``None`` if it is decided item by item."""
        return None if self.zero == MIXED else int(self.zero or 0)

    @property
    def way_to_recompute(self) -> RecomputeLayers | None:
        """What is computed again, nothing by default; likewise."""
        return None if self.recompute == MIXED else RecomputeLayers(self.recompute or "none")


def _require_measured(
    profiles: Sequence[LayerProfile], workload: Workload, cluster: Cluster, changed: set[str]
) -> None:
    """Refuse measured times that are not of these layers on these devices; all faults at once."""
    shape, here = workload.shape, [group.node.gpu.name for group in cluster.groups]
    faults = [
        f"layers of {found.model} were measured on {found.gpu}, not of {shape.name}"
        for found in profiles
        if found.model != shape.name
    ]
    faults += [
        f"layers on {found.gpu} are {found.hidden} wide, those of {shape.name} {shape.hidden}"
        for found in profiles
        if found.hidden != shape.hidden
    ]
    faults += [
        f"{found.gpu} is none of the cluster's {', '.join(here)}"
        for found in profiles
        if found.gpu not in here
    ]
    faults += [
        f"layers on {found.gpu} were measured in {found.dtype}, plans on a cluster compute in 16 bits; say "
        "osdp profile --param-dtype bfloat16"
        for found in profiles
        if DTYPE_BYTES.get(found.dtype) != workload.weight_bytes
    ]
    faults += [
        f"{count} files are of {gpu}; merge them by one call of osdp layers"
        for gpu, count in Counter(found.gpu for found in profiles).items()
        if count > 1
    ]
    if profiles and (other := sorted(changed - {"layers", "name", "sequence"})):
        faults.append(f"--set {', '.join(other)} makes other layers than were measured")
    if faults:
        raise ValueError(f"--layer-times: {'; '.join(faults)}")


def plan_on_cluster(
    request: ClusterRequest,
    outputs: OutputFiles,
    *,
    objective: str,
    top: int | None,
    parts: bool,
    budget: float | None,
    deadline: str | None,
    every: bool,
    echo: Callable[[str], None],
    progress: Callable[[str], Callable[[int, int], None]],
) -> None:
    """Search, print the table and the best plan's breakdown, and write what was asked for.

    Args:
        request: What to plan for.
        outputs: Where answers go.
        objective: ``time``, ``cost`` or ``pareto``.
        top: Rows of the table; 10, or with ``every`` all, if ``None``.
        parts: Whether nodes may be left out.
        budget: Dollars for all steps.
        deadline: Time for all steps, for example ``3d``.
        every: Whether every layout is listed, those that do not fit as well.
        echo: Prints.
        progress: Makes a progress bar.

    Raises:
        InfeasibleError: Nothing fits.
        ValueError: What is asked for is unknown or contradicts itself.
    """
    outputs.check()
    prices = request.prices()
    space = request.space(prices.workload)
    check_space(prices, space, parts=parts or objective == "pareto")
    shape, cluster = prices.workload.shape, prices.cluster
    if outputs.out is not None:
        require_buildable(request.model, request.fields, shape, trust_code=request.trust_code)
        prices = traced_prices(prices, request.model, trust_code=request.trust_code)
    wish = _wish(objective, _ROWS if top is None else top, parts, budget, deadline, outputs.steps)
    if every:
        _require_whole(objective, parts, budget, deadline)
    if objective == "pareto":
        found = pareto(prices, space, progress("parts"))
    else:
        found = best_plans(prices, space, wish, progress("parts" if parts else "layouts"))
    if not found.plans:
        raise nothing_fits(prices, space, wish)
    plans: Sequence[ClusterPlan] = found.plans
    if every:
        plans = sorted(every_layout(prices, space), key=lambda plan: (not plan.fits, plan.step_seconds))[:top]
    rows = rows_of(plans, cluster, shape, outputs.steps)
    if outputs.csv is not None:
        outputs.csv.write_text(csv_table(rows), encoding="utf8")
    if outputs.json is not None:
        outputs.json.write_text(json_table(rows), encoding="utf8")
    if outputs.plot is not None:
        plot_plans(plans, cluster, outputs.plot)
    echo(text_table(rows))
    echo(
        f"{found.candidates} layouts in {found.placements} placements, {found.arranged} of them cut and "
        "placed exactly; none is better than the first row"
    )
    echo(_basis(prices))
    echo("")
    echo(breakdown(found.plans[0], cluster, shape))
    if outputs.out is not None:
        write_runnable(found.plans, prices, request.model, outputs.out, echo, trust_code=request.trust_code)


def _basis(prices: ClusterPrices) -> str:
    """What the numbers are made of."""
    attention = "never writes its scores (flash)" if prices.workload.flash else "writes its scores"
    kept = "traced from the model" if prices.traced else "those of fused kernels"
    measured = [found.gpu for found in prices.profiles]
    layers = f"; layers measured on {', '.join(measured)}" if measured else ""
    return (
        f"attention {attention}; activations {kept}{layers}; compute hides {prices.workload.overlap:.0%} of "
        "gradients and gathers"
    )


def estimate_layout(request: ClusterRequest, partition: str | None, echo: Callable[[str], None]) -> None:
    """Price one layout: print its row and what each number is made of.

    Args:
        request: All degrees, and the microbatch.
        partition: Items of each stage as in ``13-12-12-13``; the best if ``None``.
        echo: Prints.

    Raises:
        ValueError: A degree is missing or divides nothing.
    """
    prices = request.prices()
    space = replace(request.space(prices.workload), token_slices=(request.token_slices or 1,))
    missing = [name for name in ("tp", "pp", "dp", "micro_batch") if getattr(request, name) is None]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"one layout needs {options}, too")
    check_space(prices, space)
    if request.pp == 1 and request.schedule not in (None, "1f1b"):
        raise ValueError(f"--schedule {request.schedule} orders several stages, and --pp 1 is one")
    family = next(families(prices.cluster, prices.cluster.counts, prices.workload, space))
    layout: ParallelLayout = replace(
        family.plain,
        schedule=request.schedule or "1f1b",
        recompute=request.way_to_recompute,
        zero=request.stage_of_zero,
    )
    plan = arrange(prices, layout, family.cells) or arrange(prices, layout, family.cells, limited=False)
    if plan is None:
        raise ValueError(
            f"{len(prices.items)} items cannot be cut into {layout.degrees.pp} stages of this schedule"
        )
    if partition is not None:
        bounds = _bounds(partition)
        _require_all(partition, bounds, prices, layout.degrees.pp)
        plan = price(prices, layout, bounds, plan.slots)
    echo(text_table(rows_of([plan], prices.cluster, prices.workload.shape)))
    echo(_basis(prices))
    if not plan.fits:
        echo(
            f"it does not fit: {format_bytes(plan.peak.total)} of {format_bytes(plan.peak.limit)} are needed"
        )
    echo("")
    echo(breakdown(plan, prices.cluster, prices.workload.shape))


def _require_whole(objective: str, parts: bool, budget: float | None, deadline: str | None) -> None:
    """Refuse what the list of all layouts does not heed; on all nodes the fastest is the cheapest, too."""
    others = {
        "--objective pareto": objective == "pareto",
        "--subsets": parts,
        "--budget": budget is not None,
        "--deadline": deadline is not None,
    }
    if given := [name for name, there in others.items() if there]:
        raise ValueError(
            f"--every lists all layouts on the whole cluster, without a limit: leave out {', '.join(given)}"
        )


def _only(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def _bounds(partition: str) -> tuple[int, ...]:
    try:
        sizes = [int(word) for word in partition.split("-")]
    except ValueError as error:
        raise ValueError(f"--partition is written as 13-12-12-13, got {partition!r}") from error
    return (0, *accumulate(sizes))


def _require_all(partition: str, bounds: Sequence[int], prices: ClusterPrices, pp: int) -> None:
    if len(bounds) != pp + 1 or bounds[-1] != len(prices.items):
        raise ValueError(
            f"--partition {partition} has {bounds[-1]} items in {len(bounds) - 1} stages; {pp} stages have "
            f"{len(prices.items)} together: {num_layers(prices.items)} layers, embeddings and the head"
        )


def _wish(
    objective: str, top: int, parts: bool, budget: float | None, deadline: str | None, steps: int | None
) -> PlannerGoal:
    if objective not in (*Objective, "pareto"):
        raise ValueError(f"--objective {objective}: there are {', '.join(Objective)}, pareto")
    if (budget is not None or deadline is not None) and steps is None:
        raise ValueError("a budget or a deadline is for the whole training: say --steps, too")
    if objective == "pareto" and (budget is not None or deadline is not None):
        raise ValueError(
            "--objective pareto shows every trade of time for cost: leave out --budget and --deadline"
        )
    low = [
        f"--{name} {value}"
        for name, value in (("top", top), ("steps", steps))
        if value is not None and value < 1
    ]
    if low:
        raise ValueError(f"{', '.join(low)}: at least 1 is needed")
    if budget is not None and budget <= 0:
        raise ValueError(f"--budget {budget:g}: a budget is more than 0 dollars")
    return PlannerGoal(
        objective=Objective.TIME if objective == "pareto" else Objective(objective),
        top=top,
        parts=parts,
        step_dollars=math.inf if budget is None or steps is None else budget / steps,
        step_seconds=math.inf if deadline is None or steps is None else _seconds(deadline) / steps,
    )


def _seconds(text: str) -> float:
    try:
        found = float(text[:-1]) * _HOURS[text[-1:]] * 3600
        if found <= 0:
            raise ValueError(text)
        return found
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"a time is a number above 0 and one of s, m, h and d, such as 36h; got {text!r}"
        ) from error
