"""TensorParallelPlan: the modules whose weights are sharded over the tensor-parallel ranks.

Glossary: a *column* module has its output features sharded, a *row* module its input features, so that a
column module, any operations on each feature or head by itself, and a row module need a single all-reduce at
the end (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3). A *region* consists of the column
modules and the row modules that such an all-reduce closes. The sharded dimension may consist of several
*blocks* (the query, key and value of one fused matrix), each of which is sharded by itself.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

VERSION = 1


class Style(StrEnum):
    """The dimension of a module's weight that is sharded over the tensor-parallel ranks.

    - ``COLUMN``: its output features; those of an embedding are its columns.
    - ``ROW``: its input features; outputs are summed over the ranks, then the bias is added once.
    - ``VOCAB_EMBEDDING``: the rows of an embedding; outputs are summed over the ranks.
    - ``VOCAB_HEAD``: the output features of a language-model head; logits are gathered.
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
        style: Its parallel style.
        dim: Dimension of the weight that is sharded.
        size: Size of that dimension in the whole model.
        blocks: Number of blocks that dimension consists of.
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
    """An integer attribute of a module that is divided by the number of ranks, such as a number of heads.

    Attributes:
        module: FQN of the module.
        name: Name of the attribute.
        value: Its value in the whole model.
    """

    module: str
    name: str
    value: int


@dataclass(frozen=True, slots=True)
class ReplicatedModule:
    """A linear module that every rank keeps whole.

    Attributes:
        module: Its FQN.
        reason: Why it is not sharded.
    """

    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceGather:
    """A module before whose forward the shards of the sequence are gathered.

    Attributes:
        module: Its FQN.
        leaves: Indices of the gathered tensors among the pytree leaves of its arguments.
    """

    module: str
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Sequence parallelism: between the regions of these blocks each rank computes a part of the sequence.

    The input of a run of blocks is cut along its second-to-last dimension, its output is gathered, so
    pipeline stages send whole tensors. Inside a run, regions all-gather their input and reduce-scatter their
    output (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv:2205.05198), and norms, dropout and residuals between them see a part of the sequence::

        cut | norm  all-gather [region] reduce-scatter  residual | ... next block ... | all-gather
            |<-- 1/tp of the tokens -->|<-- all tokens -->|<-- 1/tp -->

    Attributes:
        runs: FQNs of the blocks of each run, in order.
        gathers: The modules at which regions begin.
        summed: Modules with unsharded parameters that see a part of the sequence: their gradients are summed
            over the ranks.
    """

    runs: tuple[tuple[str, ...], ...]
    gathers: tuple[SequenceGather, ...]
    summed: tuple[str, ...]

    def holds(self, module: str) -> bool:
        """Whether ``module`` is one of the blocks or inside one."""
        return any(module == block or module.startswith(f"{block}.") for run in self.runs for block in run)

    def restricted(self, modules: Collection[str]) -> "SequenceParallel | None":
        """The part of it for a pipeline stage that has only ``modules``; ``None`` if nothing is left."""
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
    """Sharding of a model over ``degree`` tensor-parallel ranks; modules not named are replicated on each.

    Attributes:
        model: Name of the model.
        degree: Number of tensor-parallel ranks.
        modules: The sharded modules, in trace order.
        divided: Integer attributes that are divided by ``degree`` on each rank.
        summed: Modules with unsharded parameters that work on the heads of each rank, such as a norm of each
            head: their gradients are summed over the ranks.
        kept: Linear modules that stay whole, with the reason.
        sequence: Sequence parallelism between the regions; ``None`` without.
        version: Format version.
    """

    model: str
    degree: int
    modules: tuple[ShardedModule, ...]
    divided: tuple[DividedAttribute, ...] = ()
    summed: tuple[str, ...] = ()
    kept: tuple[ReplicatedModule, ...] = ()
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
                    f"module {entry.module!r}: its {entry.size} rows leave some of the {self.degree} ranks "
                    "without any; use a lower degree"
                )

    def restricted(self, modules: Collection[str]) -> "TensorParallelPlan":
        """The part of the plan for a pipeline stage that has only ``modules`` of the model.

        Args:
            modules: FQNs of all modules of the stage, as returned by ``named_modules()``.
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
