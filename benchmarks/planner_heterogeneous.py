"""Claim: on unequal hosts the planner's layout beats the even one, and no layout made by hand beats it.

Two emulated hosts (:mod:`benchmarks.support.testbed`) of two ranks each, joined by rate-limited uplinks; the
layers of one host take three times as long. Compute is emulated: each layer sleeps, so that four ranks share
two cores, while communication is real. Tensor-parallel ranks share the sleep of a layer as they share its
features, and exchange its output. The planner is given the measured times of the layers on both kinds of
device (:class:`osdp.cluster.layer_profile.LayerProfile`) and of the links, and lays the model out; that plan,
the same with even stages, and every layout made by hand in a small space (degrees of all three kinds, which
host comes first, even stages and stages in proportion to the hosts' speed) train in turn. Predicted times
stand beside the measured ones, and the loss after the last step must be that of a single process.

    python -m benchmarks.planner_heterogeneous [--quick] [--json FILE]
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.support import harness
from benchmarks.support.baselines import TrainStep, make_optimizer, rank_batches, reference_losses
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError
from benchmarks.support.models import Case, loss_of
from benchmarks.support.stages import WIDTH, Naps, SharedSleeper, agreed, sleepers
from benchmarks.support.testbed import NetworkUnavailableError, launch_over
from benchmarks.support.timing import paired_ratio
from benchmarks.support.turns import take_turns
from osdp import OSDP, Training
from osdp.cluster.cost.stage import ClusterPrices
from osdp.cluster.cost.step import price
from osdp.cluster.hardware import Cluster, Gpu, NetworkLink, NodeGroup, NodeType
from osdp.cluster.layer_profile import LayerCase, LayerCost, LayerProfile
from osdp.cluster.plan import ClusterPlan, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.runnable import runnable_plan
from osdp.cluster.search.layouts import best_layouts
from osdp.cluster.search.space import LayoutSpace
from osdp.cluster.transformer import Item, TransformerShape
from osdp.hardware.device_info import Link, PointToPointLink
from osdp.plan.dims import ParallelDims
from osdp.plan.shard_math import part_sizes
from osdp.profiler.links.axis_links import measure_stage_link, measure_tensor_links
from osdp.runtime.mesh import parallel_mesh

GIB = 2**30
LAYERS, SAMPLES, GLOBAL_BATCH = 12, 2, 16
NAPS = Naps(0.010, 0.010, 0.010)
#: How much slower the second host is.
SLOWNESS = 3
MEGABITS = 500
#: Kinds of hosts, and tensor-parallel degrees: the ranks of one host share layers.
KINDS, TENSOR_DEGREES = ("fast", "slow"), (1, 2)
PLANNED, EVEN, AGAIN = "planned", "even", "planned again"
LOSS_TOLERANCE = 1e-3
SHAPE = TransformerShape(
    name="sleepers", layers=LAYERS, hidden=WIDTH, heads=4, sequence=16, vocabulary=WIDTH, tied=False
)
LOAD = Workload(
    shape=SHAPE, global_batch=GLOBAL_BATCH, weight_bytes=4, gradient_bytes=4, reduce_bytes=4, state_bytes=8
)
SPACE = LayoutSpace(
    samples=(SAMPLES,), schedules=("1f1b",), recompute=(RecomputeLayers.NONE,), zero=(0,), token_slices=(1,)
)


@dataclass(frozen=True)
class Entry:
    """A layout in the contest."""

    name: str
    plan: ClusterPlan


def model(slow: bool, *, awake: bool = False) -> Case:
    """The emulated model as a rank of one host computes it; its parameters are the same on both."""
    case = sleepers("unequal hosts", [NAPS] * LAYERS, awake=awake, kind=SharedSleeper)

    def build() -> nn.Module:
        made = case.build()
        for layer in made.modules():
            if isinstance(layer, SharedSleeper):
                layer.naps = layer.naps.times(SLOWNESS if slow else 1)
        return made

    return replace(case, build=build)


def layer_seconds(naps: Naps) -> tuple[float, float]:
    """Measured seconds of forward and of backward of a layer, median of several in a row."""
    layers = nn.Sequential(*(SharedSleeper(naps) for _ in range(4)))
    x = torch.randn(SAMPLES, SHAPE.sequence, WIDTH, requires_grad=True)
    passes: list[tuple[float, float]] = []
    for _ in range(5):
        began = time.perf_counter()
        out = layers(x).sum()
        between = time.perf_counter()
        out.backward()
        passes.append((between - began, time.perf_counter() - between))
    forward, backward = (median(seconds) / len(layers) for seconds in zip(*passes, strict=True))
    return forward, backward


def measured_layers(slow: bool) -> dict[tuple[bool, int], tuple[float, float]]:
    """Seconds of a layer, or of a rank's part of it, by slowness and degree: of each host's slower rank."""
    mine = {(slow, tp): layer_seconds(NAPS.times((SLOWNESS if slow else 1) / tp)) for tp in TENSOR_DEGREES}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: max(found[key] for found in everyone if key in found) for key in set().union(*everyone)}


def all_reduce_link(group: dist.ProcessGroup) -> Link:
    """All-reduces between the ranks of ``group``, with the latency of a layer's output after a nap.

    In a loop of all-reduces alone, ranks do not have to wake up: the latency was up to ten times shorter.
    """
    links = measure_tensor_links(group, torch.device("cpu"))
    link = next(each for each in links if each.collective == "all_reduce")
    output, seconds = torch.zeros(SAMPLES, SHAPE.sequence, WIDTH), []
    for _ in range(40):
        time.sleep(NAPS.forward)
        began = time.perf_counter()
        dist.all_reduce(output, group=group)
        seconds.append(time.perf_counter() - began)
    return replace(link, latency=max(median(seconds) - output.nbytes / link.bandwidth, 0.0))


def prices_of(
    uplink: PointToPointLink, inside: Link, layers: Mapping[tuple[bool, int], tuple[float, float]]
) -> ClusterPrices:
    """The cluster with its measured links, and the layers' times on both kinds of device.

    Args:
        uplink: From stage to stage between the hosts.
        inside: All-reduces of the two ranks of a host.
        layers: From :func:`measured_layers`.
    """
    # A ring of two sends half of the bytes there and half back.
    near = NetworkLink(inside.bandwidth, inside.latency / 2)
    # One pair of neighbours crossed the uplink while it was measured, so it had all of it.
    far = NetworkLink(uplink.bandwidth, uplink.latency)
    groups = []
    for name in KINDS:
        gpu = Gpu(name, 1e12, 8 * GIB, 1e11)
        groups.append(NodeGroup(NodeType(name, gpu, 2, near, far), 1))
    profiles = [
        LayerProfile(
            name,
            SHAPE.name,
            WIDTH,
            "float32",
            tuple(
                _time(item, tp, *(layers[bool(slow), tp] if item is Item.LAYER else (0.0, 0.0)))
                for tp in TENSOR_DEGREES
                for item in (Item.LAYER, Item.EMBEDDING, Item.HEAD)
            ),
        )
        for slow, name in enumerate(KINDS)
    ]
    return ClusterPrices(Cluster(tuple(groups)), LOAD, profiles=profiles)


def _time(item: Item, tp: int, forward: float, backward: float) -> LayerCost:
    """What an item takes; there is memory for all layouts, whatever it keeps."""
    return LayerCost(LayerCase(item, SAMPLES, SHAPE.sequence, tp), 0, 0, forward, backward)


def contest(prices: ClusterPrices) -> list[Entry]:
    """The planned layout, the same with even stages, and those made by hand, each with its price."""
    planned = best_layouts(prices, SPACE).plans[0]
    even = _cuts(planned.layout.degrees.pp, planned.slots)[EVEN]
    entries = [
        Entry(PLANNED, planned),
        Entry(EVEN, price(prices, planned.layout, (0, *accumulate(even)), planned.slots)),
    ]
    for pp, dp, tp in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2)):
        layout = ParallelLayout(ParallelDims(pp, dp, tp), SAMPLES, GLOBAL_BATCH // dp // SAMPLES)
        for first in (0, 1) if pp > 1 else (0,):
            slots = _slots(pp, first)
            for kind, sizes in _cuts(pp, slots).items():
                made = price(prices, layout, (0, *accumulate(sizes)), slots)
                known = [
                    (entry.plan.layout.degrees, entry.plan.bounds, entry.plan.slots) for entry in entries
                ]
                if (layout.degrees, made.bounds, made.slots) not in known:
                    how = f", {_order(first)}, {kind}" if pp > 1 else ""
                    entries.append(Entry(f"pp={pp} dp={dp} tp={tp}{how}", made))
    return entries


def _slots(pp: int, first: int) -> tuple[StageSlot, ...]:
    if pp == 1:
        return (StageSlot((1, 1)),)
    nodes = [(1, 0), (0, 1)]
    return tuple(StageSlot(nodes[host], pp // 2) for host in (first, 1 - first) for _ in range(pp // 2))


def _order(first: int) -> str:
    return "slow host first" if first else "fast host first"


def _cuts(pp: int, slots: tuple[StageSlot, ...]) -> dict[str, tuple[int, ...]]:
    """Items of each stage: as many layers each, or in proportion to speed; ends with their neighbours."""
    found = {EVEN: list(part_sizes(LAYERS, pp))}
    if pp > 1:
        speeds = [1.0 if slot.nodes[0] else 1 / SLOWNESS for slot in slots]
        found["in proportion"] = [round(LAYERS * speed / sum(speeds)) for speed in speeds]
        found["in proportion"][-1] += LAYERS - sum(found["in proportion"])
    return {
        kind: tuple(size + (at == 0) + (at == pp - 1) for at, size in enumerate(sizes))
        for kind, sizes in found.items()
    }


def compare(rank: int, world_size: int, *, rounds: int, quick: bool) -> dict[str, Any]:
    """Worker: measure the link, plan, and time all layouts in turn; ranks 0 and 1 are on the first host."""
    del world_size
    torch.set_num_threads(1)
    probe = parallel_mesh(model(False).model(device="meta"), ParallelDims(4, 1, 1))
    uplink = agreed(measure_stage_link(probe["pp"].get_group(), torch.device("cpu")))
    pairs = parallel_mesh(model(False).model(device="meta"), ParallelDims(2, 1, 2))["tp"].get_group()
    inside = agreed(all_reduce_link(pairs))
    prices = prices_of(uplink, inside, measured_layers(rank >= 2))
    entries = contest(prices)
    if quick:
        entries = entries[:4]
    steps: dict[str, TrainStep] = {}
    for entry in [*entries, Entry(AGAIN, entries[0].plan)]:
        first_is_slow = not entry.plan.slots[0].nodes[0]
        slow = (rank >= 2) != first_is_slow
        steps[entry.name] = _step(model(slow), entry.plan, prices)
    turns = take_turns(steps, rounds=rounds, warmup=1)
    return {
        "seconds": turns.seconds,
        "losses": turns.losses,
        "steps": turns.steps,
        "predicted": {entry.name: entry.plan.step_seconds for entry in entries},
        "bounds": {entry.name: entry.plan.bounds for entry in entries},
        "degrees": {entry.name: asdict(entry.plan.layout.degrees) for entry in entries},
    }


def _step(case: Case, plan: ClusterPlan, prices: ClusterPrices) -> TrainStep:
    sample = case.sample(SAMPLES)
    made = runnable_plan(plan, prices.cluster, LOAD, case.model(device="meta"), sample, kind="cpu")
    degrees = plan.layout.degrees
    mesh: DeviceMesh = parallel_mesh(case.model(device="meta"), degrees)
    wrapped = OSDP(case.model(), plan=made, mesh=mesh)
    optimizer = make_optimizer(wrapped.parameters(), Training())
    share, index_of_rank = GLOBAL_BATCH // degrees.dp, mesh["dp"].get_local_rank()
    mine = slice(index_of_rank * share, (index_of_rank + 1) * share)
    batches = rank_batches(case, GLOBAL_BATCH, 0, 1)

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        batch = {name: tensor[mine] for name, tensor in batches(index).items()}
        loss = wrapped.train_step(batch, loss_fn=loss_of, num_microbatches=plan.layout.microbatches)
        optimizer.step()
        return float(loss)

    return step


def rows_of(found: dict[str, Any]) -> list[Row]:
    """A row for each layout."""
    training = Training(local_batch=GLOBAL_BATCH, microbatches=1)
    expected = reference_losses(model(False, awake=True), training, 1, found["steps"])[-1]
    rows: list[Row] = []
    for name, seconds in found["seconds"].items():
        predicted = found["predicted"].get(name)
        difference = abs(found["losses"][name] - expected) / abs(expected)
        over = paired_ratio(seconds, found["seconds"][PLANNED])
        row: Row = {
            "name": name,
            "compute": "emulated",
            "degrees": found["degrees"].get(name),
            "bounds": found["bounds"].get(name),
            "seconds": seconds,
            "predicted_seconds": predicted,
            "time_error": predicted / median(seconds) - 1 if predicted else None,
            "planned_over": over.median,
            "interval": [over.low, over.high],
            "loss_difference": difference,
        }
        if not difference <= LOSS_TOLERANCE:
            row["error"] = f"ends at loss {found['losses'][name]:.6f}, the single process at {expected:.6f}"
        rows.append(row)
    return rows


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(options, world_size=4, backend="gloo")
    empty: dict[str, float | int | None] = {
        "planned_over_best": None,
        "planned_over_even": None,
        "time_error": None,
    }
    arguments = {"rounds": 3 if options.quick else 7, "quick": options.quick}
    try:
        worker = "benchmarks.planner_heterogeneous:compare"
        found = launch_over(MEGABITS * 10**6, worker, 4, arguments, timeout=1500)[0]
    except NetworkUnavailableError as error:
        result.add({"name": "two unequal hosts", "reason": str(error)})
        result.summary = empty
        return result
    except WorkerError as error:
        result.add({"name": "two unequal hosts", "error": str(error)})
        result.summary = empty
        return result
    result.add(*rows_of(found))
    by_hand = [row for row in result.rows if row["name"] not in (PLANNED, AGAIN)]
    even = next(row for row in result.rows if row["name"] == EVEN)
    planned = next(row for row in result.rows if row["name"] == PLANNED)
    result.summary = {
        "planned_over_best": min(row["planned_over"] for row in by_hand),
        "planned_over_even": even["planned_over"],
        "time_error": abs(planned["time_error"]),
    }
    return result


def _degrees(row: Row) -> str | None:
    degrees = row.get("degrees")
    return degrees and " ".join(f"{axis}={count}" for axis, count in degrees.items())


def _cells(row: Row) -> list[object]:
    return [
        row["name"], _degrees(row), row.get("bounds"), median(row["seconds"]), row["predicted_seconds"],
        row["time_error"],
        f"{row['planned_over']:.3f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]",
        row["loss_difference"],
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("planner_heterogeneous", __doc__, arguments))
    columns = [
        "layout",
        "degrees",
        "items",
        "s/step",
        "predicted",
        "time error",
        "planned is faster",
        "loss difference",
    ]
    measured = [_cells(row) for row in result.rows if "seconds" in row]
    harness.table("two hosts, one of them slower", columns, measured)
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
