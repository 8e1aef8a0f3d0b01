"""Results of the pipeline search: the prediction of its plan, or the reason why no plan fits."""

from collections.abc import Sequence

import numpy as np

from osdp.cost.pipeline.simulate import PipelineOutcome
from osdp.errors import InfeasibleError, LargeOperator
from osdp.hardware.device_info import DeviceInfo
from osdp.model.description import ModelDesc
from osdp.plan.dims import ParallelDims
from osdp.plan.plan import StagePlan
from osdp.plan.schedule import Schedule
from osdp.plan.search_options import SearchOptions
from osdp.plan.sharding import Prediction


def pipeline_prediction(
    schedule: Schedule, parts: Sequence[StagePlan], outcome: PipelineOutcome, peaks: Sequence[int]
) -> Prediction:
    """Prediction of a pipelined step: for each quantity, its value on the worst rank."""
    by_rank = [
        [parts[stage].sharding.predicted for stage in schedule.stages_of(r)]
        for r in range(schedule.num_ranks)
    ]
    # Each quantity's worst rank may be another one; the peak's moment is that of the rank with the peak.
    worst = peaks.index(max(peaks))
    return Prediction(
        step_seconds=outcome.seconds,
        compute_seconds=max(sum(p.compute_seconds for p in here) for here in by_rank),
        communication_seconds=max(sum(p.communication_seconds for p in here) for here in by_rank),
        optimizer_seconds=max(sum(p.optimizer_seconds for p in here) for here in by_rank),
        peak_bytes=max(peaks),
        peak_moment=f"rank {worst} of its pipeline, {by_rank[worst][0].peak_moment}",
        state_bytes=max(sum(p.state_bytes for p in here) for here in by_rank),
    )


def no_pipeline(
    model_desc: ModelDesc, device: DeviceInfo, options: SearchOptions, dims: ParallelDims, least: float
) -> InfeasibleError:
    """The error that no plan fits, with ``least`` bytes as the lowest peak that was found."""
    largest = sorted(model_desc.operators, key=lambda op: -op.nbytes)[:3]
    suggestions = [
        "a smaller local batch with more microbatches",
        f"more stages than pp={dims.pp}, or more data-parallel ranks than {dims.dp}",
    ]
    if not options.recompute:
        suggestions.append("recompute=True, which recomputes blocks in backward")
    return InfeasibleError(
        limit=device.memory_limit,
        best_peak=int(np.ceil(least)),
        largest=[LargeOperator(op.name, op.nbytes) for op in largest],
        suggestions=suggestions,
    )
