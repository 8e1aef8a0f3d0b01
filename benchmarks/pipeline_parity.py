"""Claim: whatever the layout, a model in stages and parts computes what a single process does.

Every architecture (:mod:`benchmarks.support.architectures`), with attention masks, labels that do not count
and uneven vocabularies, in pipelines of two and four stages, beside data and tensor parallelism, under every
schedule that can run there: the loss, every gradient and the joint norm of one step against the unwrapped
model on the whole batch, then evaluation and inference. Zero-bubble schedules need stages without data or
tensor parallelism. A gradient's difference is taken relative to its norm, or to 1e-5 of the joint norm of all
where it is smaller: biases of attention keys have a gradient of zero but for rounding.

    python -m benchmarks.pipeline_parity [--quick] [--json FILE]
"""

import copy
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.support import harness
from benchmarks.support.architectures import ARCHITECTURES, Architecture, loss_of_logits
from benchmarks.support.candidates import given_device
from benchmarks.support.harness import Options, Result, Row
from benchmarks.support.launch import WorkerError, launch
from osdp import OSDP, DeviceInfo, Link, ModelDesc, Training
from osdp.hardware.device_info import PointToPointLink
from osdp.profiler.roofline import estimate

BATCH, MICROBATCHES = 16, 4
ALONE = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
BESIDE = ("gpipe", "1f1b", "interleaved")
#: Gradients below this part of the joint norm are compared to it instead of to their own.
FLOOR = 1e-5
#: Largest differences of gradients that pass, by dtype of the computation.
LIMITS = {None: 1e-5, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees, and what is tried in them.

    Attributes:
        name: As in the table.
        pp: Ranks of a pipeline.
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        schedules: Schedules.
        options: Further options of ``OSDP``.
        param_dtypes: Dtypes of the computation.
    """

    name: str
    pp: int
    dp: int
    tp: int
    schedules: tuple[str | None, ...]
    options: tuple[tuple[str, Any], ...] = ()
    param_dtypes: tuple[str | None, ...] = (None,)


#: How the stages of a data-parallel layout are sharded, by schedule: each mode is met.
STRATEGIES = {"gpipe": "NO_SHARD", "1f1b": "FULL_SHARD"}

LAYOUTS = (
    Layout("pp 2", 2, 1, 1, ALONE),
    Layout("pp 4", 4, 1, 1, ALONE),
    Layout("pp 2 x dp 2", 2, 2, 1, BESIDE),
    Layout("pp 2 x tp 2", 2, 1, 2, BESIDE),
    Layout("dp 2 x tp 2", 1, 2, 2, (None,)),
)
_BOTH = (None, "bfloat16")
EIGHT = (
    Layout("pp 2 x dp 2 x tp 2", 2, 2, 2, ("1f1b",), param_dtypes=_BOTH),
    Layout("pp 2 x HYBRID_SHARD", 2, 4, 1, ("1f1b",), (("strategy", "HYBRID_SHARD"),), _BOTH),
    Layout("pp 2 x groups in two steps", 2, 4, 1, ("1f1b",), (("two_step", True),), _BOTH),
)


def device_of(dp: int) -> DeviceInfo:
    """Devices that nobody measured: what is planned for is whether it computes the same."""
    links = tuple(
        Link(name, group, size, 1e-4, 1e9)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
        for group, size in (("inside 2", 2), ("across 2", 2), ("two_step 2", dp))
        if dp > 2
    )
    device = given_device(dp)
    return replace(
        device,
        links=(*device.links, *links),
        flops=1e10,
        memory_bandwidth=1e10,
        stage_link=PointToPointLink(1e-4, 1e9),
    )


def measure_layout(rank: int, world_size: int, *, names: list[str], layout: dict[str, Any]) -> list[Row]:
    """Worker: one row for each architecture, schedule and dtype."""
    del rank, world_size
    tried = Layout(**{**layout, "options": tuple(map(tuple, layout["options"]))})
    # One mesh for all models: each would make groups of its own, which stay open.
    mesh = init_device_mesh("cpu", (tried.pp, tried.dp, tried.tp), mesh_dim_names=("pp", "dp", "tp"))
    rows = []
    for name in names:
        reference = Reference(ARCHITECTURES[name], layers=8 if tried.pp > 2 else 4)
        for schedule in tried.schedules:
            for dtype in tried.param_dtypes:
                rows.append(reference.compare(tried, mesh, schedule, dtype))
    return rows


class Reference:
    """An architecture, a batch, and what a single process makes of it."""

    def __init__(self, architecture: Architecture, layers: int) -> None:
        torch.manual_seed(0)
        self.architecture = architecture
        self.model = architecture.make(layers)
        self.inputs, self.targets = architecture.batch(BATCH), architecture.targets(BATCH)
        single = copy.deepcopy(self.model)
        output = single(**self.inputs)
        total, count = loss_of_logits(output, self.targets)
        (total / count).backward()
        self.loss, self.logits = float(total / count), output.logits.detach()
        self.gradients = {
            name: parameter.grad
            for name, parameter in single.named_parameters(remove_duplicate=False)
            if parameter.grad is not None
        }
        # In float64: torch's own norm of a large fp32 tensor is off by 1e-4 on CPUs.
        squares = [p.grad.double().square().sum() for p in single.parameters() if p.grad is not None]
        self.norm = float(torch.stack(squares).sum().sqrt())

    def compare(self, layout: Layout, mesh: DeviceMesh, schedule: str | None, dtype: str | None) -> Row:
        """One row: the differences of one step under ``layout``."""
        samples = BATCH // layout.dp // MICROBATCHES
        training = Training(local_batch=samples, microbatches=MICROBATCHES, param_dtype=dtype)
        one = {name: tensor[:samples] for name, tensor in self.inputs.items()}
        model_desc, device = ModelDesc.from_module(self.model, one), device_of(layout.dp)
        options = {"strategy": STRATEGIES.get(schedule or "") if layout.dp > 1 else None}
        model = OSDP(
            copy.deepcopy(self.model),
            model_desc,
            device,
            training=training,
            profile=estimate(model_desc, device, training),
            mesh=mesh,
            pp=layout.pp,
            dp=layout.dp,
            tp=layout.tp,
            schedule=schedule,
            cache_dir=None,
            **{**options, **dict(layout.options)},
        )
        where = torch.distributed.get_rank() // layout.tp % layout.dp
        mine = slice(where * BATCH // layout.dp, (where + 1) * BATCH // layout.dp)
        inputs = {name: tensor[mine] for name, tensor in self.inputs.items()}
        loss = float(model.train_step(inputs, self.targets[mine], loss_of_logits))
        gradient, worst = self._largest_difference(model)
        norm = float(model.clip_grad_norm_(1e9))
        evaluated = float(model.eval_step(inputs, self.targets[mine], loss_of_logits))
        logits = model.predict(inputs).logits
        return {
            "architecture": self.architecture.name,
            "layout": layout.name,
            "schedule": schedule or "-",
            "dtype": dtype or "float32",
            "loss_difference": abs(loss - self.loss) / abs(self.loss),
            "gradient_error": gradient,
            "worst_parameter": worst,
            "norm_error": abs(norm / self.norm - 1),
            "evaluation_difference": abs(evaluated - self.loss) / abs(self.loss),
            "prediction_difference": float((logits - self.logits[mine]).abs().max()),
        }

    def _largest_difference(self, model: OSDP) -> tuple[float, str]:
        worst = (0.0, "")
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                return float("inf"), name
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            wanted = self.gradients[name]
            scale = max(float(wanted.norm()), FLOOR * self.norm)
            worst = max(worst, (float((whole - wanted).norm()) / scale, name))
        return worst


def rows_of(names: list[str], layout: Layout) -> list[Row]:
    """The rows of a layout, each with the largest differences of all its ranks."""
    ranks = layout.pp * layout.dp * layout.tp
    arguments = {
        "names": names,
        "layout": {field: getattr(layout, field) for field in Layout.__slots__},
    }
    cases = len(names) * len(layout.schedules) * len(layout.param_dtypes)
    try:
        by_rank = launch(
            "benchmarks.pipeline_parity:measure_layout", ranks, arguments, timeout=180 + 8 * ranks * cases
        )
    except WorkerError as error:
        return [{"name": layout.name, "error": str(error)}]
    return [_joined(list(rows), layout) for rows in zip(*by_rank, strict=True)]


def _joined(rows: list[Row], layout: Layout) -> Row:
    worst = max(rows, key=lambda row: row["gradient_error"])
    row = {
        key: max(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in worst.items()
    }
    row["name"] = f"{row['architecture']} {layout.name} {row['schedule']} {row['dtype']}"
    limit = LIMITS[None if row["dtype"] == "float32" else row["dtype"]]
    wrong = [key for key in ("loss_difference", "gradient_error", "norm_error") if not row[key] <= limit]
    if wrong:
        row["error"] = f"{', '.join(wrong)} above {limit}"
    return row


def measure(options: Options) -> Result:
    layouts = LAYOUTS[:1] if options.quick else LAYOUTS
    names = list(ARCHITECTURES)
    parts = [(names, layout) for layout in layouts]
    if options.quick:
        parts = [(["gpt2", "t5"], LAYOUTS[0]), (["gpt2"], LAYOUTS[2]), (["llama"], LAYOUTS[3])]
    else:
        parts += [(["gpt2"], layout) for layout in EIGHT]
    result = Result(options, world_size=8, backend="gloo")
    for chosen, layout in harness.progress(parts, len(parts), "pipeline_parity"):
        result.add(*rows_of(chosen, layout))
    measured = [row for row in result.rows if "architecture" in row]
    expected = sum(len(chosen) * len(layout.schedules) * len(layout.param_dtypes) for chosen, layout in parts)
    single = [row["gradient_error"] for row in measured if row["dtype"] == "float32"]
    result.summary = {
        "architectures": len({row["architecture"] for row in measured}),
        "cases": len(measured),
        "skipped": expected - len(measured),
        "max_gradient_error": max(single, default=None),
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    result = measure(harness.parse_options("pipeline_parity", __doc__, arguments))
    keys = (
        "architecture", "layout", "schedule", "dtype", "loss_difference", "gradient_error", "worst_parameter",
        "norm_error", "evaluation_difference", "prediction_difference",
    )  # fmt: skip
    harness.table("one step against a single process", keys, ([r.get(k) for k in keys] for r in result.rows))
    return harness.finish(result)


if __name__ == "__main__":
    sys.exit(main())
