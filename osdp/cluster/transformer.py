"""TransformerShape: dimensions of a transformer, a chain of an embedding, layers and a head."""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property


class Item(StrEnum):
    """Items of the chain, between which stages can be cut.

    - ``EMBEDDING``: token embedding, and position embedding if learnt.
    - ``LAYER``: self-attention and a feed-forward block.
    - ``TARGET_EMBEDDING``: embedding of the decoder's tokens in an encoder-decoder.
    - ``CROSS_LAYER``: decoder layer with self-attention, cross-attention and a feed-forward block.
    - ``HEAD``: last norm, logits and loss.
    """

    EMBEDDING = "embedding"
    LAYER = "layer"
    TARGET_EMBEDDING = "target_embedding"
    CROSS_LAYER = "cross_layer"
    HEAD = "head"


#: Items that are repeated layers.
LAYERS = (Item.LAYER, Item.CROSS_LAYER)


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Dimensions of a transformer.

    Attributes:
        name: Name of the model.
        layers: Number of layers; those of the encoder in an encoder-decoder.
        hidden: Width of the residual stream.
        heads: Attention heads.
        sequence: Tokens per sample; the same on both sides of an encoder-decoder.
        vocabulary: Entries of the token embedding.
        feed_forward: Width inside feed-forward blocks; four times ``hidden`` if 0.
        kv_heads: Key-value heads; equal to ``heads`` if 0.
        head_width: Channels per head; ``hidden / heads`` if 0.
        gated: Whether feed-forward blocks multiply two projections (GLU).
        biases: Whether linear layers have biases.
        positions: Number of learnt position embeddings; 0 if there are none.
        tied: Whether head and embedding share their weight.
        causal: Whether attention is causal.
        decoder_layers: Number of decoder layers of an encoder-decoder; 0 for any other model.
        rotary_base: Base of the wavelengths of rotary positions; 0 without them, or for the usual 10000.
        dropout: Whether its layers are trained with dropout.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    biases: bool = True
    positions: int = 0
    tied: bool = True
    causal: bool = True
    decoder_layers: int = 0
    rotary_base: int = 0
    dropout: bool = True

    def __post_init__(self) -> None:
        kinds = {"int": int, "bool": bool, "str": str}
        odd = [
            f"{field.name}={getattr(self, field.name)!r} is not of type "
            f"{getattr(field.type, '__name__', field.type)}"
            for field in fields(self)
            if type(getattr(self, field.name)) is not kinds[str(getattr(field.type, "__name__", field.type))]
        ]
        if odd:
            raise ValueError(f'model {self.name!r}: {", ".join(odd)} (JSON writes 12, true, "name")')
        names = ("layers", "hidden", "heads", "sequence", "vocabulary")
        wrong = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"model {self.name!r} needs at least 1 of each, got {', '.join(wrong)}")
        if not self.head_width and self.hidden % self.heads:
            raise ValueError(
                f"model {self.name!r}: {self.heads} heads do not divide a hidden size of {self.hidden}; "
                "give head_width"
            )

    @property
    def inner(self) -> int:
        """Width inside feed-forward blocks."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Channels per head."""
        return self.head_width or self.hidden // self.heads

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Items of the chain, in order."""
        decoder = (Item.TARGET_EMBEDDING, *(Item.CROSS_LAYER,) * self.decoder_layers)
        return (
            Item.EMBEDDING,
            *(Item.LAYER,) * self.layers,
            *(decoder if self.decoder_layers else ()),
            Item.HEAD,
        )

    def parameters(self, item: Item, tp: int = 1) -> int:
        """Parameter count of one item on one of ``tp`` tensor-parallel ranks.

        Norms and the biases of row-parallel layers are replicated on all ranks. The vocabulary is padded to a
        multiple of ``tp``. A tied head counts its weight, because it has a copy if embedding and head are in
        different stages.
        """
        h, v = self.hidden, -(-self.vocabulary // tp)
        bias = int(self.biases)
        norm = h * (1 + bias)
        # Column-parallel layers (queries, keys, values; up-projections) split their bias with their outputs,
        # row-parallel ones (attention output, down-projection) have the whole bias.
        queries, keys = self.heads * self.width, self.key_heads * self.width
        column = (queries + 2 * keys) * (h + bias) // tp
        attention = column + queries * h // tp + bias * h + norm
        ups = 2 if self.gated else 1
        feed = ups * self.inner * (h + bias) // tp + self.inner * h // tp + bias * h + norm
        match item:
            case Item.EMBEDDING:
                return v * h + self.positions * h
            case Item.TARGET_EMBEDDING:
                return v * h
            case Item.LAYER:
                return attention + feed
            case Item.CROSS_LAYER:
                return 2 * attention + feed
            case Item.HEAD:
                return v * h + norm

    @property
    def num_parameters(self) -> int:
        """Parameter count of the model; tied parameters count once."""
        total = sum(self.parameters(item) for item in self.items)
        return total - self.tied_copies * self.vocabulary * self.hidden

    @cached_property
    def tied_items(self) -> frozenset[Item]:
        """Items that share the embedding's weight, including it: a tied head, and the decoder's embedding."""
        head = {Item.HEAD} if self.tied else set()
        return frozenset({Item.EMBEDDING, Item.TARGET_EMBEDDING, *head}.intersection(self.items))

    @property
    def tied_copies(self) -> int:
        """Number of items that share the embedding's weight, not counting the embedding itself."""
        return len(self.tied_items) - 1
