"""Derivation of sequence parallelism from a trace, checked numerically on a random sequence.

A region is a group of modules that are sharded together: column modules, then row modules. If a block treats
each position separately outside its regions, each rank can compute that code for its own part of the
sequence. The sequence is the second-to-last dimension of a block's first input tensor and of its first output
tensor. A region begins at the innermost module that contains all its column modules; if that module is the
block itself, it begins at each column module. At the beginning of a region the sequence is gathered: of all
tensors that were computed from parameters and have the shape of the block's input. As a check, all ranks of a
block are run in one process on parts of a random sequence and compared with a run on the whole sequence.

Gradients need no such check: each collective has its adjoint in backward, so only the gradients of parameters
that every rank holds whole differ between ranks, and their sum is the gradient.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from osdp.model.fqn import is_inside
from osdp.nn.modules import keeps_dtype
from osdp.plan.tensor_parallel import (
    SequenceGather,
    SequenceParallel,
    ShardedModule,
    Style,
    TensorParallelPlan,
)
from osdp.tracing.tensor_parallel.equivalence import ReferenceRun, ShardedRun, Slice
from osdp.tracing.tensor_parallel.linear_graph import Call, FeatureFlow
from osdp.tracing.tensors import tensor_spec, tensors_in


def share_sequence(model: nn.Module, flow: FeatureFlow, plan: TensorParallelPlan) -> SequenceParallel:
    """Derive the sequence parallelism of ``model`` between the regions of ``plan``.

    Args:
        model: The model.
        flow: Its feature flow.
        plan: Its tensor-parallel plan.

    Raises:
        ValueError: The model does not allow it; the message gives the reasons.
    """
    search = _Search(model, flow, plan)
    reasons: dict[str, None] = {}
    for run in _find_runs(model, plan):
        fault = search.add(run)
        if fault is not None:
            reasons[fault] = None
    if reasons or not search.runs:
        why = "; ".join(reasons) or "it has no list of blocks with sharded regions"
        raise ValueError(
            f"sequence_parallel is not possible for {type(model).__name__}: {why}; plan without it"
        )
    return SequenceParallel(tuple(search.runs), tuple(search.gathers), tuple(search.summed))


def _find_runs(model: nn.Module, plan: TensorParallelPlan) -> list[tuple[str, ...]]:
    """The blocks of each outermost ``nn.ModuleList`` that contains sharded regions."""
    runs: list[tuple[str, ...]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(
            is_inside(name, block) for run in runs for block in run
        ):
            blocks = tuple(f"{name}.{key}".lstrip(".") for key, _ in module.named_children())
            rows = [entry.module for entry in plan.modules if entry.style is Style.ROW]
            if any(is_inside(row, block) for row in rows for block in blocks):
                runs.append(blocks)
    return runs


@dataclass
class _Search:
    """State of the derivation: the runs, gathers and summed modules found so far."""

    model: nn.Module
    flow: FeatureFlow
    plan: TensorParallelPlan
    runs: list[tuple[str, ...]] = field(default_factory=list)
    gathers: list[SequenceGather] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    _proven: dict[Any, str | None] = field(default_factory=dict)

    def add(self, run: tuple[str, ...]) -> str | None:
        """Add ``run`` to the result, or return the reason why its blocks cannot use sequence parallelism."""
        missing = [block for block in run if block not in self.flow.calls]
        if missing:
            return f"the forward of {missing[0]} does not run"
        for one, other in pairwise(run):
            if _first(self.flow.calls[one].output) is not _first(_arguments(self.flow.calls[other])):
                return f"the input of {other} is not the output of {one}"
        found = [self._block(block) for block in run]
        for block in found:
            if isinstance(block, str):
                return block
        self.runs.append(run)
        for gathers, summed in (block for block in found if not isinstance(block, str)):
            self.gathers += gathers
            self.summed += summed
        return None

    def _block(self, block: str) -> tuple[list[SequenceGather], list[str]] | str:
        """The gathers and summed modules of ``block``; the reason if there are none."""
        call = self.flow.calls[block]
        # 1. The hidden states must be a tensor (..., sequence, features) that the ranks divide evenly.
        hidden = _first(_arguments(call))
        if hidden is None or hidden.dim() < 3 or not hidden.is_floating_point():
            return f"the first input of {block} is not a floating-point tensor (batch, sequence, features)"
        if hidden.shape[-2] % self.plan.degree:
            return (
                f"a sequence of {hidden.shape[-2]} cannot be shared evenly by {self.plan.degree} "
                "tensor-parallel ranks"
            )
        if any(call.computed[1:]):
            return f"{block} has more than one input that was computed from parameters"
        # What only training does, the numerical check does not see.
        inside = self.model.get_submodule(block).named_modules(prefix=block)
        norm = next((name for name, module in inside if keeps_dtype(module)), None)
        if norm is not None:
            return f"{norm} takes statistics over all tokens, of which each rank would have a part"
        draws = (labels for at, name, labels in self.flow.draws if not name and call.start < at <= call.end)
        if not all(draws):
            return f"{block} draws random numbers for whole samples, of which ranks would draw different ones"
        # 2. Regions must not reach beyond the block.
        entries = [entry for entry in self.plan.modules if is_inside(entry.module, block)]
        regions = {entry.region for entry in entries}
        beyond = [e.module for e in self.plan.modules if e.region in regions and e not in entries]
        if beyond:
            return f"a region of {block} reaches to {beyond[0]}"
        # 3. Where regions gather, and whose gradients are summed.
        gathers = list(self._find_gathers(block, entries, hidden))
        summed = self._find_summed(block, entries)
        if isinstance(summed, str):
            return summed
        # 4. The numerical check, once for all blocks that are alike.
        key = self._kind(block, entries, gathers)
        if key not in self._proven:
            self._proven[key] = self._prove(block, entries, gathers)
        fault = self._proven[key]
        return f"{block}: {fault}" if fault is not None else (gathers, summed)

    def _find_gathers(
        self, block: str, entries: list[ShardedModule], hidden: torch.Tensor
    ) -> Iterator[SequenceGather]:
        """The module at which each region begins, and those of its arguments that are gathered."""
        columns: dict[str, list[str]] = {}
        for entry in entries:
            if entry.style is Style.COLUMN and self.flow.kinds[entry.module] != "embedding":
                columns.setdefault(entry.region, []).append(entry.module)
        for names in columns.values():
            around = _innermost(names)
            if around == block:
                yield from (SequenceGather(name, (0,)) for name in names)
            elif len(names) == 1:
                yield SequenceGather(around, (0,))
            else:
                yield SequenceGather(around, _positions_of(self.flow.calls[around], hidden))

    def _find_summed(self, block: str, entries: list[ShardedModule]) -> list[str] | str:
        """Modules of ``block`` with whole parameters; the reason if their gradients cannot be summed."""
        found = []
        sharded = {entry.module for entry in entries}
        for name, module in self.model.get_submodule(block).named_modules(prefix=block):
            own = [key for key, _ in module.named_parameters(recurse=False)]
            if not own or name in sharded or name in self.plan.summed:
                continue
            borrowed = [key for key in own if f"{name}.{key}" in self.flow.borrowed]
            if borrowed or any(True for _ in module.children()):
                return f"parameter {name}.{(borrowed or own)[0]} is not used by one leaf module alone"
            found.append(name)
        return found

    def _prove(self, block: str, entries: list[ShardedModule], gathers: list[SequenceGather]) -> str | None:
        try:
            whole = ReferenceRun(self.model.get_submodule(block), block, self.flow.calls[block], self.flow)
        except Exception as error:
            return f"on random numbers: {type(error).__name__}: {error}"
        slices = {
            entry.module: Slice(entry.dim, entry.blocks, closes=entry.style is Style.ROW) for entry in entries
        }
        places = {gather.module: gather.leaves for gather in gathers}
        ranks = ShardedRun(whole, slices, self.plan.degree, places)
        divided = [(d.module, d.name) for d in self.plan.divided if is_inside(d.module, block)]
        return ranks.fault(divided)

    def _kind(self, block: str, entries: list[ShardedModule], gathers: list[SequenceGather]) -> Any:
        """Key that is equal for blocks for which the numerical check gives the same result."""
        call = self.flow.calls[block]
        inside = tuple((e.module[len(block) :], e.dim, e.size, e.blocks, e.style) for e in entries)
        places = tuple((gather.module[len(block) :], gather.leaves) for gather in gathers)
        specs = tuple(tensor_spec(tensor) for tensor in tensors_in(_arguments(call)))
        return type(self.model.get_submodule(block)), inside, places, specs, self.flow.operations_of(call)


def _arguments(call: Call) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return call.args, call.kwargs


def _first(tree: Any) -> torch.Tensor | None:
    return next(iter(tensors_in(tree)), None)


def _innermost(names: list[str]) -> str:
    """The innermost module that is, or contains, all of ``names``."""
    found = names[0]
    while not all(is_inside(name, found) for name in names):
        found = found.rpartition(".")[0]
    return found


def _positions_of(call: Call, hidden: torch.Tensor) -> tuple[int, ...]:
    """Leaf indices, in a call's arguments, of the computed tensors with the shape of ``hidden``."""
    leaves = enumerate(tree_leaves(_arguments(call)))
    tensors = [(index, leaf) for index, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(
        index
        for (index, tensor), is_computed in zip(tensors, call.computed, strict=True)
        if is_computed and tensor.shape == hidden.shape
    )
