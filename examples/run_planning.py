"""Describe, profile and plan the model of a run; the only script that plans."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from examples.text_model import Wrap, build
from examples.training_run import Settings
from osdp import OSDP, DeviceInfo, ModelDesc, Plan, Training, make_plan
from osdp.cost.evaluate import evaluate
from osdp.plan.dims import ParallelDims
from osdp.plan.sharding import Mode, Unit
from osdp.profiler.measure import profile_model

#: A limit that nothing exceeds, for plans whose peak is asked for.
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Planning:
    """What a comparison knows before anything is trained.

    Attributes:
        model_desc: The model.
        plan: The plan for it.
        sharded: What everything sharded would cost, as FSDP2 does it; ``None`` where it was not asked.
        forced: Whether one way was forced on every operator.
    """

    model_desc: ModelDesc
    plan: Plan
    sharded: Plan | None = None
    forced: bool = False

    def osdp(self) -> Wrap:
        """Wraps a model by the plan."""
        return lambda model: OSDP(model, self.model_desc, training=self.plan.training, plan=self.plan)


def make_planning(
    settings: Settings,
    mesh: DeviceMesh,
    limit: int | None,
    fraction: float,
    plan: Path | None,
    groups: Mapping[str, Any],
) -> Planning:
    """Describe and profile the model, and plan for it.

    Args:
        settings: The run.
        mesh: The data-parallel mesh.
        limit: Bytes per device; ``None`` to use ``fraction``, or all memory where ``groups`` are forced.
        fraction: Where the limit lies between the predicted peaks of everything sharded (0) and everything
            replicated (1).
        plan: A saved plan to use instead of planning.
        groups: What ``osdp.gen_fsdp_args`` gave.
    """
    training = Training(optimizer="AdamW", local_batch=settings.samples // mesh.size())
    sample = _sample(settings, training)
    model = build(settings.size, settings.seed)
    model_desc = ModelDesc.from_module(model, sample)
    devices = DeviceInfo.detect(group_sizes=groups.get("group_sizes"))
    available = devices.memory_limit
    devices = replace(devices, memory_limit=_NO_LIMIT)
    profile = profile_model(
        model, model_desc, sample, training=training, mesh=mesh,
        progress=dist.get_rank() == 0 and sys.stderr.isatty(),
    )  # fmt: skip
    replicated = make_plan(None, model_desc, devices, training=training, profile=profile, strategy="NO_SHARD")
    sharded = as_fsdp2(replicated, model_desc)
    sharded = sharded.with_sharding(predicted=evaluate(sharded, profile, devices, training, model_desc))
    low, high = sharded.predicted.peak_bytes, replicated.predicted.peak_bytes
    otherwise = available if groups else round(low + fraction * (high - low))
    devices = replace(devices, memory_limit=limit or otherwise)
    chosen = (
        Plan.load(plan)
        if plan
        else make_plan(None, model_desc, devices, training=training, profile=profile, **groups)
    )
    return Planning(model_desc, chosen, sharded, forced=bool(groups))


def make_stage_planning(
    settings: Settings,
    layout: ParallelDims,
    schedule: str | None,
    microbatches: int,
    limit: int | None,
    plan: Path | None,
) -> Planning:
    """Describe and profile the model, cut it into stages and plan for each.

    Args:
        settings: The run.
        layout: Degrees of parallelism.
        schedule: Of the stages; ``None`` to choose the fastest.
        microbatches: Of a step.
        limit: Bytes per device; ``None`` for all memory.
        plan: A saved plan to use instead of planning.
    """
    training = Training(optimizer="AdamW", local_batch=settings.samples // (layout.dp * microbatches))
    sample = _sample(settings, training)
    model = build(settings.size, settings.seed)
    chosen = (
        Plan.load(plan)
        if plan
        else make_plan(
            model, sample, limit, pp=layout.pp, dp=layout.dp, tp=layout.tp, schedule=schedule,
            training=training, microbatches=(microbatches,),
        )
    )  # fmt: skip
    return Planning(ModelDesc.from_module(model, sample), chosen)


def _sample(settings: Settings, training: Training) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(training.local_batch or 1, settings.size.seq, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def as_fsdp2(plan: Plan, model_desc: ModelDesc) -> Plan:
    """``plan`` with the units of :func:`examples.text_model.fsdp2`; its prediction stays that of its own."""
    blocks: dict[str | None, list[str]] = {None: []}
    for operator in model_desc.operators:
        blocks.setdefault(operator.block, []).append(operator.name)
    units = tuple(
        Unit(Mode.FULL_SHARD, tuple(names), (block,))
        if block
        else Unit(Mode.SHARD_GRAD_OP, tuple(names), ("",), root=True)
        for block, names in blocks.items()
    )
    modes = {name: unit.mode for unit in units for name in unit.operators}
    decisions = tuple(replace(decision, mode=modes[decision.operator]) for decision in plan.decisions)
    return plan.with_sharding(units=units, decisions=decisions, optimal=False)
