"""Frameworks that train a plan: bytes that each keeps per parameter, and how it sends.

Megatron-LM's bytes are those of its guide to the distributed optimizer: 18 per parameter in bfloat16 (6 and
12 that are sharded), 20 in float16 (4 and 16). Its kernel of SwiGLU, on by default, saves its input alone
(``megatron/core/fusions/fused_bias_swiglu.py``). FSDP of PyTorch keeps sharded parameters, gradients and
moments in float32, which are 16; torchtitan reduces gradients in float32. DeepSpeed's bytes in float16 are
those of Rajbhandari et al. (SC 2020, section 3.1); in bfloat16 its optimizer adds the gradients of each
microbatch to float32 ones of all parameters, and holds both (``deepspeed/runtime/bf16_optimizer.py``, class
BF16_Optimizer, read 2026-11). Its pipeline keeps each stage's input and output until the backward
(``deepspeed/runtime/pipe/engine.py``); Megatron-LM frees outputs once they are sent
(``--deallocate-pipeline-outputs``), and its fused Adam has no temporary tensors
(``megatron/core/optimizer``). The last three are from memory. FSDP prefetches weights and reduces gradients
beside compute; in torch's pipelines a rank keeps both whole until its last microbatch
(``torch/distributed/pipelining/stage.py``, ``backward_maybe_with_nosync``, torch 2.13). It shards weights
again after each backward (``FSDPParamGroup.reshard_after_backward``). DeepSpeed overlaps communication by
itself with ZeRO 3 alone (``overlap_comm`` in ``deepspeed/runtime/zero/config.py``), and splits the messages
of its pipeline over tensor-parallel ranks (``deepspeed/runtime/pipe/engine.py``, pipe_partitioned).
Megatron-LM pads vocabularies to ``--make-vocab-size-divisible-by`` times the tensor-parallel ranks, 128 by
default, and overlaps the messages of interleaved stages unless ``--no-overlap-p2p-communication`` is given
(``megatron/training/arguments.py``, read 2026-11). DeepSpeed all-reduces the gradients of ZeRO 1 and 2, of
which each rank keeps its part (``use_multi_rank_bucket_allreduce``, true by default, and ``allreduce_bucket``
in ``deepspeed/runtime/zero/stage_1_and_2.py``; ``buffered_allreduce_fallback`` of pipelines in bfloat16,
``deepspeed/runtime/pipe/engine.py``; read 2026-11). Megatron-LM clears its gradients in float32 in each step,
checks their norms and divides them by the number of ranks, each a pass over all of them before they are
sharded: 4, 4 and 8 bytes a parameter (``reset``, ``check_grads`` and ``start_grad_sync`` in
``megatron/core/distributed/param_and_grad_buffer.py``, read 2026-11); in float16 2 and 4, as its loss scaler
checks for infinities after the reduction. Its layers are Transformer Engine's, which prefers cuDNN's
attention to FlashAttention-2 from Hopper on (``get_attention_backend`` in
``transformer_engine/pytorch/attention/dot_product_attention/utils.py``, 2025).
"""

from dataclasses import dataclass, fields, replace
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
        ring_attention: Whether context-parallel ranks exchange keys and values around a ring.
        regathers_inputs: Whether inputs of products are gathered again for backward, as in a workload.
        fused_gate: Whether gated feed-forward blocks keep less, as in a workload.
        update_bytes: Temporary bytes of its optimizer step.
        boundary_copies: Copies of a stage's input and output that it keeps, as in a workload.
        overlap: How well it hides communication of weights and gradients, as in a workload.
        sharded_overlap: The same where weights are sharded, as in a workload.
        send_overlap: How well ranks of several stages hide messages, as in a workload.
        bucket_bytes: Bytes of buffers of reductions, as in a workload.
        gathered_bytes: Bytes of gathered weights that are kept, as in a workload.
        reduces_in_stages: Whether pipelines reduce sharded gradients in every microbatch, as in a workload.
        whole_reductions: Whether gradients are all-reduced though they are sharded, as in a workload.
        gathers_each_microbatch: Whether weights are gathered for each microbatch, as in a workload.
        whole_passes_bytes: Bytes of passes over all gradients, as in a workload.
        cudnn_attention: Whether it calls cuDNN's attention where that is faster, as in a workload.
        vocabulary_multiple: What vocabularies are padded to, as in a workload.
        stored_fragmentation: Share of weights, gradients and states that is lost, as in a workload.
    """

    gradient_bytes: int
    reduce_bytes: int
    state_bytes: int
    split_sends: bool = False
    ring_attention: bool = True
    regathers_inputs: bool = True
    fused_gate: bool = False
    update_bytes: int = 4
    boundary_copies: int = 0
    overlap: float = 0.0
    sharded_overlap: float | None = None
    send_overlap: float = 0.0
    bucket_bytes: int = 0
    gathered_bytes: int = 0
    reduces_in_stages: bool = True
    whole_reductions: bool = False
    gathers_each_microbatch: bool = False
    whole_passes_bytes: int = 0
    cudnn_attention: bool = False
    vocabulary_multiple: int = 1
    stored_fragmentation: float = 0.0


#: ``reduce_bucket_size`` and ``stage3_max_live_parameters``, 5e8 and 1e9 numbers of 16 bits by default
#: (DeepSpeed's page on its configuration).
_DEEPSPEED_BUCKET, _DEEPSPEED_LIVE = 2 * 500_000_000, 2 * 1_000_000_000

#: Part of communication that is hidden where a framework prefetches weights and reduces gradients beside
#: compute: what runs beside it is slower by 18.9 % on average (Lee et al., arXiv:2507.03114, abstract).
HIDDEN = 0.81

_DEEPSPEED = TargetDefaults(
    2,
    2,
    12,
    split_sends=True,
    sharded_overlap=HIDDEN,
    boundary_copies=1,
    bucket_bytes=_DEEPSPEED_BUCKET,
    gathered_bytes=_DEEPSPEED_LIVE,
    whole_reductions=True,
    # It flattens weights and gradients after they are made. Megatron-DeepSpeed's runs of 176 billion
    # parameters held 1.3 times what their tensors add up to (BigScience, chronicles of its 176B model, 2022).
    stored_fragmentation=0.15,
)

_MEGATRON = TargetDefaults(
    4,
    4,
    12,
    send_overlap=HIDDEN,
    whole_passes_bytes=16,
    fused_gate=True,
    update_bytes=0,
    cudnn_attention=True,
    vocabulary_multiple=128,
)

TARGETS = {
    Target.MEGATRON_BF16: _MEGATRON,
    Target.MEGATRON_FP16: replace(
        _MEGATRON, gradient_bytes=2, reduce_bytes=2, state_bytes=16, whole_passes_bytes=6
    ),
    Target.DEEPSPEED_BF16: replace(_DEEPSPEED, gradient_bytes=6, update_bytes=0),
    # Gradients of its partition are copied to float32 for the step.
    Target.DEEPSPEED_FP16: _DEEPSPEED,
    # The sharded weight is in float32: two bytes of it beside those in the compute dtype, and two moments.
    Target.FSDP: TargetDefaults(
        4,
        4,
        10,
        ring_attention=False,
        # Autograd saves inputs as PrepareModuleInput and ColwiseParallel have gathered them.
        regathers_inputs=False,
        overlap=HIDDEN,
        reduces_in_stages=False,
        gathers_each_microbatch=True,
    ),
}


def as_trained_by(workload: Workload, target: Target) -> Workload:
    """The workload with what a framework keeps per parameter.

    >>> from osdp.cluster.known_transformers import shape_of
    >>> kept = as_trained_by(Workload(shape=shape_of("gpt2"), global_batch=8), Target.MEGATRON_BF16)
    >>> kept.weight_bytes + kept.gradient_bytes + kept.state_bytes
    18
    """
    defaults = TARGETS[target]
    return replace(workload, **{field.name: getattr(defaults, field.name) for field in fields(defaults)})
