"""Matrix products, memory traffic, activations and all-reduces of a transformer item on one rank.

Tensor parallelism is that of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053, section 3): each layer
all-reduces its output once for attention and once for the feed-forward block, in forward and in backward.
Bytes saved for backward follow Korthikanti et al. (arXiv:2205.05198, section 4.1): the terms of their
``s b h (10 + 24 / t + 5 a s / (h t))`` are separated here, to support feed-forward widths other than ``4 h``
and attention that never writes its scores (Dao et al., arXiv:2205.14135). With sequence parallelism (their
section 4.2.2) norms, dropouts and residuals are split over the tensor-parallel ranks as well, and the 10 is
``10 / t``. Its all-gathers and reduce-scatters move the bytes of the all-reduces that they replace.

Experts are those of Lepikhin et al., "GShard" (arXiv:2006.16668), without capacities, as in Megatron-LM: a
token is copied for each of its experts, the copies are sorted by expert and sent to the rank that has it, and
the results are sent back and added up. Tokens are taken to be spread evenly over experts.
"""

from dataclasses import dataclass, replace

from osdp.cluster.transformer import Item, TransformerShape

#: Bytes of a number in half and in single precision; losses are computed in single precision.
HALF, SINGLE = 2, 4


@dataclass(frozen=True, slots=True)
class Gemm:
    """A batch of ``count`` matrix products ``(rows, inner) @ (inner, columns)``.

    Numbers have ``width`` bytes each.

    ``fused`` marks a product inside a kernel that never reads or writes attention scores (FlashAttention, Dao
    et al., arXiv:2205.14135); the bytes of its other operands are counted with those of the layer.
    """

    rows: int
    columns: int
    inner: int
    count: int = 1
    fused: bool = False
    width: int = HALF

    @property
    def flops(self) -> float:
        """FLOPs: multiplications and additions."""
        return 2.0 * self.count * self.rows * self.columns * self.inner

    @property
    def moved_bytes(self) -> int:
        """Bytes of both factors and the result, each moved once."""
        if self.fused:
            return 0
        rows, columns, inner = self.rows, self.columns, self.inner
        return self.width * self.count * (rows * inner + columns * inner + rows * columns)

    @property
    def gradients(self) -> "tuple[Gemm, Gemm]":
        """The products that compute the gradients of both factors."""
        return (
            Gemm(self.rows, self.inner, self.columns, self.count, self.fused, self.width),
            Gemm(self.inner, self.columns, self.rows, self.count, self.fused, self.width),
        )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of one rank for one microbatch of one item; a backward has two products for each of a forward.

    Attributes:
        gemms: Matrix products of a forward.
        attention: The subset of ``gemms`` that computes attention scores and the weighted sum of values;
            selective recomputation repeats these.
        moved_bytes: Bytes read and written in a forward by all other operators.
        backward_bytes: Bytes read and written in a backward by all other operators, including gradient
            accumulation.
        kernels: Kernels launched by a forward.
        sums: All-reduces over the tensor-parallel ranks in a forward and its backward.
        forward_sums: Those of them that a recomputed forward repeats.
        summed_bytes: Bytes of each all-reduce.
        kept_bytes: Bytes saved for backward.
        score_bytes: Part of ``kept_bytes`` that selective recomputation does not save.
        input_bytes: Bytes saved if the item is fully recomputed: its input.
        working_bytes: Transient bytes of its own backward, in addition to those saved.
        output_bytes: Bytes of its output, the input of the next item.
        score_moved_bytes: Part of ``moved_bytes`` that selective recomputation repeats.
        cache_bytes: Keys and values of this part of the sequence, which other parts attend to as well.
        routed_bytes: Bytes of the tokens that a rank sends to experts, once for each of them.
    """

    gemms: tuple[Gemm, ...]
    attention: tuple[Gemm, ...]
    moved_bytes: int
    backward_bytes: int
    kernels: int
    sums: int
    forward_sums: int
    summed_bytes: int
    kept_bytes: int
    score_bytes: int
    input_bytes: int
    working_bytes: int
    output_bytes: int
    score_moved_bytes: int = 0
    cache_bytes: int = 0
    routed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a framework computes layers, as far as that changes what they move and keep.

    Attributes:
        width: Bytes of an activation or a weight in the compute dtype.
        flash: Whether attention is FlashAttention, which does not store its scores.
        sequence_parallel: Whether the residual stream is split over the tensor-parallel ranks.
        regathers_inputs: Whether inputs of products are then kept split, and gathered again for backward.
        dropout: Whether layers have dropouts, whose masks are kept.
        fused_gate: Whether a gated block keeps its two projections and their product alone.
        fused_loss: Whether logits become their gradient in place, in the compute dtype.
        ring_attention: Whether context-parallel ranks pass keys and values around a ring.
    """

    width: int = HALF
    flash: bool = True
    sequence_parallel: bool = False
    regathers_inputs: bool = True
    dropout: bool = True
    fused_gate: bool = False
    fused_loss: bool = False
    ring_attention: bool = True


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """Part of each sequence that a rank computes at a time; queries attend to the keys of the whole sequence.

    Attributes:
        slices: Number of equal token slices per sequence, one after the other.
        cp: Number of context-parallel ranks, each with an equal part. Causal attention gives each rank one
            part of the first half and its mirror image of the second, so that all compute equally much.
    """

    slices: int = 1
    cp: int = 1

    @property
    def number(self) -> int:
        """Number of parts."""
        return self.slices * self.cp


#: A sequence that is not divided.
WHOLE = SequenceParts()


def layer_work(
    shape: TransformerShape,
    item: Item,
    samples: int,
    tp: int,
    kernels: Kernels = Kernels(),
    *,
    parts: SequenceParts = WHOLE,
    ep: int = 1,
) -> LayerWork:
    """Work of one item on one token slice of a microbatch.

    Every slice is counted like the last one, which attends to all keys. For whole sequences of causal models,
    FlashAttention computes half of the scores, on context-parallel ranks as well.

    Args:
        shape: The model.
        item: Kind of item.
        samples: Samples of a microbatch.
        tp: Tensor-parallel degree.
        kernels: How the framework computes layers.
        parts: Division of each sequence.
        ep: Expert-parallel degree.
    """
    split = tp if kernels.sequence_parallel else 1
    tokens = samples * shape.sequence // parts.number
    match item:
        case Item.EMBEDDING | Item.TARGET_EMBEDDING:
            return _embedding(shape, item, tokens, tp, split, kernels)
        case Item.HEAD:
            return _head(shape, tokens, tp, split, kernels)
        case Item.LAYER | Item.CROSS_LAYER:
            return _layer(shape, item, samples, tp, parts, split, kernels, shape.inner)
        case Item.EXPERT_LAYER:
            shared = _layer(shape, item, samples, tp, parts, split, kernels, shape.shared_width)
            return _with_experts(shared, shape, tokens, tp, ep, split, kernels)


def _embedding(
    shape: TransformerShape, item: Item, tokens: int, tp: int, split: int, kernels: Kernels
) -> LayerWork:
    """Work of an embedding whose vocabulary is split over the tensor-parallel ranks."""
    width = kernels.width
    stream = tokens * shape.hidden * width
    indices = 8 * tokens  # int64
    # The gradient of an embedding is dense in autograd, and added to the accumulated one.
    weight = -(-shape.vocabulary // tp) * shape.hidden * width
    return LayerWork(
        gemms=(),
        attention=(),
        moved_bytes=8 * stream,
        backward_bytes=5 * stream + 4 * weight,
        kernels=5,
        # The stream is all-reduced in forward; its gradient is the same on all ranks.
        sums=int(tp > 1),
        forward_sums=int(tp > 1),
        summed_bytes=stream,
        # The mask of its dropout (Korthikanti et al., section 4.3).
        kept_bytes=indices + tokens * shape.hidden * int(kernels.dropout) // split,
        score_bytes=0,
        input_bytes=indices,
        working_bytes=stream + weight,
        # The encoder's output is passed on together with the decoder's own stream.
        output_bytes=stream // split * (2 if item is Item.TARGET_EMBEDDING else 1),
    )


def _layer(
    shape: TransformerShape,
    item: Item,
    samples: int,
    tp: int,
    parts: SequenceParts,
    split: int,
    kernels: Kernels,
    width_inside: int,
) -> LayerWork:
    """Work of a layer with one attention, or two in a cross-attention layer.

    Norms, dropouts and residuals are split into ``split``; its feed-forward block has ``width_inside``.
    """
    # 1. Sizes on one rank: ``stream`` is (tokens, hidden); heads and inner features are split over tp ranks.
    flash, width = kernels.flash, kernels.width
    attentions = 2 if item is Item.CROSS_LAYER else 1
    s, length = shape.sequence, shape.sequence // parts.number
    tokens = samples * length
    stream = tokens * shape.hidden * width
    heads, key_heads = shape.heads // tp, max(shape.key_heads // tp, 1)
    keys, values = key_heads * shape.key_width, key_heads * shape.head_values
    projected = heads * shape.key_width + keys + values
    output = heads * shape.head_values
    inner = width_inside // tp
    ups = 2 if shape.gated else 1
    # 2. Matrix products of a forward: attention scores and weighted sum, projections, feed-forward block.
    scores = _score_products(shape, samples * heads, parts, kernels) * attentions
    gemms = (*_projections(shape, tokens, tp, split, width, attentions, inner), *scores)
    wide = tokens * width
    # 3. Bytes saved for backward. Split over tp ranks: queries, keys, values, attention's output and the
    # tensors inside the feed-forward block, queries and keys once more before norms of their own. Latents
    # before their norms are split as the stream is, those after them whole.
    latents = shape.query_latent + shape.kv_latent
    normed = (projected - values) * int(shape.head_norms)
    attention_kept = wide * (projected + normed + output + latents + latents // split)
    feed_kept = wide * inner * (ups + 1 + int(shape.gated and not kernels.fused_gate))
    # Per score: its probability, and with dropout that after it and a mask of one byte.
    of_score = 2 * width + 1 if kernels.dropout else width
    score_bytes = 0 if flash else samples * heads * length * s * of_score * attentions
    # Of the stream, per block: the inputs of its norm and of its products, and a one-byte dropout mask.
    masks = tokens * shape.hidden * int(kernels.dropout)
    stream_kept = (attentions + 1) * (stream + masks) // split
    stream_kept += (attentions + 1) * stream // (split if kernels.regathers_inputs else 1)
    kept = stream_kept + attention_kept * attentions + feed_kept + score_bytes
    # 4. Memory traffic of the other operators. Forward: norms, residuals with dropout, and copies of queries,
    # keys, values and attention's output.
    moved = (attentions + 1) * (5 * stream + masks) // split
    moved += attentions * wide * (2 * projected + 2 * normed + 2 * output + 2 * latents)
    # Backward: the same, plus sums of bias gradients and of both branches of each residual.
    back = (attentions + 1) * (9 * stream + masks) // split
    back += attentions * wide * (3 * projected + 3 * normed + 2 * output + 4 * latents)
    # The activation function, then softmax and dropout of the scores.
    moved += wide * inner * (ups + 1)
    back += wide * inner * (3 * ups + 1)
    # Around a ring the outputs of all parts but the first are merged: read, and the sum read and written.
    merged = (parts.cp - 1 if kernels.ring_attention else 0) * attentions
    moved += merged * 3 * wide * output
    fused = flash or _softmax_is_fused(samples * heads, s)
    stored = 0 if flash else samples * heads * length * s * attentions
    there, again = _score_traffic(stored, fused, kernels.dropout)
    moved, back = moved + there, back + again
    # Each weight's gradient is accumulated into that of the earlier microbatches.
    back += 3 * sum(gemm.columns * gemm.inner for gemm in gemms if gemm.count == 1) * width
    input_bytes = stream // split * (2 if item is Item.CROSS_LAYER else 1)
    # 5. Transient bytes of the backward: gradients of the stream and of what is inside a block. Where scores
    # are stored there is their gradient, too; by then what the feed-forward block has saved is freed.
    gradients = 0 if flash else samples * heads * length * s * width
    working = 2 * stream + wide * projected + max(wide * ups * inner, gradients - feed_kept)
    return LayerWork(
        gemms=gemms,
        attention=scores,
        moved_bytes=moved,
        backward_bytes=back,
        # Each of these parts has its call of attention, two messages, and two that merge.
        kernels=_num_kernels(shape, attentions, flash, fused) + 4 * merged,
        sums=2 * (attentions + 1) * int(tp > 1),
        forward_sums=(attentions + 1) * int(tp > 1),
        summed_bytes=stream,
        kept_bytes=kept,
        score_bytes=score_bytes,
        input_bytes=input_bytes,
        working_bytes=working,
        output_bytes=input_bytes,
        score_moved_bytes=there,
        cache_bytes=wide * (keys + values),
    )


def _score_products(
    shape: TransformerShape, matrices: int, parts: SequenceParts, kernels: Kernels
) -> tuple[Gemm, Gemm]:
    """Attention scores, and the sum of values weighted by them, of so many heads and samples together."""
    s, length = shape.sequence, shape.sequence // parts.number
    seen = s // 2 if kernels.flash and shape.causal and parts.slices == 1 else s
    return (
        Gemm(length, seen, shape.key_width, matrices, kernels.flash, kernels.width),
        Gemm(length, shape.head_values, seen, matrices, kernels.flash, kernels.width),
    )


def _num_kernels(shape: TransformerShape, attentions: int, flash: bool, fused: bool) -> int:
    """Kernels of a forward beside its matrix products; ``fused`` as in :func:`_score_traffic`."""
    each = (9 if flash else _KERNELS_OF_SCORES) + 4 * int(not fused)
    # Projections to latents and their norms; rotary positions of a part, and copies that join both parts.
    latent = 4 * int(shape.query_latent > 0) + 6 * int(shape.kv_latent > 0)
    return each * attentions + 7 + latent + 2 * int(shape.head_norms)


def _score_traffic(scores: int, fused: bool, dropout: bool) -> tuple[int, int]:
    """Bytes that softmax and dropout of attention scores move in forward and in backward.

    Args:
        scores: Number of scores.
        fused: Whether scale, mask and softmax are one kernel; otherwise there are separate ones in float32:
            cast up, scale, mask, softmax, cast down.
        dropout: Whether there is dropout, which reads and writes each score, and a mask of one byte.
    """
    dropped = 5 * int(dropout)
    return scores * (dropped + (4 if fused else 36)), scores * (dropped + (6 if fused else 40))


def _projections(
    shape: TransformerShape, tokens: int, tp: int, split: int, width: int, attentions: int, inner: int
) -> tuple[Gemm, ...]:
    """Matrix products of a layer whose weights are split over the tensor-parallel ranks.

    ``inner`` features of a feed-forward block are on this rank; there may be no such block. Projections to
    latents have whole weights on every rank, for the tokens that it has of the residual stream.
    """
    heads, key_heads = shape.heads // tp, max(shape.key_heads // tp, 1)
    queries, values = heads * shape.key_width, key_heads * shape.head_values
    output = Gemm(tokens, shape.hidden, heads * shape.head_values, width=width)
    of_attention: tuple[Gemm, ...] = (
        Gemm(tokens, queries + key_heads * shape.key_width + values, shape.hidden, width=width),
        output,
    )
    if shape.kv_latent:
        own = tokens // split
        of_attention = (
            *([Gemm(own, shape.query_latent, shape.hidden, width=width)] * (shape.query_latent > 0)),
            Gemm(tokens, queries, shape.query_latent or shape.hidden, width=width),
            Gemm(own, shape.kv_latent + shape.rotary_width, shape.hidden, width=width),
            Gemm(tokens, heads * shape.width + values, shape.kv_latent, width=width),
            output,
        )
    of_feed_forward = (
        Gemm(tokens, (2 if shape.gated else 1) * inner, shape.hidden, width=width),
        Gemm(tokens, shape.hidden, inner, width=width),
    )
    return (*of_attention * attentions, *(of_feed_forward if inner else ()))


#: Kernels of an attention that stores its scores, whose softmax is one kernel; two fewer if it does not.
_KERNELS_OF_SCORES = 11

#: Rows of an expert's matrix products are padded to a multiple of this, which tensor cores want.
_PADDED = 8

#: Kernels of a forward that route tokens: probabilities, the largest of them, sorting and counting, copies
#: before and after each all-to-all. A count of the operators of Megatron-LM's token dispatcher, not measured.
_ROUTING_KERNELS = 16


def _with_experts(
    shared: LayerWork, shape: TransformerShape, tokens: int, tp: int, ep: int, split: int, kernels: Kernels
) -> LayerWork:
    """Add the router and the experts of one rank to the work of the rest of the layer.

    ``tokens`` of each rank visit experts of all ``ep`` ranks, so that as many copies come as go.
    """
    width, here, h = kernels.width, shape.experts // ep, shape.hidden
    copies = tokens * shape.experts_per_token
    routed = copies * h * width
    rows = -(-copies // here // _PADDED) * _PADDED
    inner = shape.expert_inner // tp
    ups = 2 if shape.gated else 1
    weights = (here * (ups + 1) * inner + shape.experts) * h * width
    inside = copies * inner * width
    scores = tokens * shape.experts * SINGLE // split
    return replace(
        shared,
        gemms=(
            *shared.gemms,
            Gemm(tokens // split, shape.experts, h, width=width),
            Gemm(rows, ups * inner, h, here, width=width),
            Gemm(rows, h, inner, here, width=width),
        ),
        # Copies are made, sorted, put back in order and added up, each read and written once.
        moved_bytes=shared.moved_bytes + 8 * routed // split + inside * (ups + 1) + 3 * scores,
        backward_bytes=shared.backward_bytes
        + 8 * routed // split
        + inside * (3 * ups + 1)
        + 3 * scores
        + 3 * weights,
        kernels=shared.kernels + _ROUTING_KERNELS,
        # Tensor-parallel ranks gather the copies, of which there are several for each token.
        # Beside those of attention and of a block that all tokens visit: half of them are counted as sums.
        summed_bytes=shared.summed_bytes * (1 + shape.experts_per_token + bool(shape.shared_width)) // 2,
        # The experts' inputs; the router's probabilities multiply what their activation function returns.
        kept_bytes=shared.kept_bytes
        + routed
        + inside * (ups + 1 + int(shape.gated and not kernels.fused_gate))
        + scores,
        working_bytes=shared.working_bytes + 2 * routed + ups * inside,
        routed_bytes=routed // split,
    )


def _softmax_is_fused(matrices: int, sequence: int) -> bool:
    """Whether Megatron-LM's fused kernel supports score matrices of this size (its ``fused_softmax.py``)."""
    return 16 < sequence <= 2048 and sequence % 4 == 0 and matrices % 4 == 0


def _head(shape: TransformerShape, tokens: int, tp: int, split: int, kernels: Kernels) -> LayerWork:
    """Work of the logits and the loss, with the vocabulary split over the tensor-parallel ranks."""
    width = kernels.width
    stream = tokens * shape.hidden * width
    vocabulary = -(-shape.vocabulary // tp)
    logits = tokens * vocabulary
    # Bytes that the loss moves of each logit. A fused softmax reads the logits twice and writes them once,
    # and so does its backward. One of several kernels casts them to float32, finds the largest, subtracts it,
    # exponentiates, adds up and divides, each a pass; its backward multiplies and casts back (Megatron-LM,
    # megatron/core/tensor_parallel/cross_entropy.py, 2022 to 2026).
    there, again = 3 * width, 3 * width
    if not kernels.fused_loss:
        there, again = width + 9 * SINGLE, 3 * SINGLE + width
    return LayerWork(
        gemms=(Gemm(tokens, vocabulary, shape.hidden, width=width),),
        attention=(),
        moved_bytes=2 * stream + logits * there,
        backward_bytes=3 * stream + logits * again + 3 * vocabulary * shape.hidden * width,
        kernels=8,
        # The stream's gradient is all-reduced; the forward exchanges a few numbers per token only.
        sums=int(tp > 1),
        forward_sums=0,
        summed_bytes=stream,
        kept_bytes=stream // split
        + stream // (split if kernels.regathers_inputs else 1)
        + logits * (width + (0 if kernels.fused_loss else SINGLE)),
        score_bytes=0,
        input_bytes=stream // split,
        working_bytes=0 if kernels.fused_loss else logits * SINGLE,
        output_bytes=0,
    )
