"""What one rank computes, keeps and exchanges for one microbatch of an item of a transformer.

Tensor parallelism as in Shoeybi et al., "Megatron-LM" (arXiv:1909.08053, section 3): each layer sums its
output over the ranks once for attention and once for the feed-forward block, forward and backward. Bytes that
are kept for backward follow Korthikanti et al. (arXiv:2205.05198, section 4.1): the terms of their
``s b h (10 + 24 / t + 5 a s / (h t))`` are taken apart here, for other widths than ``4 h`` and for attention
that never writes its scores (Dao et al., arXiv:2205.14135).
"""

from dataclasses import dataclass

from osdp.transformer import Item, TransformerShape

#: Bytes of a number in 16 and in 32 bits; losses are computed in 32.
HALF, SINGLE = 2, 4


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product of matrices of ``rows x inner`` and ``inner x columns``, ``count`` times over.

    Numbers have ``width`` bytes each.

    ``fused`` is one of a kernel that reads and writes no scores (FlashAttention, Dao et al.,
    arXiv:2205.14135): its other bytes are counted with those of the layer.
    """

    rows: int
    columns: int
    inner: int
    count: int = 1
    fused: bool = False
    width: int = HALF

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.count * self.rows * self.columns * self.inner

    @property
    def moved_bytes(self) -> int:
        """Both factors and the result, each once."""
        if self.fused:
            return 0
        rows, columns, inner = self.rows, self.columns, self.inner
        return self.width * self.count * (rows * inner + columns * inner + rows * columns)

    @property
    def gradients(self) -> "tuple[Gemm, Gemm]":
        """The products that give the gradients of both factors."""
        return (
            Gemm(self.rows, self.inner, self.columns, self.count, self.fused, self.width),
            Gemm(self.inner, self.columns, self.rows, self.count, self.fused, self.width),
        )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One microbatch of one item on one rank; a backward does each product twice, for both of its inputs.

    Attributes:
        gemms: Products of a forward.
        attention: Those of them that compute scores and what they weigh, which selective recomputation
            repeats.
        moved_bytes: Read and written in a forward by all else.
        backward_bytes: Read and written in a backward by all else, to add up gradients as well.
        kernels: Kernels that a forward launches.
        sums: All-reduces over the tensor-parallel ranks in a forward, and as many in a backward.
        summed_bytes: Of each of them.
        kept_bytes: Kept for backward.
        score_bytes: Of these, what selective recomputation does not keep.
        input_bytes: What is kept where the item is recomputed.
        working_bytes: There during its own backward only, beside what was kept.
        output_bytes: What it hands on.
        cache_bytes: Keys and values, which later slices of the sequence need.
    """

    gemms: tuple[Gemm, ...]
    attention: tuple[Gemm, ...]
    moved_bytes: int
    backward_bytes: int
    kernels: int
    sums: int
    summed_bytes: int
    kept_bytes: int
    score_bytes: int
    input_bytes: int
    working_bytes: int
    output_bytes: int
    cache_bytes: int = 0


def layer_work(
    shape: TransformerShape,
    item: Item,
    samples: int,
    tp: int,
    *,
    flash: bool = True,
    slices: int = 1,
    width: int = HALF,
) -> LayerWork:
    """The work of one item on one slice of the sequences.

    Every slice counts as the last one, which attends to all keys. Of whole sequences of causal models flash
    attention computes half of the scores.

    Args:
        shape: The model.
        item: Which item.
        samples: Of a microbatch.
        tp: Tensor-parallel ranks.
        flash: Whether scores of attention stay in registers.
        slices: Equal slices that sequences are cut into.
        width: Bytes of an activation or a weight as it is computed with.
    """
    tokens = samples * shape.sequence // slices
    match item:
        case Item.EMBEDDING | Item.TARGET_EMBEDDING:
            return _embedding(shape, item, tokens, tp, width)
        case Item.HEAD:
            return _head(shape, tokens, tp, width)
        case Item.LAYER | Item.CROSS_LAYER:
            return _layer(shape, item, samples, tp, flash, slices, width)


def _embedding(shape: TransformerShape, item: Item, tokens: int, tp: int, width: int) -> LayerWork:
    stream = tokens * shape.hidden * width
    indices = 8 * tokens
    # Autograd makes the gradient of an embedding dense and adds it to what is there.
    weight = -(-shape.vocabulary // tp) * shape.hidden * width
    return LayerWork(
        gemms=(),
        attention=(),
        moved_bytes=8 * stream,
        backward_bytes=5 * stream + 4 * weight,
        kernels=5,
        sums=int(tp > 1),
        summed_bytes=stream,
        kept_bytes=indices,
        score_bytes=0,
        input_bytes=indices,
        working_bytes=stream,
        # What an encoder gave goes on beside the decoder's own stream.
        output_bytes=stream * (2 if item is Item.TARGET_EMBEDDING else 1),
    )


def _layer(
    shape: TransformerShape, item: Item, samples: int, tp: int, flash: bool, slices: int, width: int
) -> LayerWork:
    attentions = 2 if item is Item.CROSS_LAYER else 1
    s, length = shape.sequence, shape.sequence // slices
    tokens = samples * length
    stream = tokens * shape.hidden * width
    heads = shape.heads // tp
    queries = heads * shape.width
    keys = max(shape.key_heads // tp, 1) * shape.width
    inner = shape.inner // tp
    ups = 2 if shape.gated else 1
    seen = s // 2 if flash and shape.causal and slices == 1 else s
    scores = (
        Gemm(length, seen, shape.width, samples * heads, flash, width),
        Gemm(length, shape.width, seen, samples * heads, flash, width),
    ) * attentions
    gemms = (
        *(
            Gemm(tokens, queries + 2 * keys, shape.hidden, width=width),
            Gemm(tokens, shape.hidden, queries, width=width),
        )
        * attentions,
        *scores,
        Gemm(tokens, ups * inner, shape.hidden, width=width),
        Gemm(tokens, shape.hidden, inner, width=width),
    )
    wide = tokens * width
    # Beside the stream's own tensors: inputs of the projections, queries, keys, values and what they give.
    attention_kept = wide * (2 * queries + 2 * keys)
    feed_kept = wide * inner * (ups + 1 + int(shape.gated))
    # Of each score: the probabilities, a mask of one byte, the dropped ones.
    score_bytes = 0 if flash else samples * heads * length * s * (2 * width + 1) * attentions
    # Inputs of two norms and of two blocks of products, and two masks of dropout of one byte.
    masks = tokens * shape.hidden
    stream_kept = (attentions + 1) * (2 * stream + masks)
    kept = stream_kept + attention_kept * attentions + feed_kept + score_bytes
    # Forward: norms, residuals with dropout, and copies of queries, keys and values and of what they give.
    moved = (attentions + 1) * (5 * stream + masks)
    moved += attentions * wide * (2 * (queries + 2 * keys) + 2 * queries)
    # Backward: the same, and sums of biases' gradients and of both branches of each residual.
    back = (attentions + 1) * (9 * stream + masks)
    back += attentions * wide * (3 * (queries + 2 * keys) + 2 * queries)
    # The activation, and softmax and dropout of the scores.
    moved += wide * inner * (ups + 1)
    back += wide * inner * (3 * ups + 1)
    fused = flash or _softmax_is_fused(samples * heads, s)
    if not flash:
        scores_written = samples * heads * length * s * attentions
        # One kernel for scale, mask and softmax, or in 32 bits: widened, scaled, masked, softmax, narrowed.
        moved += scores_written * (5 + (4 if fused else 36))
        back += scores_written * (5 + (6 if fused else 40))
    # A weight's gradient is added to that of the microbatches before.
    back += 3 * sum(gemm.columns * gemm.inner for gemm in gemms if gemm.count == 1) * width
    kernels = 9 * attentions + 7 + (2 * int(not flash) + 4 * int(not fused)) * attentions
    input_bytes = stream * (2 if item is Item.CROSS_LAYER else 1)
    return LayerWork(
        gemms=gemms,
        attention=scores,
        moved_bytes=moved,
        backward_bytes=back,
        kernels=kernels,
        sums=(attentions + 1) * int(tp > 1),
        summed_bytes=stream,
        kept_bytes=kept,
        score_bytes=score_bytes,
        input_bytes=input_bytes,
        working_bytes=2 * stream + wide * (ups * inner + queries + 2 * keys),
        output_bytes=input_bytes,
        cache_bytes=2 * wide * keys,
    )


def _softmax_is_fused(matrices: int, sequence: int) -> bool:
    """Whether Megatron-LM's kernel takes that many matrices of scores (its ``fused_softmax.py``)."""
    return 16 < sequence <= 2048 and sequence % 4 == 0 and matrices % 4 == 0


def _head(shape: TransformerShape, tokens: int, tp: int, width: int) -> LayerWork:
    stream = tokens * shape.hidden * width
    vocabulary = -(-shape.vocabulary // tp)
    logits = tokens * vocabulary
    return LayerWork(
        gemms=(Gemm(tokens, vocabulary, shape.hidden, width=width),),
        attention=(),
        # The softmax of the logits is read twice and written once, in its backward as well.
        moved_bytes=2 * stream + 3 * logits * width,
        backward_bytes=3 * stream + 3 * logits * width + 3 * vocabulary * shape.hidden * width,
        kernels=8,
        # The stream's gradient is summed over the ranks; forward exchanges numbers of tokens only.
        sums=int(tp > 1),
        summed_bytes=stream,
        kept_bytes=2 * stream + logits * (width + SINGLE),
        score_bytes=0,
        input_bytes=stream,
        working_bytes=logits * SINGLE,
        output_bytes=0,
    )
