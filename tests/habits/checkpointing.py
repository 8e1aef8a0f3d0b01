"""Activations computed again in backward, by the user."""

from functools import partial

import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.habits.running.context import Context
from tests.habits.running.habit import habit
from tests.habits.running.nets import Block, Net


class Checkpointed(Net):
    """Its blocks are run by ``run``."""

    def __init__(self, run: object) -> None:
        super().__init__()
        self.run = run

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _trained(ctx: Context, model: nn.Module) -> None:
    model = ctx.wrap(model)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def without_reentrance(ctx: Context) -> None:
    """Runs each block by checkpoint(use_reentrant=False)."""
    _trained(ctx, Checkpointed(partial(checkpoint, use_reentrant=False)))


@habit()
def with_reentrance(ctx: Context) -> None:
    """Runs each block by checkpoint(use_reentrant=True)."""
    _trained(ctx, Checkpointed(partial(checkpoint, use_reentrant=True)))


@habit()
def without_early_stop(ctx: Context) -> None:
    """Runs each block by a checkpoint that computes all of it again: early_stop=False."""
    _trained(ctx, Checkpointed(partial(checkpoint, use_reentrant=False, early_stop=False)))


@habit()
def by_wrapper(ctx: Context) -> None:
    """Wraps blocks by apply_activation_checkpointing before the model is wrapped."""
    model = Net()
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Block)
    )
    _trained(ctx, model)


@habit()
def every_second_block(ctx: Context) -> None:
    """Wraps every second block by checkpoint_wrapper."""
    model = Net()
    for index in (0, 2):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    _trained(ctx, model)


@habit()
def composable(ctx: Context) -> None:
    """Applies torch.distributed._composable.checkpoint to blocks."""
    model = Net()
    for block in model.blocks:
        composable_checkpoint(block)
    _trained(ctx, model)


@habit()
def selective(ctx: Context) -> None:
    """Keeps the outputs of every matrix product and computes the rest again."""

    def policy(_: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    _trained(ctx, Checkpointed(partial(checkpoint, use_reentrant=False, context_fn=contexts)))


@habit()
def sequential(ctx: Context) -> None:
    """Runs the blocks in two segments by checkpoint_sequential."""

    class Segmented(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(list(self.blocks), 2, self.stem(x), use_reentrant=False)

    _trained(ctx, Segmented())


@habit()
def whole_encoder(ctx: Context) -> None:
    """Runs all but the head under one checkpoint."""

    class Whole(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.encode, x, use_reentrant=False))

    _trained(ctx, Whole())


@habit()
def nested(ctx: Context) -> None:
    """Puts checkpoints into a checkpoint."""
    inner = partial(checkpoint, use_reentrant=False)

    class Nested(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.encode, x, use_reentrant=False))

    _trained(ctx, Nested(inner))


@habit()
def offloaded(ctx: Context) -> None:
    """Keeps the activations of blocks in host memory: offload_wrapper."""
    model = Net()
    for index in range(3):
        model.blocks[index] = offload_wrapper(model.blocks[index])
    _trained(ctx, model)


@habit()
def saved_on_cpu(ctx: Context) -> None:
    """Trains under torch.autograd.graph.save_on_cpu()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    with torch.autograd.graph.save_on_cpu():
        ctx.train(model, optimizer)
    ctx.weights(model)


@habit()
def outside_the_wrapper(ctx: Context) -> None:
    """Runs the whole wrapped model by checkpoint()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        output = checkpoint(model, x, use_reentrant=False)
        ctx.loss(nn.functional.mse_loss(output.to(y.dtype), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)
