"""Numerical check of a tensor-parallel module against the whole one: all ranks in one process.

Each rank is a copy of the module with shards of the weights, and runs in a thread of its own; the threads
meet wherever ranks would communicate. Weights and inputs are random, in float64, so that agreement is no
accident.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from osdp.comm.shards import part_of
from osdp.tracing.tensor_parallel.linear_graph import Call, FeatureFlow, copy_object
from osdp.tracing.tensors import map_leaves, tensors_in

#: Norm-relative difference up to which outputs agree; some models compute attention in float32 even here.
TOLERANCE = 1e-5
#: Random numbers of one weight: of GPT-3's there are 600 million, which take ten seconds to draw. A prime.
_MOST_DRAWN = 1_000_003
#: Seconds after which ranks stop waiting for each other.
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Slice:
    """Sharding of a linear module.

    Attributes:
        dim: Dimension of its weight that is sharded.
        blocks: Number of blocks of that dimension, each of which is sharded by itself.
        closes: Whether it is a row module, whose outputs are summed; the bias of a column module is sharded.
    """

    dim: int
    blocks: int = 1
    closes: bool = False


class ReferenceRun:
    """The unsharded reference: a module with random weights, random inputs and its outputs for them.

    Args:
        module: The module; it is not changed.
        name: Its FQN.
        call: Its call on fake tensors.
        flow: The feature flow, from which follows which of its outputs are read later.
    """

    def __init__(self, module: nn.Module, name: str, call: Call, flow: FeatureFlow) -> None:
        self.name = name
        self._tensors = flow.tensors
        generator = torch.Generator().manual_seed(0)
        memo: dict[int, Any] = {id(p): _random_parameter(p, generator) for p in module.parameters()}
        memo |= {id(b): _fill_randomly(b, generator) for b in module.buffers()}
        memo |= {id(value): _fill_randomly(value, generator) for value in _computed_attributes(module)}
        self.module = copy.deepcopy(module, memo).eval()
        self._matters = [flow.is_used_after(tensor, call) for tensor in tensors_in(call.output)]
        try:
            self._arguments = self._find_arguments(call)
        except RuntimeError:
            # Buffers that meet weights or inputs in one kernel must be in float64, as those are.
            self.module.double()
            self._arguments = self._find_arguments(call)
        self.outputs = self.run(self.module)

    def run(self, module: nn.Module) -> list[torch.Tensor]:
        """The outputs of ``module``, with copies of the objects among the inputs."""
        args, kwargs = map_leaves(lambda leaf: copy_object(leaf, self._tensors), self._arguments)
        return tensors_in(module(*args, **kwargs))

    def agrees(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether ``outputs`` equal the whole module's, except for outputs that nothing reads."""
        if len(outputs) != len(self._matters) or not any(self._matters):
            return False
        return all(
            _is_close(mine, other)
            for mine, other, matters in zip(self.outputs, outputs, self._matters, strict=True)
            if matters
        )

    def _find_arguments(self, call: Call) -> Any:
        """Random inputs; integers are 0 or 1, or only 0 where the module cannot index with 1."""
        for largest in (1, 0):
            generator = torch.Generator().manual_seed(1)
            fill = partial(_fill_argument, generator=generator, largest=largest)
            self._arguments = map_leaves(fill, (call.args, call.kwargs))
            try:
                self.run(self.module)
            except IndexError:
                continue
            break
        return self._arguments


@dataclass
class ShardedRun:
    """All ranks of a tensor-parallel module.

    Args:
        whole: The unsharded reference.
        slices: Sharding of the modules inside it, by FQN.
        degree: Number of ranks.
        gathers: For modules that gather parts of the sequence, by FQN, the indices of these tensors among the
            leaves of the arguments; empty without sequence parallelism.
    """

    whole: ReferenceRun
    slices: Mapping[str, Slice]
    degree: int
    gathers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _ranks: list[nn.Module] = field(init=False)
    _meeting: "_Rendezvous" = field(init=False)

    def __post_init__(self) -> None:
        self._meeting = _Rendezvous(self.degree)
        self._ranks = [self._copy(rank) for rank in range(self.degree)]

    def fault(self, divided: Sequence[tuple[str, str]]) -> str | None:
        """Reason why the sharded module differs from the whole one; ``None`` if they agree.

        Args:
            divided: FQN of a module and name of an integer attribute, for each that is divided on every rank.
        """
        before = [self._divide(rank, divided) for rank in self._ranks]
        self._meeting.reset()
        try:
            with ThreadPoolExecutor(self.degree) as pool:
                results = list(pool.map(self._run, self._ranks))
        finally:
            for restore in (entry for entries in before for entry in entries):
                restore()
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            # A rank that fails breaks the barrier for the others: report the failure itself.
            cause = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            return f"{type(cause).__name__}: {cause}"
        if all(self.whole.agrees(result) for result in results if isinstance(result, list)):
            return None
        return "the sum over the ranks differs from the output of the whole module"

    def _run(self, module: nn.Module) -> list[torch.Tensor] | Exception:
        try:
            return self.whole.run(module)
        except Exception as error:
            self._meeting.leave()
            return error

    def _divide(self, rank: nn.Module, divided: Sequence[tuple[str, str]]) -> list[Callable[[], None]]:
        """Divide the attributes of one rank by the degree; returns functions that restore them."""
        restores: list[Callable[[], None]] = []
        for fqn, name in divided:
            module = rank.get_submodule(_relative_error(fqn, self.whole.name))
            value = getattr(module, name)
            setattr(module, name, value // self.degree)
            restores.append(partial(setattr, module, name, value))
        return restores

    def _copy(self, rank: int) -> nn.Module:
        """The module as rank ``rank`` has it: shards of the weights, and hooks where ranks communicate."""
        # Parameters and buffers are shared with the reference; only sharded ones are replaced below.
        memo: dict[int, Any] = {id(p): p for p in self.whole.module.parameters()}
        memo |= {id(b): b for b in self.whole.module.buffers()}
        memo |= {id(computed): computed for computed in _computed_attributes(self.whole.module)}
        local = copy.deepcopy(self.whole.module, memo)
        for fqn, entry in self.slices.items():
            module = local.get_submodule(_relative_error(fqn, self.whole.name))
            self._shard(module, entry, rank)
            if entry.closes:
                module.register_forward_hook(partial(self._close, rank))
        for fqn, leaves in self.gathers.items():
            hook = partial(self._gather, rank, leaves)
            inside = local.get_submodule(_relative_error(fqn, self.whole.name))
            inside.register_forward_pre_hook(hook, with_kwargs=True)
        if self.gathers:
            local.register_forward_pre_hook(partial(self._cut, rank), with_kwargs=True)
            local.register_forward_hook(partial(self._join, rank))
        return local

    # Sequence parallelism: the block's input is cut (_cut), regions gather (_gather) and reduce-scatter
    # (_close), the block's output is gathered (_join), all along the second-to-last dimension.

    def _own(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self.degree, -2)[rank]

    def _cut(self, rank: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        at = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        leaves[at] = self._own(rank, leaves[at])
        return tree_unflatten(leaves, spec)

    def _gather(self, rank: int, places: Sequence[int], module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        for at in places:
            leaves[at] = torch.cat(self._meeting.meet(rank, leaves[at]), -2)
        return tree_unflatten(leaves, spec)

    def _join(self, rank: int, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        at = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        leaves[at] = torch.cat(self._meeting.meet(rank, leaves[at]), -2)
        return tree_unflatten(leaves, spec)

    def _shard(self, module: nn.Module, entry: Slice, rank: int) -> None:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        part_of_weight = part_of(weight.detach(), entry.dim, rank, self.degree, entry.blocks)
        module._parameters["weight"] = nn.Parameter(part_of_weight)
        if bias is not None and entry.closes:
            module._parameters["bias"] = nn.Parameter(bias.detach() / self.degree)  # the sum adds it once
        elif bias is not None:
            part = part_of(bias.detach(), 0, rank, self.degree, entry.blocks)
            module._parameters["bias"] = nn.Parameter(part)
        if hasattr(module, "nf"):  # transformers' Conv1D views its output by it
            module.__dict__["nf"] = part_of_weight.shape[1]

    def _close(self, rank: int, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._meeting.meet(rank, output)).sum(0)
        return self._own(rank, total) if self.gathers else total


class _Rendezvous:
    """Barrier at which the threads of all ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size)

    def reset(self) -> None:
        self._barrier = threading.Barrier(len(self._parts))

    def leave(self) -> None:
        self._barrier.abort()

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All-gather: the tensors of all ranks."""
        self._parts[rank] = tensor
        self._barrier.wait(_PATIENCE)
        found = [part for part in self._parts if part is not None]
        # No rank may overwrite its part for the next exchange before all have read this one.
        self._barrier.wait(_PATIENCE)
        return found


def _relative_error(fqn: str, ancestor: str) -> str:
    return fqn[len(ancestor) :].removeprefix(".")


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.detach().double(), other.detach().double()
    difference: torch.Tensor = torch.linalg.vector_norm(one - other)
    return bool(difference <= TOLERANCE * torch.linalg.vector_norm(one))


def _random_parameter(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    # A prime number of values repeats in weights of more: no two rows or blocks are alike.
    drawn = torch.randn(
        min(parameter.numel(), _MOST_DRAWN), generator=generator, dtype=torch.float64, device="cpu"
    )
    repeats = -(-parameter.numel() // max(drawn.numel(), 1))
    values = drawn.repeat(repeats)[: parameter.numel()].view(parameter.shape)
    if parameter.dim() > 1:
        values /= parameter.shape[-1] ** 0.5
    return nn.Parameter(values)


def _computed_attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that modules hold beside parameters and buffers, such as weights that hooks compute."""
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _fill_randomly(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The values of a buffer; random ones, or ones for integers, if it is on ``meta``."""
    if tensor.is_meta:
        values = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return values.normal_(generator=generator) if tensor.is_floating_point() else values
    return tensor.detach().to("cpu", copy=True)


def _fill_argument(leaf: Any, generator: torch.Generator, largest: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
    if leaf.dtype == torch.bool:
        return torch.ones(leaf.shape, dtype=torch.bool, device="cpu")
    return torch.randint(0, largest + 1, leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
