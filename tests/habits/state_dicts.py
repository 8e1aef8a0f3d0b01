"""State dicts and checkpoints: saved, loaded, and trained on."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from osdp.runtime import checkpoint as osdp_checkpoint
from tests.habits.running.context import Context, whole
from tests.habits.running.habit import habit
from tests.habits.running.nets import Net, Words, mse, next_word

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@contextmanager
def _folder(ctx: Context) -> Iterator[str]:
    """One folder for all ranks."""
    made = [tempfile.mkdtemp() if ctx.ranks[0] == 0 else ""]
    if not ctx.alone:
        dist.broadcast_object_list(made)
    try:
        yield made[0]
        if not ctx.alone:
            dist.barrier()
    finally:
        if ctx.ranks[0] == 0:
            shutil.rmtree(made[0], ignore_errors=True)


def _seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


@habit()
def round_trip(ctx: Context) -> None:
    """Goes back to an earlier state: state_dict(), cloned, then load_state_dict()."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    ctx.train(model, optimizer)
    model.load_state_dict(kept)
    ctx.train(model, optimizer)
    ctx.weights(model)


@habit(skips={"fsdp2": "loads DTensors alone"})
def plain_state_dict(ctx: Context) -> None:
    """Loads pretrained plain weights into the wrapped model: load_state_dict(plain)."""
    model = ctx.wrap(Net())
    ctx.inner(model).load_state_dict(_seeded(7).state_dict())
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def into_the_plain_model(ctx: Context) -> None:
    """Saves whole weights and loads them into a plain model: get_model_state_dict(full_state_dict=True)."""
    model = ctx.wrap(Net())
    ctx.train(model, ctx.sgd(model))
    kept = [model.state_dict() if ctx.alone else get_model_state_dict(model, options=_FULL)]
    if not ctx.alone:
        dist.broadcast_object_list(kept)
    plain = _seeded(1)
    plain.load_state_dict(kept[0])
    ctx.rows("output", plain(ctx.batch(9)[0]))


@habit()
def set_from_rank_0(ctx: Context) -> None:
    """Sends whole weights from rank 0: set_model_state_dict(broadcast_from_rank0=True)."""
    model = ctx.wrap(Net())
    state = _seeded(7).state_dict() if ctx.ranks[0] == 0 else {}
    if ctx.alone:
        model.load_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def resumed(ctx: Context) -> None:
    """Saves model and optimizer by get_state_dict, and resumes in a new model by set_state_dict."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    weights = {name: value.clone() for name, value in weights.items()}
    again = ctx.wrap(_seeded(5))
    optimizer = ctx.sgd(again)
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=states)
    ctx.train(again, optimizer, first=2)
    ctx.weights(again)


@habit()
def optimizer_state_dict(ctx: Context) -> None:
    """Saves and loads the optimizer by its own state_dict."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    state = optimizer.state_dict()
    optimizer = ctx.sgd(model)
    optimizer.load_state_dict(state)
    ctx.train(model, optimizer, first=2)
    ctx.weights(model)


@habit()
def distributed_checkpoint(ctx: Context) -> None:
    """Saves and loads by torch.distributed.checkpoint."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    with _folder(ctx) as folder:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, no_dist=ctx.alone)
        again = ctx.wrap(_seeded(5))
        state = {"model": get_model_state_dict(again)}
        dcp.load(state, checkpoint_id=folder, no_dist=ctx.alone)
        set_model_state_dict(again, state["model"])
    ctx.train(again, ctx.sgd(again), first=2)
    ctx.weights(again)


@habit()
def from_a_plain_checkpoint(ctx: Context) -> None:
    """Loads a distributed checkpoint that one process saved of the plain model."""
    model = ctx.wrap(Net())
    with _folder(ctx) as folder:
        if ctx.ranks[0] == 0:
            dcp.save({"model": _seeded(7).state_dict()}, checkpoint_id=folder, no_dist=True)
        if not ctx.alone:
            dist.barrier()
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder, no_dist=ctx.alone)
        set_model_state_dict(model, state["model"])
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit(skips={name: "is OSDP's" for name in ("ddp", "fsdp2")})
def checkpoint_of_osdp(ctx: Context) -> None:
    """Saves and loads by osdp.runtime.checkpoint, twice over the same name."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    with _folder(ctx) as folder:
        path = Path(folder, "latest")
        for step in range(2):
            ctx.train(model, optimizer, steps=1, first=step)
            if ctx.osdp:
                osdp_checkpoint.save(path, model, optimizer)
        if ctx.osdp:
            model = ctx.wrap(_seeded(5))
            optimizer = ctx.sgd(model)
            osdp_checkpoint.load(path, model, optimizer)
        ctx.train(model, optimizer, first=2)
    ctx.weights(model)


@habit(skips={name: "is OSDP's" for name in ("ddp", "fsdp2")})
def whole_state_dict_of_osdp(ctx: Context) -> None:
    """Exports whole weights by whole_state_dict for the plain model."""
    model = ctx.wrap(Net())
    ctx.train(model, ctx.sgd(model))
    state = osdp_checkpoint.whole_state_dict(model) if ctx.osdp else model.state_dict()
    if ctx.ranks[0] == 0:
        plain = _seeded(1)
        plain.load_state_dict(state)
        output = plain(ctx.part(9, 0)[0]).detach()
    else:
        output = torch.empty(4, 3)
    if not ctx.alone:
        dist.broadcast(output, 0)
    ctx.value("output", output)


@habit()
def between_forward_and_backward(ctx: Context) -> None:
    """Takes the state dict between a forward and its backward."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        x, y = ctx.batch(step)
        loss = ctx.loss(mse(model(x), y))
        state = model.state_dict()
        ctx.value("head", next(v for name, v in state.items() if name.endswith("head.weight")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ctx.weights(model)


@habit()
def weights_by_name(ctx: Context) -> None:
    """Reads the names and shapes of the state dict: those of the plain model, tied weights twice."""
    model = ctx.wrap(Words(), ctx.tokens())
    for name, value in ctx.inner(model).state_dict().items():
        ctx.value(name, torch.tensor(value.shape))
    tokens = ctx.tokens()
    ctx.loss(next_word(model(tokens), tokens)).backward()
    ctx.gradients(model)


@habit()
def copied_by_hand(ctx: Context) -> None:
    """Copies weights of another model by hand: p.copy_() under no_grad."""
    model = ctx.wrap(Net())
    other = ctx.wrap(_seeded(7))
    optimizer = ctx.sgd(model)
    ctx.train(model, optimizer)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
    optimizer.zero_grad()
    ctx.train(model, optimizer)
    ctx.weights(model)


@habit()
def initialised_after_wrapping(ctx: Context) -> None:
    """Initialises weights after wrapping: nn.init.constant_ under no_grad."""
    model = ctx.wrap(Net())
    with torch.no_grad():
        for name, parameter in ctx.inner(model).named_parameters():
            if name.endswith("up.weight"):
                nn.init.constant_(parameter, 0.02)
    ctx.train(model, ctx.sgd(model))
    ctx.weights(model)


@habit()
def printed_whole(ctx: Context) -> None:
    """Looks at single whole parameters while training."""
    model = ctx.wrap(Net())
    optimizer = ctx.sgd(model)
    for step in range(2):
        ctx.train(model, optimizer, steps=1, first=step)
        ctx.value("stem", whole(ctx.inner(model).stem.weight))
        ctx.value("norm of block 1", whole(ctx.inner(model).blocks[1].norm.bias))
    ctx.weights(model)
