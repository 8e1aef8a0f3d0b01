"""Tensor-parallel linear modules and embeddings: each rank computes its part.

They keep the parameters, names, hooks and types of the modules they replace. Weights are DTensors on the
tensor-parallel mesh, so that optimizers and checkpoints see whole shapes; forwards compute with the local
part, since every operation on a DTensor costs tens of microseconds.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.plan.tensor_parallel import ShardedModule, Style
from osdp.runtime.tensor_parallel.collectives import TensorParallelGroup, blocks_of, enter, gather_last, leave
from osdp.runtime.tensor_parallel.group_random import GroupRandom
from osdp.runtime.tensor_parallel.sequence_collectives import leave_region


@dataclass
class RegionInput:
    """Entry of replicated tensors into a tensor-parallel region, once even if several modules read them.

    So the gradients from queries, keys and values are added locally before one all-reduce over the ranks.
    """

    ranks: TensorParallelGroup
    #: At most two, the inputs of a cross-attention; bounded, since a recomputation may end before the
    #: region's row module clears it.
    _entered: deque[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=2))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` inside the region."""
        if not tensor.requires_grad:
            return tensor
        for outside, inside in self._entered:
            if outside is tensor:
                return inside
        inside = enter(tensor, self.ranks)
        self._entered.append((tensor, inside))
        return inside

    def close(self) -> None:
        """Forget the entered tensors: the region's row module, its last, has its inputs."""
        self._entered.clear()


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Tensor-parallel settings of one module.

    Attributes:
        entry: How the module is sharded.
        ranks: The tensor-parallel ranks.
        entrance: The entry of its region.
        transposed: Whether the weight has shape (inputs, outputs).
        in_sequence: Whether activations outside its region are sharded along the sequence (sequence
            parallelism).
        random: Random states for dropout in its region; ``None`` if the other ranks are only simulated.
    """

    entry: ShardedModule
    ranks: TensorParallelGroup
    entrance: RegionInput
    transposed: bool
    in_sequence: bool = False
    random: GroupRandom | None = None

    def begin_region(self) -> None:
        """Switch dropout to this rank's random state: the module's output is sharded."""
        if self.random is not None and not self.in_sequence:
            self.random.begin_region()

    def end_region(self) -> None:
        """Switch dropout back to the shared random state: the module's output is whole."""
        if self.random is not None and not self.in_sequence:
            self.random.end_region()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter``, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def run_in_part(module: nn.Module, part: ShardInfo) -> nn.Module:
    """A copy of ``module`` with the same parameters that computes this rank's part."""
    base = type(module)
    forward = _EMBEDDINGS if isinstance(module, nn.Embedding) else _LINEARS
    style = part.entry.style
    made = type(f"Sharded{base.__name__}", (base,), {"forward": forward[style]})
    # Everything registered on it stays registered: parameters are shared, not copied.
    new = cast(nn.Module, made.__new__(made))  # type: ignore[call-overload]
    new.__dict__.update(module.__dict__)
    new.__dict__["part"] = part
    return new


def sum_gradients(module: nn.Module, ranks: TensorParallelGroup) -> nn.Module:
    """A copy of ``module`` with the same parameters, whose gradients are summed over ``ranks``."""
    base = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The unchanged forward, on a shallow copy whose parameters sum their gradients in backward.
        inner = base.__new__(base)
        inner.__dict__.update(self.__dict__)
        inner.__dict__["_parameters"] = {
            name: None if parameter is None else enter(parameter, ranks)
            for name, parameter in self._parameters.items()
        }
        return base.forward(inner, *args, **kwargs)

    made = type(f"Summed{base.__name__}", (base,), {"forward": forward})
    new = cast(nn.Module, made.__new__(made))  # type: ignore[call-overload]
    new.__dict__.update(module.__dict__)
    return new


def _column(module: Any, x: torch.Tensor) -> torch.Tensor:
    part: ShardInfo = module.part
    bias = module.bias
    if bias is not None:
        fused = part.entry.blocks > 1
        bias = blocks_of(bias, part.ranks, part.entry.blocks) if fused else local(bias)
    # With sequence parallelism x was gathered at the start of the region.
    x = x if part.in_sequence else part.entrance(x)
    part.begin_region()
    return _product(part, x, local(module.weight), bias)


def _row(module: Any, x: torch.Tensor) -> torch.Tensor:
    part: ShardInfo = module.part
    part.entrance.close()
    part.end_region()
    if part.in_sequence:
        own = leave_region(_product(part, x, local(module.weight), None), part.ranks)
        return own if module.bias is None else own + enter(module.bias, part.ranks)
    total = leave(_product(part, x, local(module.weight), None), part.ranks)
    return total if module.bias is None else total + module.bias


def _head(module: Any, x: torch.Tensor) -> torch.Tensor:
    part: ShardInfo = module.part
    x = enter(x, part.ranks) if x.requires_grad else x
    logits = _product(part, x, local(module.weight), None)
    logits = gather_last(logits, part.ranks, part.entry.size)
    return logits if module.bias is None else logits + module.bias


def _product(
    part: ShardInfo, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(x, weight.t() if part.transposed else weight, bias)


def _embedding_columns(module: Any, ids: torch.Tensor) -> torch.Tensor:
    module.part.begin_region()
    return F.embedding(ids, local(module.weight), module.padding_idx)


def _embedding_rows(module: Any, ids: torch.Tensor) -> torch.Tensor:
    part: ShardInfo = module.part
    first, last = part.ranks.bounds(part.entry.size)
    # Ids that other ranks hold look up row 0 here; their rows are zeroed before the sum over ranks.
    elsewhere = (ids < first) | (ids >= last)
    padding = module.padding_idx
    padding = padding - first if padding is not None and first <= padding < last else None
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), local(module.weight), padding)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), part.ranks)


_LINEARS = {Style.COLUMN: _column, Style.ROW: _row, Style.VOCAB_HEAD: _head}
_EMBEDDINGS = {Style.COLUMN: _embedding_columns, Style.VOCAB_EMBEDDING: _embedding_rows}
