"""Linear modules and embeddings of which this rank computes a part.

They keep the parameters, names, hooks and types of the modules they stand for. Weights are DTensors on the
tensor-parallel mesh, so that optimizers and checkpoints see whole shapes; what is computed with is the local
part, since every operation on a DTensor costs tens of microseconds.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.runtime.sequence_collectives import leave_region
from osdp.runtime.tensor_collectives import Ranks, blocks_of, enter, gather_last, leave
from osdp.runtime.tensor_random import GroupRandom
from osdp.tensor_plan import ShardedModule, Style


@dataclass
class Entrance:
    """Where replicated tensors enter a region: what several modules read enters once.

    So the gradients of queries, keys and values are added before they are summed over the ranks.
    """

    ranks: Ranks
    #: At most two: what a cross-attention reads. A recomputation may end before the region's row module.
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
        """Forget what has entered; the region's row module has its inputs."""
        self._entered.clear()


@dataclass(frozen=True, slots=True)
class Part:
    """What a module must know to compute its part.

    Attributes:
        entry: How it is sharded.
        ranks: Over whom.
        entrance: Of its region.
        transposed: Whether the weight has shape (inputs, outputs).
        in_sequence: Whether what is outside its region is a part of the sequence.
        random: What dropout in its region draws from; ``None`` if the other ranks are imagined.
    """

    entry: ShardedModule
    ranks: Ranks
    entrance: Entrance
    transposed: bool
    in_sequence: bool = False
    random: GroupRandom | None = None

    def begin_region(self) -> None:
        """The module's output is sharded, if it is one of a region's."""
        if self.random is not None and not self.in_sequence:
            self.random.begin_region()

    def end_region(self) -> None:
        """The module's output is whole."""
        if self.random is not None and not self.in_sequence:
            self.random.end_region()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter``, through which gradients reach it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of modules of ``model`` that compute a part, those that are whole included."""
    parts = (module for module in model.modules() if "part" in module.__dict__)
    return [parameter for module in parts for parameter in module.parameters(recurse=False)]


def run_in_part(module: nn.Module, part: Part) -> nn.Module:
    """A module like ``module``, with the same parameters, that computes its part."""
    base = type(module)
    forward = _EMBEDDINGS if isinstance(module, nn.Embedding) else _LINEARS
    style = part.entry.style
    made = type(f"Sharded{base.__name__}", (base,), {"forward": forward[style]})
    # Everything registered on it stays registered: parameters are shared, not copied.
    new = cast(nn.Module, made.__new__(made))  # type: ignore[call-overload]
    new.__dict__.update(module.__dict__)
    new.__dict__["part"] = part
    return new


def sum_gradients(module: nn.Module, ranks: Ranks) -> nn.Module:
    """A module like ``module``, with the same parameters, whose gradients are summed over ``ranks``."""
    base = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The forward of its kind, on a module that has the same but for the way gradients take.
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
    part: Part = module.part
    bias = module.bias
    if bias is not None:
        fused = part.entry.blocks > 1
        bias = blocks_of(bias, part.ranks, part.entry.blocks) if fused else local(bias)
    # A part of the sequence was gathered where the region begins.
    x = x if part.in_sequence else part.entrance(x)
    part.begin_region()
    return _product(part, x, local(module.weight), bias)


def _row(module: Any, x: torch.Tensor) -> torch.Tensor:
    part: Part = module.part
    part.entrance.close()
    part.end_region()
    if part.in_sequence:
        own = leave_region(_product(part, x, local(module.weight), None), part.ranks)
        return own if module.bias is None else own + enter(module.bias, part.ranks)
    total = leave(_product(part, x, local(module.weight), None), part.ranks)
    return total if module.bias is None else total + module.bias


def _head(module: Any, x: torch.Tensor) -> torch.Tensor:
    part: Part = module.part
    x = enter(x, part.ranks) if x.requires_grad else x
    logits = _product(part, x, local(module.weight), None)
    logits = gather_last(logits, part.ranks, part.entry.size)
    return logits if module.bias is None else logits + module.bias


def _product(part: Part, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.t() if part.transposed else weight, bias)


def _embedding_columns(module: Any, ids: torch.Tensor) -> torch.Tensor:
    module.part.begin_region()
    return F.embedding(ids, local(module.weight), module.padding_idx)


def _embedding_rows(module: Any, ids: torch.Tensor) -> torch.Tensor:
    part: Part = module.part
    first, last = part.ranks.bounds(part.entry.size)
    elsewhere = (ids < first) | (ids >= last)
    padding = module.padding_idx
    padding = padding - first if padding is not None and first <= padding < last else None
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), local(module.weight), padding)
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), part.ranks)


_LINEARS = {Style.COLUMN: _column, Style.ROW: _row, Style.VOCAB_HEAD: _head}
_EMBEDDINGS = {Style.COLUMN: _embedding_columns, Style.VOCAB_EMBEDDING: _embedding_rows}
