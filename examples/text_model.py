"""Byte-level GPT-2, OPT and BERT of transformers' own classes, and ways to spread them over processes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from examples.text_data import MASK, VOCABULARY

#: Wraps a model, in place or not, and returns what to call.
Wrap = Callable[[PreTrainedModel], nn.Module]


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a model: blocks, width, attention heads, bytes of context, and which family it is of."""

    layers: int
    hidden: int
    heads: int
    seq: int
    family: str = "gpt2"


def build(size: Size, seed: int) -> PreTrainedModel:
    """A randomly initialised model over bytes: tied embeddings, no dropout, nothing to download."""
    torch.manual_seed(seed)
    return FAMILIES[size.family](size)


def _gpt2(size: Size) -> PreTrainedModel:
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


def _opt(size: Size) -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=256,
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        word_embed_proj_dim=size.hidden,
        ffn_dim=4 * size.hidden,
        num_attention_heads=size.heads,
        max_position_embeddings=size.seq,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = OPTForCausalLM(config)
    model.loss_type = "ForCausalLM"
    return model


def _bert(size: Size) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=size.seq,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=MASK + 1,
    )
    return BertForMaskedLM(config)


#: How a model of each family is made.
FAMILIES: dict[str, Callable[[Size], PreTrainedModel]] = {"gpt2": _gpt2, "opt": _opt, "bert": _bert}


def blocks(model: PreTrainedModel) -> Iterable[nn.Module]:
    """The repeated blocks of a model of any family."""
    if isinstance(model, BertForMaskedLM):
        return list(model.bert.encoder.layer)
    return list(model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.model.decoder.layers)


def fsdp2(mesh: DeviceMesh) -> Wrap:
    """FSDP2 as an expert sets it up: one unit per block, the root kept gathered."""

    def wrap(model: PreTrainedModel) -> nn.Module:
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return model

    return wrap


def ddp(device: torch.device) -> Wrap:
    """DDP without a second copy of the gradients."""

    def wrap(model: PreTrainedModel) -> nn.Module:
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
