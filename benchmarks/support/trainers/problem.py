"""A small language model, its data and its plans, the same for all trainers."""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from osdp import OSDP, ModelDesc, Training
from osdp.runtime.checkpoint import train_state
from tests.habits.running.plans import plan_of

#: Samples of all ranks in a step, and microbatches in which each rank computes its part.
SAMPLES, ACCUMULATED = 8, 2
STEPS = 6
LENGTH, VOCABULARY = 12, 64
LEARNING_RATE, MAX_NORM = 1e-2, 0.5

#: Plans under which each trainer is run.
PLANS = ("searched", "replicated", "full_shard", "mixed")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that can be learnt: each token is the one before it plus a step."""

    def __len__(self) -> int:
        return SAMPLES * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = (torch.arange(LENGTH) * (1 + index % 3) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Run:
    """One process group's part of a training.

    Attributes:
        plan: One of :data:`PLANS`.
        folder: Where checkpoints are.
        stop: The step after which it saves and ends; ``None`` goes on to the end.
        resume: The step after which the checkpoint to resume from was saved; ``None`` starts anew.
    """

    plan: str
    folder: str
    stop: int | None = None
    resume: int | None = None


def plain_model() -> LlamaForCausalLM:
    """A decoder with tied embeddings, the same on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def samples_of_rank() -> int:
    """Samples of a microbatch of one rank."""
    count, rest = divmod(SAMPLES, ACCUMULATED * dist.get_world_size())
    assert rest == 0
    return count


def planned(kind: str, model: nn.Module | None = None) -> OSDP:
    """``model``, or one like it, under a plan of this kind, for all ranks of the process group."""
    model, data = model or plain_model(), Sentences()
    batch = {name: torch.stack([data[i][name] for i in range(samples_of_rank())]) for name in data[0]}
    desc = ModelDesc.from_module(model, batch)
    training = Training(local_batch=samples_of_rank(), microbatches=ACCUMULATED)
    return OSDP(model, plan=plan_of(kind, desc, training, dist.get_world_size()))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of all parameters and optimizer states, whole; every rank calls it."""
    found = hashlib.sha256()
    for part in train_state(model, optimizer).values():
        for name in sorted(part):
            value = part[name]
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
