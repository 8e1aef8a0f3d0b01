"""Regions: linear modules that are sharded together, and the numerical check that they can be.

A region is run on all ranks at once (:mod:`osdp.tracing.tensor_parallel.equivalence`) and compared with the
whole module, with the smallest set of integer attributes whose division makes the two agree. That comparison
does not see gradients: of a parameter that reaches the row modules without passing through a column module,
each rank computes only a part of the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from osdp.model.fqn import is_inside
from osdp.tracing.tensor_parallel.equivalence import ReferenceRun, ShardedRun, Slice
from osdp.tracing.tensor_parallel.linear_graph import FeatureFlow
from osdp.tracing.tensors import tensor_spec, tensors_in

#: Maximum number of attributes (of one class and name) that are divided together.
_MOST_DIVIDED = 4
#: Dimension of the weight that holds the output features.
_OUT_DIM = {"linear": 0, "conv1d": 1, "embedding": 1}


@dataclass(frozen=True, slots=True)
class Region:
    """Linear modules around feature spaces that are to be sharded together.

    Attributes:
        columns: Modules that lead into the spaces, in trace order.
        rows: Modules that lead out of them.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """All its modules, the column modules first."""
        return (*self.columns, *self.rows)


@dataclass(frozen=True, slots=True)
class Solution:
    """A sharding of a region that was checked numerically.

    Attributes:
        blocks: Number of blocks of each column module's output features.
        divided: (module, attribute name) of each integer attribute to divide, relative to the region's home.
        summed: Modules with whole parameters whose gradients are summed, such as a norm of each head,
            relative to the region's home.
    """

    blocks: Mapping[str, int]
    divided: tuple[tuple[str, str], ...]
    summed: tuple[str, ...]


def join_regions(regions: Sequence[Region]) -> Region:
    """The union of several regions."""
    return Region(
        tuple(name for region in regions for name in region.columns),
        tuple(name for region in regions for name in region.rows),
    )


@dataclass
class RegionSolver:
    """Finds a correct sharding of regions of a model.

    Attributes:
        model: The model.
        flow: Its feature flow.
        degree: Number of tensor-parallel ranks.
    """

    model: nn.Module
    flow: FeatureFlow
    degree: int
    _solved: dict[Any, Solution | str] = field(default_factory=dict)

    def solve(self, region: Region) -> Solution | str:
        """A correct sharding of ``region``; the reason if there is none.

        Raises:
            ValueError: The degree does not divide a number of heads.
        """
        for name in region.columns:
            heads = self.flow.heads.get(name, 0)
            if heads % self.degree:
                raise ValueError(
                    f"{name} has {heads} heads, which {self.degree} tensor-parallel ranks cannot share "
                    f"evenly; use a degree that divides {heads}"
                )
        exposed = next((name for name in region.modules if name in self.flow.exposed), None)
        if exposed is not None:
            return f"the weight of {exposed} is used outside it as well"
        if self._draws_for_all(region):
            return "random numbers, such as dropout, are drawn inside for what all ranks have whole"
        key = self._kind(region)
        if key not in self._solved:
            self._solved[key] = self._prove(region)
        return self._solved[key]

    def _prove(self, region: Region) -> Solution | str:
        # 1. Gradients, which the numerical comparison does not see.
        foreign = self._foreign_parameters(region)
        for parameter in foreign:
            if not self._can_be_summed(parameter, region):
                return (
                    f"parameter {parameter} is used with its features or heads, but cannot be sharded with "
                    "them"
                )
        # 2. Block counts and divided attributes, the fewest first, until all ranks agree with the whole.
        home = self.home(region)
        try:
            whole = ReferenceRun(self.model.get_submodule(home), home, self.flow.calls[home], self.flow)
        except Exception as error:
            return f"on random numbers: {type(error).__name__}: {error}"
        fault = ""
        for blocks in self._block_choices(region):
            odd = self._indivisible(region, blocks)
            if odd is not None:
                fault = f"{odd} features are not divisible by {self.degree} ranks"
                continue
            sharded = ShardedRun(whole, self._slices(region, blocks), self.degree)
            for divided in self._divisions(region, home):
                found = sharded.fault([(join(home, module), name) for module, name in divided])
                if found is None:
                    holders = dict.fromkeys(relative(p.rpartition(".")[0], home) for p in foreign)
                    return Solution(blocks, divided, tuple(holders))
                # The fault without divided attributes says most: with them, anything may go wrong.
                fault = found if not divided else fault
        return fault

    def _indivisible(self, region: Region, blocks: Mapping[str, int]) -> int | None:
        """A number of features that the blocks and ranks do not divide; ``None`` if there is none."""
        sizes = [(self.out_size(name), blocks[name]) for name in region.columns]
        sizes += [(self.in_size(name), 1) for name in region.rows]
        return next((size for size, count in sizes if size % (count * self.degree)), None)

    def _slices(self, region: Region, blocks: Mapping[str, int]) -> dict[str, Slice]:
        slices = {name: Slice(self.out_dim(name), blocks[name]) for name in region.columns}
        return slices | {name: Slice(1 - self.out_dim(name), closes=True) for name in region.rows}

    def _block_choices(self, region: Region) -> Iterator[dict[str, int]]:
        """Candidate block counts of the column modules.

        First one block each; then, for fused matrices such as query, key and value in one, the number of
        times that the input features of a row module fit into their output features.
        """
        yield dict.fromkeys(region.columns, 1)
        width = self.in_size(region.rows[0])
        fused = {
            name: self.out_size(name) // width
            for name in region.columns
            if self.flow.kinds[name] != "embedding"
        }
        if any(count > 1 and self.out_size(name) == count * width for name, count in fused.items()):
            yield {
                name: count if (count := fused.get(name, 1)) > 1 and not self.out_size(name) % width else 1
                for name in region.columns
            }

    def _divisions(self, region: Region, home: str) -> Iterator[tuple[tuple[str, str], ...]]:
        """Candidate sets of integer attributes to divide, smallest first.

        Attributes with the same class and name are divided together; they must have the same value, which the
        degree divides.
        """
        groups: dict[tuple[type, str], dict[str, int]] = {}
        for fqn in self._holders(region, home):
            module = self.model.get_submodule(fqn)
            for name, value in vars(module).items():
                if type(value) is int and value >= self.degree:
                    groups.setdefault((type(module), name), {})[fqn] = value
        candidates = [
            tuple((relative(fqn, home), name) for fqn in values)
            for (_, name), values in groups.items()
            if len(set(values.values())) == 1 and not next(iter(values.values())) % self.degree
        ]
        for count in range(min(_MOST_DIVIDED, len(candidates)) + 1):
            for chosen in combinations(candidates, count):
                yield tuple(item for group in chosen for item in group)

    def _holders(self, region: Region, home: str) -> list[str]:
        """The modules from ``home`` down to the modules of ``region``, the latter excluded."""
        found: dict[str, None] = {}
        for name in region.modules:
            parts = name.split(".")
            for length in range(len(parts)):
                ancestor = ".".join(parts[:length])
                if is_inside(ancestor, home):
                    found[ancestor] = None
        return list(found)

    def _draws_for_all(self, region: Region) -> bool:
        """Whether a random number that is to be the same on all ranks is drawn inside ``region``.

        There each rank draws numbers of its own, as for its own features.
        """
        inside, columns = False, set(region.columns)
        for _, name, labels in self.flow.draws:
            if name:
                inside = name in columns or (inside and name not in region.rows)
            elif inside and not labels & columns:
                return True
        return False

    def _foreign_parameters(self, region: Region) -> list[str]:
        """Parameters outside linear modules that reach a row module without passing a column module."""
        labels = {label for name in region.rows for label in self.flow.read[name]}
        return sorted(label[1:] for label in self.flow.parameters_in(frozenset(labels)))

    def _can_be_summed(self, parameter: str, region: Region) -> bool:
        """Whether the gradient of ``parameter`` is the sum over the ranks.

        It is if only its own leaf module uses it, and only inside the region, like a norm of each head.
        """
        holder = parameter.rpartition(".")[0]
        return (
            is_inside(holder, self.home(region))
            and not any(True for _ in self.model.get_submodule(holder).children())
            and parameter not in self.flow.borrowed
            and self.flow.readers_of(f"@{parameter}") <= set(region.rows)
        )

    def home(self, region: Region) -> str:
        """The innermost module whose forward ran and that contains all modules of ``region``."""
        around = [fqn for fqn in self.flow.calls if all(is_inside(name, fqn) for name in region.modules)]
        return max(around, key=len)

    def _kind(self, region: Region) -> Any:
        """Key that is equal for regions with the same solution."""
        call = self.flow.calls[self.home(region)]
        specs = tuple(tensor_spec(tensor) for tensor in tensors_in((call.args, call.kwargs)))
        home = self.home(region)
        foreign = tuple(relative(parameter, home) for parameter in self._foreign_parameters(region))
        return self.shape(region), specs, foreign, self.flow.operations_of(call)

    def shape(self, region: Region) -> Any:
        """Key that is equal for regions of the same modules inside modules of the same class."""
        home = self.home(region)
        shapes = tuple((relative(name, home), tuple(self.weight(name).shape)) for name in region.modules)
        return type(self.model.get_submodule(home)), shapes, len(region.columns)

    def weight(self, name: str) -> torch.Tensor:
        """The weight of a linear module or embedding."""
        weight = self.model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def out_dim(self, name: str) -> int:
        """Dimension of the weight of module ``name`` that holds its output features."""
        return _OUT_DIM[self.flow.kinds[name]]

    def out_size(self, name: str) -> int:
        """Number of output features of module ``name``."""
        return self.weight(name).shape[self.out_dim(name)]

    def in_size(self, name: str) -> int:
        """Number of input features of module ``name``."""
        return self.weight(name).shape[1 - self.out_dim(name)]


def relative(fqn: str, ancestor: str) -> str:
    """``fqn`` relative to ``ancestor``, which contains it."""
    return fqn[len(ancestor) :].removeprefix(".")


def join(ancestor: str, inside: str) -> str:
    """The FQN of ``inside``, which is relative to ``ancestor``."""
    return f"{ancestor}.{inside}".strip(".")
