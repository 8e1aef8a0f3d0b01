"""Derivation of a module's TensorParallelPlan from a trace, checked numerically on random inputs.

Linear modules are edges between feature spaces (:mod:`osdp.tracing.tensor_parallel.linear_graph`). A space
can be sharded if only linear modules lead out of it: the modules that lead into it become column modules,
those that lead out of it row modules::

    residual stream --[column]--> heads or inner features --[row]--> residual stream

Two neighbouring spaces are never both sharded, so small spaces (attentions and MLPs) are tried before the
residual stream around them. Each candidate is then run on all ranks at once and compared with the whole
module; the smallest set of integer attributes whose division makes the two agree is part of the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from osdp.plan.tensor_parallel import (
    DividedAttribute,
    ReplicatedModule,
    ShardedModule,
    Style,
    TensorParallelPlan,
)
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensor_parallel.linear_graph import FeatureFlow, trace_features
from osdp.tracing.tensor_parallel.regions import Region, RegionSolver, join, join_regions
from osdp.tracing.tensor_parallel.sequence import share_sequence

#: Tokens for each rank that are enough to prove that all together compute what one does.
PROVEN_TOKENS = 16


def derive(
    model: nn.Module,
    sample_inputs: Any,
    degree: int,
    *,
    sequence_parallel: bool = False,
) -> TensorParallelPlan:
    """Derive a tensor-parallel plan of ``model`` over ``degree`` ranks; the model is neither run nor changed.

    Args:
        model: An unmodified module, on any device.
        sample_inputs: One batch, as for :func:`osdp.tracing.trace.describe`; only its shapes are read.
        degree: Number of tensor-parallel ranks.
        sequence_parallel: Whether to use sequence parallelism between the regions, too.

    Raises:
        ValueError: The degree does not divide a number of heads or the sequence, or nothing can be sharded;
            the message gives the reason.
    """
    flow = trace_features(model, SampleBatch.of(sample_inputs))
    search = _Search(model, flow, RegionSolver(model, flow, degree))
    search.shard_vocabulary()
    search.shard_regions()
    if not search.entries:
        reasons = "; ".join(f"{kept.module}: {kept.reason}" for kept in search.kept()[:8])
        raise ValueError(
            f"nothing of {type(model).__name__} can be sharded over {degree} ranks "
            f"({reasons or 'it has no linear modules'}); use data parallelism or pipeline stages for it"
        )
    plan = search.plan()
    return replace(plan, sequence=share_sequence(model, flow, plan)) if sequence_parallel else plan


def with_sizes_of(plan: TensorParallelPlan, model: nn.Module) -> TensorParallelPlan:
    """The plan with the sizes of ``model``, which has the same modules in other widths.

    The reasons why modules are kept whole are copied as they are.

    Args:
        plan: Derived from a model of the same class.
        model: The model.

    Raises:
        KeyError: A sharded module has no weight in ``model``.
        AttributeError: A divided attribute is missing there.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    return replace(
        plan,
        modules=tuple(
            replace(entry, size=weights[f"{entry.module}.weight"].shape[entry.dim]) for entry in plan.modules
        ),
        divided=tuple(
            replace(entry, value=getattr(model.get_submodule(entry.module), entry.name))
            for entry in plan.divided
        ),
    )


@dataclass
class _Search:
    """State of the derivation: the modules decided so far, and why others stay whole."""

    model: nn.Module
    flow: FeatureFlow
    solver: RegionSolver
    entries: dict[str, ShardedModule] = field(default_factory=dict)
    divided: dict[tuple[str, str], DividedAttribute] = field(default_factory=dict)
    summed: dict[str, None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def plan(self) -> TensorParallelPlan:
        order = {name: index for index, name in enumerate(self.flow.kinds)}
        entries = sorted(self.entries.values(), key=lambda e: order.get(e.module, len(order)))
        return TensorParallelPlan(
            model=type(self.model).__name__,
            degree=self.solver.degree,
            modules=tuple(entries),
            divided=tuple(self.divided.values()),
            summed=tuple(self.summed),
            kept=self.kept(),
        )

    def kept(self) -> tuple[ReplicatedModule, ...]:
        default, exposed = "what it reads or returns is not sharded", "its weight is used outside it as well"
        return tuple(
            ReplicatedModule(name, self.reasons.get(name, exposed if name in self.flow.exposed else default))
            for name in self.flow.kinds
            if name not in self.entries
        )

    # Vocabularies

    def shard_vocabulary(self) -> None:
        """Shard language-model heads and the embeddings with the same vocabulary size.

        A head is a linear module whose output is part of the model's output. Embeddings need at least as many
        rows as columns. Without any head, the embeddings that are indexed by integers of the batch are
        sharded.
        """
        solver, kinds = self.solver, self.flow.kinds
        ends = self.flow.returned.difference(*self.flow.read.values())
        tables = {
            name: solver.weight(name).shape[0]
            for name, kind in kinds.items()
            if kind == "embedding"
            and solver.weight(name).shape[0] >= solver.weight(name).shape[1]
            and name not in self.flow.exposed
        }
        heads = {
            name: solver.out_size(name)
            for name, kind in kinds.items()
            if kind != "embedding"
            and name in ends
            and solver.out_size(name) in tables.values()
            and name not in self.flow.exposed
        }
        for name in heads:
            self._enter_vocabulary(name, Style.VOCAB_HEAD, solver.out_dim(name))
        for name, rows in tables.items():
            if rows in heads.values() or (not heads and name in self.flow.batch_readers):
                self._enter_vocabulary(name, Style.VOCAB_EMBEDDING, 0)

    def _enter_vocabulary(self, name: str, style: Style, dim: int) -> None:
        self.entries[name] = ShardedModule(name, style, dim, self.solver.weight(name).shape[dim])

    # Regions

    def shard_regions(self) -> None:
        """Shard every space that can be, smallest first; similar regions that fail are tried jointly."""
        failed: dict[Any, list[Region]] = {}
        for region in self._regions():
            if any(name in self.entries for name in region.modules):
                continue
            fault = self._try(region)
            if fault is not None:
                failed.setdefault(self.solver.shape(region), []).append(region)
                self.reasons.update(dict.fromkeys(region.modules, fault))
        # Some layers pass per-head tensors on to similar layers, such as a position bias (T5): a region is
        # then right only if the others are sharded with it.
        for alike in failed.values():
            free = [r for r in alike if not any(name in self.entries for name in r.modules)]
            if len(free) > 1:
                self._try(join_regions(free))

    def _regions(self) -> Iterator[Region]:
        spaces = self.flow.spaces()
        into: dict[str, list[str]] = {}
        out_of: dict[str, list[str]] = {}
        for name in self.flow.kinds:
            into.setdefault(spaces[name], []).append(name)
            out_of.setdefault(spaces[f">{name}"], []).append(name)
        found = [
            Region(tuple(columns), tuple(out_of.get(space, ())))
            for space, columns in into.items()
            if space != spaces[">"]
        ]
        fit = [region for region in found if self._fits(region)]
        return iter(sorted(fit, key=lambda region: (self._is_bottleneck(region), len(region.modules))))

    def _is_bottleneck(self, region: Region) -> bool:
        """Whether its space is narrower than all around it: low-rank adapters go with what they adapt."""
        solver, kinds = self.solver, self.flow.kinds
        width = solver.in_size(region.rows[0])
        sides = [solver.in_size(name) for name in region.columns if kinds[name] != "embedding"]
        return width < min([*sides, *map(solver.out_size, region.rows)])

    def _fits(self, region: Region) -> bool:
        kinds = self.flow.kinds
        return (
            bool(region.rows)
            and not set(region.columns) & set(region.rows)
            and any(kinds[name] != "embedding" for name in region.columns)
            and all(kinds[name] != "embedding" for name in region.rows)
        )

    def _try(self, region: Region) -> str | None:
        """Shard ``region``; returns the reason if that is not possible, else ``None``."""
        solution = self.solver.solve(region)
        if isinstance(solution, str):
            return solution
        home = self.solver.home(region)
        blocks = dict(zip(region.columns, solution.blocks.values(), strict=True))
        for name in region.columns:
            dim = self.solver.out_dim(name)
            self._enter(name, Style.COLUMN, dim, blocks[name], region)
        for name in region.rows:
            self._enter(name, Style.ROW, 1 - self.solver.out_dim(name), 1, region)
        self.summed.update(dict.fromkeys(join(home, inside) for inside in solution.summed))
        for inside, attribute in solution.divided:
            module = join(home, inside)
            value = getattr(self.model.get_submodule(module), attribute)
            self.divided[module, attribute] = DividedAttribute(module, attribute, value)
        return None

    def _enter(self, name: str, style: Style, dim: int, blocks: int, region: Region) -> None:
        size = self.solver.weight(name).shape[dim]
        self.entries[name] = ShardedModule(name, style, dim, size, blocks, region.columns[0])
