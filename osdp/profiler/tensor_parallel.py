"""From a module to its TensorParallelPlan: derived from a trace, proven on random numbers.

Linear modules are edges between feature spaces (:mod:`osdp.profiler.feature_flow`). A space can be sharded if
it is left by linear modules only: those that lead into it become column modules, those that lead out of it
row modules. Neighbouring spaces are not sharded both, so small spaces, which are attentions and MLPs, come
before the residual stream around them. Each choice is then run on all ranks at once and compared with the
whole module, with as few integer attributes divided as make it right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from osdp.layout import is_inside
from osdp.profiler.batch import SampleBatch
from osdp.profiler.feature_flow import FeatureFlow, KindOf, trace_features
from osdp.profiler.lockstep import Sharded, Slice, Whole
from osdp.profiler.tensors import tensor_spec, tensors_in
from osdp.tensor_plan import DividedAttribute, Kept, ShardedModule, Style, TensorParallelPlan

#: As many attributes are divided together at most.
_MOST_DIVIDED = 4
#: Dimension of the weight that holds the output features.
_OUT_DIM = {"linear": 0, "conv1d": 1, "embedding": 1}


@dataclass(frozen=True, slots=True)
class Region:
    """Spaces that are to be sharded together.

    Attributes:
        columns: Modules that lead into them, in trace order.
        rows: Modules that lead out of them.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """All its modules."""
        return (*self.columns, *self.rows)


@dataclass(frozen=True, slots=True)
class Solution:
    """How a region is sharded.

    Attributes:
        blocks: Number of blocks of each column module.
        divided: Module and name of each attribute to divide.
        summed: Modules that work on each head alike.
    """

    blocks: Mapping[str, int]
    divided: tuple[tuple[str, str], ...]
    summed: tuple[str, ...]


def derive(model: nn.Module, sample_inputs: Any, degree: int, *, kind_of: KindOf) -> TensorParallelPlan:
    """A plan that shards ``model`` over ``degree`` ranks; the model is neither run nor changed.

    Args:
        model: An unmodified module, on any device.
        sample_inputs: One batch, as for :func:`osdp.profiler.trace.describe`; only its shapes are read.
        degree: Number of ranks that compute one layer together.
        kind_of: Tells which modules are linear, and of which kind.

    Raises:
        ValueError: The degree does not divide a number of heads, or there is nothing that can be sharded;
            says why.
    """
    flow = trace_features(model, SampleBatch.of(sample_inputs), kind_of)
    search = _Search(model, flow, degree)
    search.shard_vocabulary()
    search.shard_regions()
    if not search.entries:
        reasons = "; ".join(f"{kept.module}: {kept.reason}" for kept in search.kept()[:8])
        raise ValueError(
            f"nothing of {type(model).__name__} can be sharded over {degree} ranks "
            f"({reasons or 'it has no linear modules'}); use data parallelism or pipeline stages for it"
        )
    return search.plan()


@dataclass
class _Search:
    """What is decided so far."""

    model: nn.Module
    flow: FeatureFlow
    degree: int
    entries: dict[str, ShardedModule] = field(default_factory=dict)
    divided: dict[tuple[str, str], DividedAttribute] = field(default_factory=dict)
    summed: dict[str, None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    _solved: dict[Any, "Solution | str"] = field(default_factory=dict)

    def plan(self) -> TensorParallelPlan:
        order = {name: index for index, name in enumerate(self.flow.kinds)}
        entries = sorted(self.entries.values(), key=lambda e: order.get(e.module, len(order)))
        return TensorParallelPlan(
            model=type(self.model).__name__,
            degree=self.degree,
            modules=tuple(entries),
            divided=tuple(self.divided.values()),
            summed=tuple(self.summed),
            kept=self.kept(),
        )

    def kept(self) -> tuple[Kept, ...]:
        default = "what it reads or returns is not sharded"
        return tuple(
            Kept(name, self.reasons.get(name, default))
            for name in self.flow.kinds
            if name not in self.entries
        )

    # Vocabularies

    def shard_vocabulary(self) -> None:
        """Heads that end in the output, and embeddings of as many rows."""
        read = frozenset().union(*self.flow.read.values())
        tables = {n: self._weight(n).shape[0] for n, kind in self.flow.kinds.items() if kind == "embedding"}
        heads = [
            name
            for name, kind in self.flow.kinds.items()
            if kind != "embedding"
            and name in self.flow.returned - read
            and self._out_size(name) in tables.values()
        ]
        sizes = {self._out_size(name) for name in heads}
        vocabularies = [name for name, rows in tables.items() if rows in sizes]
        if not heads:
            wide = {n for n, rows in tables.items() if rows >= self._weight(n).shape[1]}
            vocabularies = [name for name in tables if name in wide & self.flow.batch_readers]
        for name in heads:
            self._enter_vocabulary(name, Style.VOCAB_HEAD, _OUT_DIM[self.flow.kinds[name]])
        for name in vocabularies:
            self._enter_vocabulary(name, Style.VOCAB_EMBEDDING, 0)

    def _enter_vocabulary(self, name: str, style: Style, dim: int) -> None:
        self.entries[name] = ShardedModule(name, style, dim, self._weight(name).shape[dim])

    # Regions

    def shard_regions(self) -> None:
        """Every space that can be sharded, smallest first; what fails alone is tried with its like."""
        failed: dict[Any, list[Region]] = {}
        for region in self._regions():
            if any(name in self.entries for name in region.modules):
                continue
            fault = self._try(region)
            if fault is not None:
                failed.setdefault(self._shape(region), []).append(region)
                self.reasons.update(dict.fromkeys(region.modules, fault))
        # Layers hand tensors with a value for each head on to their like, such as a position bias.
        for alike in failed.values():
            free = [r for r in alike if not any(name in self.entries for name in r.modules)]
            if len(free) > 1:
                self._try(_joint(free))

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
        return iter(sorted(fit, key=lambda region: len(region.modules)))

    def _fits(self, region: Region) -> bool:
        kinds = self.flow.kinds
        return (
            bool(region.rows)
            and not set(region.columns) & set(region.rows)
            and any(kinds[name] != "embedding" for name in region.columns)
            and all(kinds[name] != "embedding" for name in region.rows)
        )

    def _try(self, region: Region) -> str | None:
        """Shard ``region``; why it cannot be, or ``None``."""
        self._check_heads(region)
        key = self._kind(region)
        if key not in self._solved:
            self._solved[key] = self._solve(region)
        solution = self._solved[key]
        if isinstance(solution, str):
            return solution
        home = self._home(region)
        blocks = dict(zip(region.columns, solution.blocks.values(), strict=True))
        for name in region.columns:
            dim = _OUT_DIM[self.flow.kinds[name]]
            self._enter(name, Style.COLUMN, dim, blocks[name], region)
        for name in region.rows:
            self._enter(name, Style.ROW, 1 - _OUT_DIM[self.flow.kinds[name]], 1, region)
        self.summed.update(dict.fromkeys(_join(home, relative) for relative in solution.summed))
        for relative, attribute in solution.divided:
            module = _join(home, relative)
            value = getattr(self.model.get_submodule(module), attribute)
            self.divided[module, attribute] = DividedAttribute(module, attribute, value)
        return None

    def _enter(self, name: str, style: Style, dim: int, blocks: int, region: Region) -> None:
        size = self._weight(name).shape[dim]
        self.entries[name] = ShardedModule(name, style, dim, size, blocks, region.columns[0])

    def _check_heads(self, region: Region) -> None:
        for name in region.columns:
            heads = self.flow.heads.get(name, 0)
            if heads % self.degree:
                raise ValueError(
                    f"{name} has {heads} heads, which {self.degree} tensor-parallel ranks do not divide; "
                    f"use a degree that divides {heads}"
                )

    def _solve(self, region: Region) -> Solution | str:
        """Blocks and attributes with which ``region`` is right; else why it is not."""
        foreign = self._foreign_parameters(region)
        for parameter in foreign:
            if not self._can_be_summed(parameter, region):
                return (
                    f"parameter {parameter} is used with its features or heads, and is not sharded with them"
                )
        home = self._home(region)
        whole = Whole(self.model.get_submodule(home), home, self.flow.calls[home], self.flow)
        fault = "its features are not divisible by the number of ranks"
        for blocks in self._block_choices(region):
            sizes = [(self._out_size(name), blocks[name]) for name in region.columns]
            sizes += [(self._in_size(name), 1) for name in region.rows]
            odd = [size for size, count in sizes if size % (count * self.degree)]
            if odd:
                fault = f"{odd[0]} features are not divisible by {self.degree} ranks"
                continue
            sharded = Sharded(whole, self._slices(region, blocks), self.degree)
            for divided in self._divisions(region, home):
                found = sharded.fault([(_join(home, module), name) for module, name in divided])
                if found is None:
                    holders = dict.fromkeys(_relative(p.rpartition(".")[0], home) for p in foreign)
                    return Solution(blocks, divided, tuple(holders))
                fault = found if not divided else fault
        return fault

    def _slices(self, region: Region, blocks: Mapping[str, int]) -> dict[str, Slice]:
        kinds = self.flow.kinds
        slices = {name: Slice(_OUT_DIM[kinds[name]], blocks[name]) for name in region.columns}
        return slices | {name: Slice(1 - _OUT_DIM[kinds[name]], closes=True) for name in region.rows}

    def _block_choices(self, region: Region) -> Iterator[dict[str, int]]:
        """One block each; then as many as a row module's inputs fit into a column module's outputs."""
        yield dict.fromkeys(region.columns, 1)
        width = self._in_size(region.rows[0])
        fused = {
            name: self._out_size(name) // width
            for name in region.columns
            if self.flow.kinds[name] != "embedding"
        }
        if any(count > 1 and self._out_size(name) == count * width for name, count in fused.items()):
            yield {
                name: count if (count := fused.get(name, 1)) > 1 and not self._out_size(name) % width else 1
                for name in region.columns
            }

    def _divisions(self, region: Region, home: str) -> Iterator[tuple[tuple[str, str], ...]]:
        """Sets of attributes, the smallest first; those of one class and name go together."""
        groups: dict[tuple[type, str], dict[str, int]] = {}
        for fqn in self._holders(region, home):
            module = self.model.get_submodule(fqn)
            for name, value in vars(module).items():
                if type(value) is int and value >= self.degree:
                    groups.setdefault((type(module), name), {})[fqn] = value
        candidates = [
            tuple((_relative(fqn, home), name) for fqn in values)
            for (_, name), values in groups.items()
            if len(set(values.values())) == 1 and not next(iter(values.values())) % self.degree
        ]
        for count in range(min(_MOST_DIVIDED, len(candidates)) + 1):
            for chosen in combinations(candidates, count):
                yield tuple(item for group in chosen for item in group)

    def _holders(self, region: Region, home: str) -> list[str]:
        """The modules from ``home`` down to those of ``region``, without these themselves."""
        found: dict[str, None] = {}
        for name in region.modules:
            parts = name.split(".")
            for length in range(len(parts)):
                ancestor = ".".join(parts[:length])
                if is_inside(ancestor, home):
                    found[ancestor] = None
        return list(found)

    def _foreign_parameters(self, region: Region) -> list[str]:
        """Parameters of other modules that reach the row modules without passing through a column module."""
        labels = {label for name in region.rows for label in self.flow.read[name]}
        return sorted(label[1:] for label in self.flow.parameters_in(frozenset(labels)))

    def _can_be_summed(self, parameter: str, region: Region) -> bool:
        """Whether it is used by its own module alone, inside the region alone, as a norm of each head is."""
        holder = parameter.rpartition(".")[0]
        return (
            is_inside(holder, self._home(region))
            and not any(True for _ in self.model.get_submodule(holder).children())
            and parameter not in self.flow.borrowed
            and self.flow.readers_of(f"@{parameter}") <= set(region.rows)
        )

    def _home(self, region: Region) -> str:
        """The innermost module whose forward ran and that holds all of ``region``."""
        around = [fqn for fqn in self.flow.calls if all(is_inside(name, fqn) for name in region.modules)]
        return max(around, key=len)

    def _kind(self, region: Region) -> Any:
        """Equal for regions that have the same solution."""
        call = self.flow.calls[self._home(region)]
        specs = tuple(tensor_spec(tensor) for tensor in tensors_in((call.args, call.kwargs)))
        return self._shape(region), specs

    def _shape(self, region: Region) -> Any:
        """Equal for regions of the same modules in modules of the same class."""
        home = self._home(region)
        shapes = tuple((_relative(name, home), tuple(self._weight(name).shape)) for name in region.modules)
        return type(self.model.get_submodule(home)), shapes, len(region.columns)

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def _out_size(self, name: str) -> int:
        return self._weight(name).shape[_OUT_DIM[self.flow.kinds[name]]]

    def _in_size(self, name: str) -> int:
        return self._weight(name).shape[1 - _OUT_DIM[self.flow.kinds[name]]]


def _joint(regions: Sequence[Region]) -> Region:
    return Region(
        tuple(name for region in regions for name in region.columns),
        tuple(name for region in regions for name in region.rows),
    )


def _relative(fqn: str, ancestor: str) -> str:
    return fqn[len(ancestor) :].removeprefix(".")


def _join(ancestor: str, relative: str) -> str:
    return f"{ancestor}.{relative}".strip(".")
