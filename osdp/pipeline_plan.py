"""PipelinePlan: a model cut into stages, and the sharding plan of each."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from osdp import codec
from osdp.flow import Transfer
from osdp.plan import Plan, Prediction
from osdp.tensor_plan import TensorParallelPlan
from osdp.text_file import read_json
from osdp.token_slices import TokenSlices
from osdp.training import Training

if TYPE_CHECKING:
    from osdp.schedule import Schedule

PIPELINE_PLAN_VERSION = 1


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        modules: FQNs of the modules it keeps, in order; those of other stages are removed.
        loose: FQNs of its parameters that belong to none of them, but to the code around them.
        plan: How its operators are sharded over the data-parallel ranks, with what it is predicted to cost.
        forward_seconds: Compute and collectives of one microbatch forward.
        backward_seconds: The same backward.
        in_flight: Microbatches whose activations it holds at once.
        reason: Why it begins where it does.
    """

    modules: tuple[str, ...]
    loose: tuple[str, ...]
    plan: Plan
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages hold a copy of.

    Attributes:
        stages: Which, the owner first: checkpoints and norms count its copy alone.
        names: First FQN of the parameter in each of them.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """A plan for stages that are sharded each by itself.

    Attributes:
        model: Fingerprint of the ModelDesc.
        device: Fingerprint of the DeviceInfo.
        training: The training; its microbatches are those of the pipeline.
        pp: Ranks of a pipeline.
        dp: Data-parallel ranks of each stage.
        tp: Tensor-parallel ranks of each stage.
        schedule: Name of the schedule.
        stages: All stages, in the order of the model; ``pp`` of them or, interleaved, a multiple.
        transfers: What goes between them.
        ties: Parameters that several stages hold.
        memory_limit: Bytes per device it was made for.
        predicted: A step on the rank that is worst in each respect.
        bubble: Part of the ranks' time in which they wait, from 0 to 1, as predicted.
        optimal: Whether it is proven best in the decision space.
        tensor: How the ``tp`` ranks compute layers together; ``None`` for one.
        notes: Facts about the plan as a whole.
        peaks: Predicted peak bytes of each rank of a pipeline.
        token_slices: How ``train_step`` cuts sequences unless it is told otherwise; ``None``: not at all.
            What is predicted is for whole sequences.
        version: Of this format.
    """

    model: str
    device: str
    training: Training
    pp: int
    dp: int
    tp: int
    schedule: str
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    ties: tuple[Tie, ...]
    memory_limit: int
    predicted: Prediction
    bubble: float
    optimal: bool
    tensor: TensorParallelPlan | None = None
    notes: tuple[str, ...] = ()
    peaks: tuple[int, ...] = ()
    token_slices: TokenSlices | None = None
    version: int = PIPELINE_PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PIPELINE_PLAN_VERSION:
            raise ValueError(
                f"pipeline plan format {self.version} is not the supported {PIPELINE_PLAN_VERSION}; "
                "plan again"
            )
        if len(self.stages) % self.pp:
            raise ValueError(f"{len(self.stages)} stages cannot be laid over {self.pp} ranks evenly")
        held = [module for stage in self.stages for module in stage.modules]
        twice = sorted({module for module in held if held.count(module) > 1})
        if twice:
            raise ValueError(f"every module belongs to one stage; these to several: {', '.join(twice)}")

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank of a pipeline holds."""
        return len(self.stages) // self.pp

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    @property
    def local_batch(self) -> int:
        """Samples of a microbatch on one data-parallel rank."""
        return self.stages[0].plan.local_batch

    @property
    def samples_per_second(self) -> float:
        """Predicted training throughput over all ranks."""
        return self.dp * self.local_batch * self.training.microbatches / self.predicted.step_seconds

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """FQNs of the modules of all stages."""
        return tuple(module for stage in self.stages for module in stage.modules)

    def make_schedule(
        self, num_microbatches: int | None = None, name: str | None = None, *, num_slices: int = 1
    ) -> "Schedule":
        """Its schedule, or another one of as many stages, for ``num_microbatches`` or as planned."""
        from osdp.schedule import make_schedule

        return make_schedule(
            name or self.schedule,
            self.pp,
            num_microbatches or self.training.microbatches,
            stages_per_rank=self.stages_per_rank,
            num_slices=num_slices,
        )

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "PipelinePlan":
        """The plan saved at ``path``.

        Raises:
            ValueError: It is not a plan of stages, or of an unsupported version.
        """
        if not has_stages(path):
            raise ValueError(f"{path} has no stages of a pipeline; Plan.load reads plans without")
        return codec.load(cls, path)

    def __str__(self) -> str:
        # The table is a report; values themselves stay free of formatting.
        from osdp.report.pipeline_table import pipeline_table

        return pipeline_table(self)


def has_stages(path: str | Path) -> bool:
    """Whether a file has the plan of a pipeline."""
    content = read_json(path)
    return isinstance(content, dict) and "transfers" in content
