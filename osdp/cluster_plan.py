"""ClusterPlan: how a transformer is laid over a cluster, and what a step of that takes."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from osdp import codec
from osdp.layout import Degrees
from osdp.transformer import TransformerShape

CLUSTER_PLAN_VERSION = 2

#: What is decided item by item, as a word.
MIXED = "mixed"


class Recompute(StrEnum):
    """What a backward computes again instead of having kept it.

    - ``NONE``: nothing.
    - ``SELECTIVE``: the scores of attention.
    - ``FULL``: all of each layer but its input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Way:
    """How items of a model live on the ranks of a stage.

    Attributes:
        zero: Stage of ZeRO: 0 replicates all, 1 shards optimizer states, 2 gradients as well, 3 weights as
            well.
        recompute: What is computed again.
    """

    zero: int = 0
    recompute: Recompute = Recompute.NONE


@dataclass(frozen=True, slots=True)
class Run:
    """Items of a stage that follow each other and live alike.

    Attributes:
        way: How they live.
        stop: The one after the last of them.
    """

    way: Way
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be trained; bytes are those of one parameter.

    The defaults are mixed precision with Adam as Rajbhandari et al. count it (ZeRO, SC 2020, section 3.1):
    16-bit weights and gradients, a 32-bit copy and two moments.

    Attributes:
        shape: The model.
        global_batch: Samples of a step.
        weight_bytes: Of a weight that is computed with and gathered, and of each number of an activation.
        gradient_bytes: Of a gradient while it waits.
        reduce_bytes: Of a gradient while it is reduced.
        state_bytes: Of what only the optimizer needs.
        update_bytes: Of what its update allocates for a moment: Adam's as it runs on GPUs by default has one
            32-bit copy (:data:`osdp.training.OPTIMIZERS`), a fused one none.
        flash: Whether scores of attention are never written.
        overlap: Part of the communication of gradients and gathered weights that compute hides where there is
            as much of it, from 0 to 1.
        reserve: Bytes of each device that the framework keeps: context, communicators, fragments. A guess:
            kernels alone took 1.3 GB where all were loaded (Hugging Face, "Model training anatomy"), and take
            less since CUDA 11.7 loads them as they are called. What ``nvidia-smi`` shows beyond
            ``torch.cuda.memory_reserved()`` is yours.
    """

    shape: TransformerShape
    global_batch: int
    weight_bytes: int = 2
    gradient_bytes: int = 2
    reduce_bytes: int = 2
    state_bytes: int = 12
    update_bytes: int = 4
    flash: bool = True
    overlap: float = 0.0
    reserve: int = 2**30

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"a step needs at least 1 sample, got a global batch of {self.global_batch}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must lie in 0..1, got {self.overlap}")


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to form a step, before it is cut into stages and placed.

    Attributes:
        degrees: Ranks along each axis.
        samples: Of a microbatch on one data-parallel rank.
        microbatches: How many of them.
        schedule: Name of the order of the stages.
        recompute: What is computed again; ``None`` if that is decided item by item.
        zero: Stage of ZeRO (:class:`Way`); likewise.
        token_slices: Equal slices that each sequence is cut into; stages work on several at a time.
    """

    degrees: Degrees
    samples: int
    microbatches: int
    schedule: str = "1f1b"
    recompute: Recompute | None = Recompute.NONE
    zero: int | None = 0
    token_slices: int = 1

    @property
    def way(self) -> Way:
        """How all its items live.

        Raises:
            ValueError: Each has its own way.
        """
        if self.zero is None or self.recompute is None:
            raise ValueError(f"items of {self} live in ways of their own")
        return Way(self.zero, self.recompute)

    @property
    def by_item(self) -> bool:
        """Whether items may live in different ways."""
        return self.zero is None or self.recompute is None

    @property
    def sharding(self) -> str:
        """Its stage of ZeRO as a word."""
        return MIXED if self.zero is None else f"zero{self.zero}"

    @property
    def recomputation(self) -> str:
        """What is computed again as a word."""
        return MIXED if self.recompute is None else self.recompute.value

    def living(self, way: Way) -> "Layout":
        """The same layout with all items in one way."""
        return replace(self, zero=way.zero, recompute=way.recompute)


@dataclass(frozen=True, slots=True)
class Slot:
    """Devices of one stage.

    Attributes:
        nodes: Nodes of each kind of the cluster that it takes, or one that it shares with its neighbours.
        shares: Stages that lie in its nodes together, itself among them.
    """

    nodes: tuple[int, ...]
    shares: int = 1


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a step consists of; seconds.

    Attributes:
        compute: The slowest stage's forwards and backwards of all microbatches, recomputation left out.
        recompute: Its forwards that are repeated.
        tensor: Its sums over tensor-parallel ranks.
        shards: Its gathers of weights and scatters of gradients in each microbatch, as far as nothing hides
            them.
        sends: Its exchanges with the stage before it.
        bubble: While it waits for other stages.
        gradients: The slowest stage's collectives at the end.
        optimizer: The slowest stage's update.
        embedding: To add up the gradients of an embedding that two stages hold.
    """

    compute: float
    recompute: float
    tensor: float
    shards: float
    sends: float
    bubble: float
    gradients: float
    optimizer: float
    embedding: float

    @property
    def pipeline(self) -> float:
        """Until the last backward has ended."""
        return self.compute + self.recompute + self.tensor + self.shards + self.sends + self.bubble

    @property
    def total(self) -> float:
        """The step."""
        return self.pipeline + self.gradients + self.optimizer + self.embedding


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of each device of a stage.

    Attributes:
        weights: Parameters.
        gradients: Their gradients.
        states: What the optimizer keeps.
        activations: Of all microbatches in flight.
        working: Most of what is there for a moment only.
        update: What the update allocates for a moment, when activations are gone.
        reserve: What the framework keeps.
        limit: What the smallest of its devices has.
    """

    weights: int
    gradients: int
    states: int
    activations: int
    working: int
    update: int
    reserve: int
    limit: int

    @property
    def total(self) -> int:
        """Most of it at one moment."""
        always = self.weights + self.gradients + self.states + self.reserve
        return always + max(self.activations + self.working, self.update)


@dataclass(frozen=True)
class ClusterPlan:
    """A model laid over a cluster.

    Attributes:
        model: Name of the model.
        cluster: Fingerprint of the cluster.
        layout: Degrees, batch, schedule, recomputation and sharding.
        bounds: Where stages begin and end in the chain of the model: stage *s* has the items ``bounds[s] ..
            bounds[s + 1] - 1``. Interleaved, what all stages of one rank have together.
        slots: Where each stage lies.
        seconds: What a step takes.
        stages: Memory of each stage.
        runs: How the items of each stage live, where that is decided item by item; empty elsewhere.
        dollars_per_second: What all nodes cost; ``None`` if a price is unknown.
        optimal: Whether no layout in the space is better, those that are decided item by item having the runs
            that :mod:`osdp.cost.cluster_mixture` gives each stage.
        version: Of this format.
    """

    model: str
    cluster: str
    layout: Layout
    bounds: tuple[int, ...]
    slots: tuple[Slot, ...]
    seconds: StepSeconds
    stages: tuple[StageBytes, ...]
    runs: tuple[tuple[Run, ...], ...] = ()
    dollars_per_second: float | None = None
    optimal: bool = False
    version: int = CLUSTER_PLAN_VERSION

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return self.seconds.total

    @property
    def peak(self) -> StageBytes:
        """Memory of the stage with the least to spare."""
        return min(self.stages, key=lambda stage: stage.limit - stage.total)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return all(stage.total <= stage.limit for stage in self.stages)

    @property
    def thriftiest(self) -> Layout:
        """The layout with all items in the ways that need least memory of those that some items have."""
        if not self.layout.by_item:
            return self.layout
        ways = [run.way for stage in self.runs for run in stage]
        again = max((way.recompute for way in ways), key=list(Recompute).index)
        return self.layout.living(Way(max(way.zero for way in ways), again))

    @property
    def dollars_per_step(self) -> float | None:
        """What a step costs."""
        return None if self.dollars_per_second is None else self.dollars_per_second * self.step_seconds

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "ClusterPlan":
        """The plan saved at ``path``."""
        return codec.load(cls, path)
