"""PipelinePlan: a model cut into pipeline stages, and the sharding plan of each."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from osdp import codec
from osdp.codec import read_json
from osdp.model.dataflow import Transfer
from osdp.model.training import Training
from osdp.plan.plan import Plan, Prediction
from osdp.plan.tensor_parallel import TensorParallelPlan
from osdp.plan.token_slices import TokenSlices

if TYPE_CHECKING:
    from osdp.plan.schedule import Schedule

PIPELINE_PLAN_VERSION = 1


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        modules: FQNs of the modules it keeps, in order; those of other stages are removed.
        loose: FQNs of its parameters that belong to none of these modules, but to the code around them.
        plan: Sharding of its operators over the data-parallel ranks, with its predicted cost.
        forward_seconds: Compute and collectives in the forward of one microbatch.
        backward_seconds: The same in its backward.
        in_flight: Number of microbatches whose activations it holds at once.
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
        stages: These stages, the owner first: checkpoints and gradient norms count only the owner's copy.
        names: First FQN of the parameter in each of these stages.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """A training plan with pipeline stages, each of which is sharded by itself.

    Attributes:
        model: Fingerprint of the ModelDesc.
        device: Fingerprint of the DeviceInfo.
        training: The training it was made for; its microbatches are those of the pipeline.
        pp: Number of ranks of a pipeline.
        dp: Number of data-parallel ranks of each stage.
        tp: Number of tensor-parallel ranks of each stage.
        schedule: Name of the schedule.
        stages: All stages, in model order: ``pp`` of them or, for interleaved schedules, a multiple of it.
        transfers: Values sent between stages.
        ties: Parameters that several stages hold a copy of.
        memory_limit: Bytes per device it was made for.
        predicted: Simulated step; each quantity is that of the rank on which it is worst.
        bubble: Predicted fraction of the ranks' time that is idle, from 0 to 1.
        optimal: Whether it is proven optimal in the decision space.
        tensor: Tensor-parallel plan of the ``tp`` ranks; ``None`` if ``tp`` is 1.
        notes: Facts about the plan as a whole.
        peaks: Predicted peak bytes of each rank of a pipeline.
        token_slices: Slices into which ``train_step`` cuts sequences by default; ``None`` leaves them whole.
            Predictions are for whole sequences.
        version: Format version.
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
            raise ValueError(
                f"{len(self.stages)} stages cannot be placed evenly on {self.pp} pipeline ranks; use a "
                f"multiple of {self.pp} stages"
            )
        held = [module for stage in self.stages for module in stage.modules]
        twice = sorted({module for module in held if held.count(module) > 1})
        if twice:
            raise ValueError(
                f"every module must belong to exactly one stage; these belong to several: {', '.join(twice)}"
            )

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank of a pipeline."""
        return len(self.stages) // self.pp

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
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
        """Make its schedule, or another one with the same number of stages per rank.

        Args:
            num_microbatches: Microbatches of a step; as planned if ``None``.
            name: Name of the schedule; as planned if ``None``.
            num_slices: Slices of each sequence.
        """
        from osdp.plan.schedule import make_schedule

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
        """Load the plan saved at ``path``.

        Raises:
            ValueError: The file holds no plan with stages, or one of an unsupported version.
        """
        if not has_stages(path):
            raise ValueError(f"{path} has no pipeline stages; use Plan.load for plans without stages")
        return codec.load(cls, path)

    def __str__(self) -> str:
        # The table is a report; values themselves stay free of formatting.
        from osdp.report.pipeline_table import pipeline_table

        return pipeline_table(self)


def has_stages(path: str | Path) -> bool:
    """Whether the file at ``path`` holds a pipeline plan."""
    content = read_json(path)
    return isinstance(content, dict) and "transfers" in content
