"""Frameworks that train a plan: bytes that each keeps per parameter, and how it sends.

Megatron-LM's bytes are those of its guide to the distributed optimizer: 18 per parameter in bfloat16 (6 and
12 that are sharded), 20 in float16 (4 and 16). Its kernel of SwiGLU, on by default, saves its input alone
(``megatron/core/fusions/fused_bias_swiglu.py``). FSDP of PyTorch keeps sharded parameters, gradients and
moments in float32, which are 16; torchtitan reduces gradients in float32. DeepSpeed's bytes in float16 are
those of Rajbhandari et al. (SC 2020, section 3.1); in bfloat16 it accumulates in float32, as the runs of
BLOOM did.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from osdp.cluster.plan import Workload


class Target(StrEnum):
    """A framework, with the 16-bit format it computes in where that changes what it keeps."""

    MEGATRON_BF16 = "megatron-bf16"
    MEGATRON_FP16 = "megatron-fp16"
    DEEPSPEED_BF16 = "deepspeed-bf16"
    DEEPSPEED_FP16 = "deepspeed-fp16"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True)
class TargetDefaults:
    """What a framework does unless it is told otherwise.

    Attributes:
        gradient_bytes: Bytes of a gradient while it is accumulated.
        reduce_bytes: Bytes of a gradient while it is reduced.
        state_bytes: Bytes of optimizer states, copies of weights and gradients in float32 included.
        split_sends: Whether tensor-parallel ranks send parts of messages between stages.
        fused_gate: Whether gated feed-forward blocks keep less, as in a workload.
    """

    gradient_bytes: int
    reduce_bytes: int
    state_bytes: int
    split_sends: bool = False
    fused_gate: bool = False


TARGETS = {
    Target.MEGATRON_BF16: TargetDefaults(4, 4, 12, split_sends=True, fused_gate=True),
    Target.MEGATRON_FP16: TargetDefaults(2, 2, 16, split_sends=True, fused_gate=True),
    Target.DEEPSPEED_BF16: TargetDefaults(4, 2, 12),
    Target.DEEPSPEED_FP16: TargetDefaults(2, 2, 12),
    # The sharded weight is in float32: two bytes of it beside those in the compute dtype, and two moments.
    Target.FSDP: TargetDefaults(4, 4, 10),
}


def as_trained_by(workload: Workload, target: Target) -> Workload:
    """The workload with what a framework keeps per parameter.

    >>> from osdp.cluster.known_transformers import shape_of
    >>> kept = as_trained_by(Workload(shape=shape_of("gpt2"), global_batch=8), Target.MEGATRON_BF16)
    >>> kept.weight_bytes + kept.gradient_bytes + kept.state_bytes
    18
    """
    defaults = TARGETS[target]
    return replace(
        workload,
        gradient_bytes=defaults.gradient_bytes,
        reduce_bytes=defaults.reduce_bytes,
        state_bytes=defaults.state_bytes,
        split_sends=defaults.split_sends,
        fused_gate=defaults.fused_gate,
    )
