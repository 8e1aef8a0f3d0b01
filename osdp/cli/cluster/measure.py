"""Measured layouts: ``osdp cluster plan --measure`` writes them, ``osdp cluster measure`` runs one.

Each layout has a folder with its plan, its model and a launch script. What the steps took is written there as
well, for ``--measured`` of the other commands.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osdp.cli.cluster.request import ClusterRequest
from osdp.cli.cluster.runnable import first_that_fits, write_plan
from osdp.cli.models import build
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.explanation import worth_measuring
from osdp.cluster.export.table import interval_text
from osdp.cluster.measured_layout import (
    MEASURED,
    MOST_DEVIATION,
    PLANNED,
    MeasuredLayout,
    PlannedLayout,
)
from osdp.cluster.plan import ClusterPlan
from osdp.codec import fingerprint
from osdp.errors import InfeasibleError
from osdp.text import format_bytes, format_seconds, wrapped

if TYPE_CHECKING:
    import torch

    from osdp.plan.plan import Plan

_PLAN, _CONFIG = "plan.json", "plan.config.json"
#: Steps before the first that counts, and the least number of these.
_WARM, _LEAST_STEPS = 3, 5


def write_layouts(
    folder: Path, plans: Sequence[ClusterPlan], prices: ClusterPrices, request: ClusterRequest
) -> None:
    """Write the layouts that a measurement should decide between, the first if there is nothing to decide.

    A layout that does not fit when it is traced is left out, which is printed.

    Args:
        folder: Where; each layout has a folder of its own in it. Layouts of an earlier call are removed.
        plans: Layouts, best first.
        prices: Costs that they were made with.
        request: Options that name the model.

    Raises:
        InfeasibleError: None of them fits.
        ValueError: The model cannot be built or cut at the stage boundaries.
    """
    from osdp.cluster.runnable import departures
    from osdp.plan.plan import Plan

    typer.echo("")
    written: list[Path] = []
    refused: list[InfeasibleError] = []
    for index in worth_measuring(plans) or (0,):
        plan, where = plans[index], folder / f"row{index + 1}"
        try:
            _, made, model = first_that_fits([plan], prices, request)
        except InfeasibleError as error:
            refused.append(error)
            typer.echo(
                wrapped(
                    f"row {index + 1} does not fit when its stages are traced: {str(error).splitlines()[0]}"
                )
            )
            continue
        if not written:
            for old in folder.glob(f"row*/{PLANNED}"):
                shutil.rmtree(old.parent)
        where.mkdir(parents=True)
        write_plan(plan, made, model, prices, where / _PLAN, "-m osdp cluster measure .")
        written_plan, other = fingerprint(Plan.load(where / _PLAN)), departures(made)
        PlannedLayout(plan, prices.workload, prices.cluster, written_plan, other).save(where / PLANNED)
        if other:
            typer.echo(
                wrapped(f"row {index + 1}, unlike its layout, tells its own time alone: {'; '.join(other)}")
            )
        written.append(where)
    if not written:
        raise refused[-1]
    told = ", ".join(str(where) for where in written)
    typer.echo(
        wrapped(
            f"to measure: bash launch.sh NODE on each node (or sbatch launch.sbatch) in {told}, in turn; "
            f"then osdp cluster plan ... --measured {folder}"
        )
    )


def measure_layout(
    folder: Annotated[
        Path, typer.Argument(help="folder of one layout that osdp cluster plan --measure wrote")
    ],
    seconds: Annotated[float, typer.Option(min=0, help="about how long to measure")] = 600.0,
) -> None:
    """Train a layout on the devices it is for, started by its launch.sh, and write what a step takes."""
    import torch.distributed as dist

    from osdp.plan.plan import Plan

    if not (folder / PLANNED).exists():
        raise ValueError(
            f"{folder} has no {PLANNED}: osdp cluster plan --measure FOLDER writes a folder for each layout"
        )
    if not math.isfinite(seconds):
        raise ValueError(f"--seconds must be a finite number of seconds, got {seconds:g}")
    planned = PlannedLayout.load(folder / PLANNED)
    plan = Plan.load(folder / _PLAN)
    if fingerprint(plan) != planned.plan_fingerprint:
        raise ValueError(
            f"{folder / _PLAN} is not the plan that was written for {folder / PLANNED}: osdp cluster plan "
            "--measure writes both"
        )
    device = _join(planned.plan.layout.world_size)
    rank = dist.get_rank()
    try:
        step = _training(folder, planned, plan, device)
        times = _time_steps(step, device, seconds)
    except RuntimeError as error:
        # CUDA's libraries allocate beside the allocator of torch, and tell it in words of their own.
        if not any(words in str(error) for words in ("out of memory", "ALLOC_FAILED")):
            raise
        # The others wait in a collective and are ended by torchrun: this rank alone can tell.
        MeasuredLayout(planned, seconds=None, devices=(_name_of(device),)).save(folder / MEASURED)
        raise ValueError(
            f"rank {rank} ran out of memory, which {folder / MEASURED} tells --measured: {error}"
        ) from error
    mine = statistics.median(times), _deviation(times), _memory_in_use(device), _name_of(device)
    of_ranks: list[tuple[float, float, int, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    median, deviation, *_ = max(of_ranks)
    peak = max(taken for _, _, taken, _ in of_ranks) or None
    if rank == 0:
        share = min(deviation / median, MOST_DEVIATION)
        devices = tuple(dict.fromkeys(name for *_, name in of_ranks))
        found = MeasuredLayout(planned, median, share, len(times), peak, devices)
        found.save(folder / MEASURED)
        typer.echo(_told(found))
    dist.destroy_process_group()


def _deviation(times: Sequence[float]) -> float:
    """Standard deviation of steps by the median of their distances from the median: a stalled step is none.

    The factor is that of a normal distribution (Rousseeuw and Croux, JASA 88, 1993, section 1).
    """
    middle = statistics.median(times)
    return 1.4826 * statistics.median(abs(each - middle) for each in times)


def _told(found: MeasuredLayout) -> str:
    assert found.seconds is not None
    plan = found.plan
    memory = ""
    if found.peak_bytes is not None:
        memory = f"; {format_bytes(found.peak_bytes)} in use, predicted {format_bytes(plan.peak.total)}"
    return wrapped(
        f"a step takes {format_seconds(found.seconds)} (median of {found.steps}, deviation "
        f"{found.deviation:.1%}), predicted {format_seconds(plan.step_seconds)} "
        f"({interval_text(plan.step_interval, format_seconds)}){memory}"
    )


def _join(world_size: int) -> "torch.device":
    """Join the process group that torchrun started, on this rank's device.

    Raises:
        ValueError: There is none, or it has another number of ranks.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise ValueError(
            "osdp cluster measure runs on all devices of its layout: bash launch.sh NODE starts it"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != world_size:
        raise ValueError(f"the layout is for {world_size} ranks, and {dist.get_world_size()} were started")
    return device


def _training(
    folder: Path, planned: PlannedLayout, plan: "Plan", device: "torch.device"
) -> Callable[[], None]:
    """A function that runs one training step of the layout's model under its plan."""
    import torch
    from torch.utils._pytree import tree_map

    from osdp.integrations.huggingface.models import causal_lm_loss
    from osdp.wrapper import OSDP

    layout = planned.plan.layout
    shape = planned.workload.shape
    model, sample = build(str(folder / _CONFIG), {}, layout.samples, shape.sequence)
    wrapped_model = OSDP(model, plan=plan)
    optimizer = getattr(torch.optim, plan.training.optimizer)(wrapped_model.parameters(), lr=1e-5)

    def drawn(value: Any) -> Any:
        """As many samples as a step has."""
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        whole = value.repeat(layout.microbatches, *[1] * (value.dim() - 1)).to(device)
        # Gradients of equal tokens would all be added to one row of the embedding.
        return torch.randint_like(whole, shape.vocabulary)

    # Pipeline stages and tensor-parallel ranks need the same tokens.
    torch.manual_seed(0)
    inputs = tree_map(drawn, sample)
    targets, loss_fn = None, None
    if plan.token_slices is not None:
        targets, loss_fn = inputs.pop("labels"), causal_lm_loss

    def step() -> None:
        optimizer.zero_grad()
        wrapped_model.train_step(inputs, targets, loss_fn)
        optimizer.step()

    return step


def _time_steps(step: Callable[[], None], device: "torch.device", seconds: float) -> list[float]:
    """Seconds of each step, for about ``seconds`` in all, on as many steps on every rank."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    def timed() -> float:
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    warm = [timed() for _ in range(_WARM)][-1]
    number = torch.tensor(max(int(seconds / warm), _LEAST_STEPS), device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    steps = range(int(number))
    return [
        timed()
        for _ in tqdm(steps, desc="steps", leave=False, disable=None if dist.get_rank() == 0 else True)
    ]


def _name_of(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _memory_in_use(device: "torch.device") -> int:
    """Bytes in use on an accelerator, by its context, communicators and the allocator; 0 on a CPU."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
