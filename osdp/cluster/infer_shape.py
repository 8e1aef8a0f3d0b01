"""Dimensions of a transformer inferred from the weights and activations of a ModelDesc."""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.cluster.transformer import Item, TransformerShape
from osdp.model.description import ModelDesc, Operator, Parameter, TensorSpec

#: Tolerated relative difference between a layer's parameters and those of its shape, for norms and the like.
_CLOSE = 0.02


@dataclass(frozen=True, slots=True)
class _Layer:
    """Widths of a layer: queries, keys and feed-forward block, and its number of up-projections."""

    queries: int
    keys: int
    inner: int
    ups: int


def shape_of_desc(
    model_desc: ModelDesc, *, heads: int, causal: bool, name: str | None = None
) -> TransformerShape:
    """Infer the shape of a decoder or an encoder from its description.

    Args:
        model_desc: Description of the model; its blocks are the layers.
        heads: Attention heads, which cannot be inferred from weights.
        causal: Whether attention is causal, likewise.
        name: Name of the shape; that of the description if ``None``.

    Raises:
        ValueError: Its blocks are not layers of one self-attention and one feed-forward block.
    """
    _, sequence, hidden = stream_of(model_desc).shape
    blocks = list(model_desc.block_segments)
    inside = model_desc.block_segments[blocks[0]]
    owned = [parameter for op in model_desc.operators if op.block == blocks[0] for parameter in op.parameters]
    layer = _layer([p.shape for p in owned if len(p.shape) == 2], hidden)
    if layer is None or layer.queries % heads or layer.keys % (layer.queries // heads):
        raise ValueError(
            f"the weights of {blocks[0]} ({', '.join(str(p.shape) for p in owned if len(p.shape) == 2)}) are "
            f"not those of one attention with {heads} heads and one feed-forward block on {hidden} channels; "
            "specify the fields of a TransformerShape instead"
        )
    table = _embedding(model_desc, inside[0], hidden)
    width = layer.queries // heads
    shape = TransformerShape(
        name=name or model_desc.name,
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocabulary=table.shape[0],
        feed_forward=layer.inner,
        kv_heads=layer.keys // width,
        head_width=0 if width * heads == hidden else width,
        gated=layer.ups == 2,
        biases=any(len(p.shape) == 1 and p.shape[0] == layer.inner for p in owned),
        positions=_positions(model_desc, inside[0], hidden, table),
        tied=bool(table.aliases),
        causal=causal,
    )
    held = sum(parameter.numel for parameter in owned)
    if abs(shape.parameters(Item.LAYER) / held - 1) > _CLOSE:
        raise ValueError(
            f"{blocks[0]} has {held} parameters, but {shape.parameters(Item.LAYER)} by its widths: it is not "
            "just one attention and one feed-forward block"
        )
    return shape


def stream_of(model_desc: ModelDesc) -> TensorSpec:
    """Residual stream: the output of a layer, a tensor of shape ``(samples, tokens, channels)``.

    Raises:
        ValueError: The model has no blocks, or their output has another shape.
    """
    if not model_desc.block_segments:
        raise ValueError(f"{model_desc.name} has no repeated blocks, which are the layers of a transformer")
    last = next(iter(model_desc.block_segments.values()))[-1]
    outputs = model_desc.segments[last].outputs
    if not outputs or len(outputs[0].shape) != 3:
        raise ValueError(
            f"a layer of {model_desc.name} has outputs of shapes {[spec.shape for spec in outputs]}; the "
            "first of a transformer's must be (samples, tokens, channels)"
        )
    return outputs[0]


def _layer(weights: Sequence[tuple[int, ...]], hidden: int) -> _Layer | None:
    """Widths from the weights of a layer, either all of shape ``(out, in)`` or all ``(in, out)``.

    Weights that write to the stream have ``out == hidden``: the attention output (``in`` is the queries'
    width) and the down-projection (``in`` is the feed-forward width, the largest). Weights that read from it
    have ``in == hidden``: queries, keys and values, separate or fused, and one or two up-projections.
    """
    for turned in (False, True):  # nn.Linear, then Conv1D of Transformers
        pairs = [tuple(reversed(shape)) if turned else shape for shape in weights]
        to_stream = [into for out, into in pairs if out == hidden]
        if not to_stream:
            continue
        inner = max(to_stream)
        # The largest is the down-projection; of the rest, the attention output's width differs from hidden
        # only with a head width of its own.
        others = sorted(to_stream)[:-1]
        queries = next((into for into in others if into != hidden), hidden)
        from_stream = [out for out, into in pairs if into == hidden]
        if inner == hidden or (queries == hidden and hidden not in from_stream):
            continue
        # Up-projections are inner wide, or 2 * inner if gate and up are fused. The rest is queries, keys and
        # values in any fusion, without an attention output of hidden x hidden, which is in both lists.
        ups = sum(out for out in from_stream if out in (inner, 2 * inner)) // inner
        rest = sum(from_stream) - ups * inner - (hidden if queries == hidden else 0)
        keys, odd = divmod(rest - queries, 2)
        if ups in (1, 2) and not odd and 0 < keys <= queries:
            return _Layer(queries, keys, inner, ups)
    return None


def _before(model_desc: ModelDesc, first: int) -> list[Operator]:
    """Operators that run before segment ``first``, outside of blocks."""
    return [op for op in model_desc.operators if op.executed and op.block is None and op.first < first]


def _embedding(model_desc: ModelDesc, first: int, hidden: int) -> Parameter:
    tables = [
        parameter
        for op in _before(model_desc, first)
        for parameter in op.parameters
        if len(parameter.shape) == 2 and parameter.shape[1] == hidden
    ]
    if not tables:
        raise ValueError(f"{model_desc.name} has no embedding of {hidden} channels before its first layer")
    return max(tables, key=lambda parameter: parameter.shape[0])


def _positions(model_desc: ModelDesc, first: int, hidden: int, table: Parameter) -> int:
    """Rows of the other embeddings: positions and token types."""
    return sum(
        parameter.shape[0]
        for op in _before(model_desc, first)
        for parameter in op.parameters
        if len(parameter.shape) == 2 and parameter.shape[1] == hidden and parameter != table
    )
