"""Regions: linear modules that are sharded together, and the proof that they may be.

A region is run on all ranks at once (:mod:`osdp.profiler.lockstep`) and compared with the whole, with as few
integer attributes divided as make it right. What that comparison cannot see are gradients: a parameter that
reaches the region's end without passing through a column module has a part of its gradient on each rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from osdp.layout import is_inside
from osdp.profiler.feature_flow import FeatureFlow
from osdp.profiler.lockstep import Sharded, Slice, Whole
from osdp.profiler.tensors import tensor_spec, tensors_in

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


def joint(regions: Sequence[Region]) -> Region:
    """One region of several."""
    return Region(
        tuple(name for region in regions for name in region.columns),
        tuple(name for region in regions for name in region.rows),
    )


@dataclass
class Solver:
    """Finds out how regions of a model are sharded.

    Attributes:
        model: The model.
        flow: What its forward showed.
        degree: Number of ranks.
    """

    model: nn.Module
    flow: FeatureFlow
    degree: int
    _solved: dict[Any, Solution | str] = field(default_factory=dict)

    def solve(self, region: Region) -> Solution | str:
        """Blocks and attributes with which ``region`` is right; else why it is not.

        Raises:
            ValueError: The degree does not divide a number of heads.
        """
        for name in region.columns:
            heads = self.flow.heads.get(name, 0)
            if heads % self.degree:
                raise ValueError(
                    f"{name} has {heads} heads, which {self.degree} tensor-parallel ranks do not divide; "
                    f"use a degree that divides {heads}"
                )
        key = self._kind(region)
        if key not in self._solved:
            self._solved[key] = self._prove(region)
        return self._solved[key]

    def _prove(self, region: Region) -> Solution | str:
        foreign = self._foreign_parameters(region)
        for parameter in foreign:
            if not self._can_be_summed(parameter, region):
                return (
                    f"parameter {parameter} is used with its features or heads, and is not sharded with them"
                )
        home = self.home(region)
        whole = Whole(self.model.get_submodule(home), home, self.flow.calls[home], self.flow)
        fault = ""
        for blocks in self._block_choices(region):
            odd = self._indivisible(region, blocks)
            if odd is not None:
                fault = f"{odd} features are not divisible by {self.degree} ranks"
                continue
            sharded = Sharded(whole, self._slices(region, blocks), self.degree)
            for divided in self._divisions(region, home):
                found = sharded.fault([(join(home, module), name) for module, name in divided])
                if found is None:
                    holders = dict.fromkeys(relative(p.rpartition(".")[0], home) for p in foreign)
                    return Solution(blocks, divided, tuple(holders))
                fault = found if not divided else fault
        return fault

    def _indivisible(self, region: Region, blocks: Mapping[str, int]) -> int | None:
        sizes = [(self.out_size(name), blocks[name]) for name in region.columns]
        sizes += [(self.in_size(name), 1) for name in region.rows]
        return next((size for size, count in sizes if size % (count * self.degree)), None)

    def _slices(self, region: Region, blocks: Mapping[str, int]) -> dict[str, Slice]:
        slices = {name: Slice(self.out_dim(name), blocks[name]) for name in region.columns}
        return slices | {name: Slice(1 - self.out_dim(name), closes=True) for name in region.rows}

    def _block_choices(self, region: Region) -> Iterator[dict[str, int]]:
        """One block each; then as many as a row module's inputs fit into a column module's outputs."""
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
        """Sets of attributes, the smallest first; those of one class and name go together."""
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
            is_inside(holder, self.home(region))
            and not any(True for _ in self.model.get_submodule(holder).children())
            and parameter not in self.flow.borrowed
            and self.flow.readers_of(f"@{parameter}") <= set(region.rows)
        )

    def home(self, region: Region) -> str:
        """The innermost module whose forward ran and that holds all of ``region``."""
        around = [fqn for fqn in self.flow.calls if all(is_inside(name, fqn) for name in region.modules)]
        return max(around, key=len)

    def _kind(self, region: Region) -> Any:
        """Equal for regions that have the same solution."""
        call = self.flow.calls[self.home(region)]
        specs = tuple(tensor_spec(tensor) for tensor in tensors_in((call.args, call.kwargs)))
        return self.shape(region), specs

    def shape(self, region: Region) -> Any:
        """Equal for regions of the same modules in modules of the same class."""
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
    """``fqn`` as seen from ``ancestor``, which it lies in."""
    return fqn[len(ancestor) :].removeprefix(".")


def join(ancestor: str, inside: str) -> str:
    """The FQN of ``inside``, as seen from ``ancestor``."""
    return f"{ancestor}.{inside}".strip(".")
