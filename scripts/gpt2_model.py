"""A byte-level GPT-2 from transformers' own classes, and the ways to spread it over processes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

#: Wraps a model, in place or not, and returns what to call.
Wrap = Callable[[GPT2LMHeadModel], nn.Module]


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a GPT-2: blocks, width, attention heads, bytes of context."""

    layers: int
    hidden: int
    heads: int
    seq: int


def build(size: Size, seed: int) -> GPT2LMHeadModel:
    """A randomly initialised model over the 256 bytes: tied embeddings, no dropout, nothing to download."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_layer=size.layers,
        n_embd=size.hidden,
        n_head=size.heads,
        n_positions=size.seq,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    # What transformers falls back to for this class, with a warning.
    model.loss_type = "ForCausalLM"
    return model


def fsdp2(mesh: DeviceMesh) -> Wrap:
    """FSDP2 as an expert sets it up: one unit per block, the root kept gathered."""

    def wrap(model: GPT2LMHeadModel) -> nn.Module:
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return model

    return wrap


def ddp(device: torch.device) -> Wrap:
    """DDP without a second copy of the gradients."""

    def wrap(model: GPT2LMHeadModel) -> nn.Module:
        wrapped = DistributedDataParallel(model.to(device=device), gradient_as_bucket_view=True)
        if dist.get_backend() == "fake":
            # DDP wants a result, which a group that moves no data does not give.
            wrapped.register_comm_hook(None, _keep_bucket)
        return wrapped

    return wrap


def single(device: torch.device) -> Wrap:
    """The model as it is, for the reference that runs the whole global batch in one process."""
    return lambda model: model.to(device=device)


def _keep_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
