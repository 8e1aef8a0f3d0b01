"""TensorParallelPlan: which modules split their weights over ranks that compute one layer together.

Words: a *column* module has its output features sharded, a *row* module its input features, so that a column
module, whatever works on each feature or head by itself, and a row module need one sum at the end (Shoeybi et
al., "Megatron-LM", arXiv:1909.08053, section 3). A *region* is the column modules and the row modules that
such a sum closes together. The sharded dimension may be made of several *blocks* (the query, key and value of
one fused matrix), each of which is sharded by itself.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

VERSION = 1


class Style(StrEnum):
    """How a module is sharded.

    - ``COLUMN``: its output features; those of an embedding are its columns.
    - ``ROW``: its input features; outputs are summed over the ranks, then the bias is added once.
    - ``VOCAB_EMBEDDING``: the rows of an embedding; outputs are summed.
    - ``VOCAB_HEAD``: the output features of a head over the vocabulary; logits are gathered.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB_EMBEDDING = "vocab_embedding"
    VOCAB_HEAD = "vocab_head"


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A linear module or embedding whose weight is sharded.

    Attributes:
        module: Its FQN.
        style: How.
        dim: Dimension of the weight that is sharded.
        size: Size of that dimension.
        blocks: Number of blocks it is made of.
        region: FQN of the first module of its region; empty for vocabularies.
    """

    module: str
    style: Style
    dim: int
    size: int
    blocks: int = 1
    region: str = ""


@dataclass(frozen=True, slots=True)
class DividedAttribute:
    """An integer that a module keeps and that is divided by the number of ranks, such as a number of heads.

    Attributes:
        module: FQN of the module.
        name: Name of the attribute.
        value: Its value in the whole model.
    """

    module: str
    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A linear module that every rank keeps whole.

    Attributes:
        module: Its FQN.
        reason: Why it is not sharded.
    """

    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceGather:
    """A module before whose forward shards of the sequence are gathered.

    Attributes:
        module: Its FQN.
        leaves: Places of the tensors among the leaves of its arguments.
    """

    module: str
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Blocks between whose regions each rank computes a part of the sequence.

    What a run of blocks is given is cut along its last dimension but one, what it returns is gathered. So
    what stages of a pipeline send is whole. Inside, regions gather what they read and reduce-scatter what
    they return (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv:2205.05198), and norms, dropout and residuals between them see a part of the sequence.

    Attributes:
        runs: FQNs of blocks, in order, by run.
        gathers: Where regions begin.
        summed: Modules whose parameters are whole but see a part of the sequence: gradients are summed.
    """

    runs: tuple[tuple[str, ...], ...]
    gathers: tuple[SequenceGather, ...]
    summed: tuple[str, ...]

    def holds(self, module: str) -> bool:
        """Whether ``module`` is one of the blocks or lies inside one."""
        return any(module == block or module.startswith(f"{block}.") for run in self.runs for block in run)

    def restricted(self, modules: Collection[str]) -> "SequenceParallel | None":
        """The part for a stage that has only ``modules``; ``None`` if nothing is left."""
        kept = [tuple(block for block in run if block in modules) for run in self.runs]
        runs = tuple(run for run in kept if run)
        return (
            replace(
                self,
                runs=runs,
                gathers=tuple(gather for gather in self.gathers if gather.module in modules),
                summed=tuple(module for module in self.summed if module in modules),
            )
            if runs
            else None
        )


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """How a model is sharded over ``degree`` ranks; what is not named stays whole on each.

    Attributes:
        model: Name of the model.
        degree: Number of ranks.
        modules: The sharded modules, in trace order.
        divided: Attributes that local modules must see divided.
        summed: Modules whose parameters are whole but work on each rank's heads, such as a norm of each head:
            their gradients are summed.
        kept: Linear modules that stay whole, and why.
        sequence: Where ranks share the sequence as well; ``None``: nowhere.
        version: Format version.
    """

    model: str
    degree: int
    modules: tuple[ShardedModule, ...]
    divided: tuple[DividedAttribute, ...] = ()
    summed: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    sequence: SequenceParallel | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.degree < 2:
            raise ValueError(f"tensor parallelism needs at least 2 ranks, got {self.degree}")
        for entry in self.modules:
            by_vocabulary = entry.style in (Style.VOCAB_EMBEDDING, Style.VOCAB_HEAD)
            if not by_vocabulary and entry.size % (entry.blocks * self.degree):
                raise ValueError(
                    f"module {entry.module!r}: {entry.size} features in {entry.blocks} blocks are not "
                    f"divisible by {self.degree} ranks; use a degree that divides them"
                )
            if by_vocabulary and -(-entry.size // self.degree) * (self.degree - 1) >= entry.size:
                raise ValueError(
                    f"module {entry.module!r}: {entry.size} rows leave some of {self.degree} ranks without "
                    "any; use a lower degree"
                )

    def restricted(self, modules: Collection[str]) -> "TensorParallelPlan":
        """The part of the plan for a stage that has only ``modules`` of the model.

        Args:
            modules: FQNs of all modules of the stage, as ``named_modules()`` gives them.
        """
        present = frozenset(modules)
        return replace(
            self,
            modules=tuple(entry for entry in self.modules if entry.module in present),
            divided=tuple(entry for entry in self.divided if entry.module in present),
            summed=tuple(module for module in self.summed if module in present),
            kept=tuple(entry for entry in self.kept if entry.module in present),
            sequence=self.sequence.restricted(present) if self.sequence is not None else None,
        )
