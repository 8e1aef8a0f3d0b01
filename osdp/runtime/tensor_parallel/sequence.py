"""Sequence parallelism: hooks that split the sequence, gather it for a region, and make it whole again."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from osdp.plan.tensor_parallel import SequenceParallel
from osdp.runtime.tensor_parallel.collectives import TensorParallelGroup
from osdp.runtime.tensor_parallel.sequence_collectives import enter_region, make_whole, take_part


def share_sequence(model: nn.Module, plan: SequenceParallel, ranks: TensorParallelGroup) -> None:
    """Register the sequence-parallel hooks of ``plan``; called after the modules have been sharded."""
    for run in plan.runs:
        first, last = model.get_submodule(run[0]), model.get_submodule(run[-1])
        first.register_forward_pre_hook(partial(_cut, ranks), with_kwargs=True)
        last.register_forward_hook(partial(_join, ranks))
    for gather in plan.gathers:
        hook = partial(_gather, ranks, gather.leaves)
        model.get_submodule(gather.module).register_forward_pre_hook(hook, with_kwargs=True)


def _cut(ranks: TensorParallelGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    at = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    leaves[at] = take_part(leaves[at], ranks)
    return tree_unflatten(leaves, spec)


def _join(ranks: TensorParallelGroup, module: nn.Module, args: Any, output: Any) -> Any:
    leaves, spec = tree_flatten(output)
    at = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    leaves[at] = make_whole(leaves[at], ranks)
    return tree_unflatten(leaves, spec)


def _gather(
    ranks: TensorParallelGroup, places: tuple[int, ...], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    for at in places:
        leaves[at] = enter_region(leaves[at], ranks)
    return tree_unflatten(leaves, spec)
