"""TransformerShape: a transformer by its few numbers, as a chain of an embedding, layers and a head."""

from dataclasses import dataclass, fields
from enum import StrEnum


class Item(StrEnum):
    """What a stage of a transformer can be cut between.

    - ``EMBEDDING``: of the tokens, and of positions where they are learnt.
    - ``LAYER``: self-attention and a feed-forward block.
    - ``TARGET_EMBEDDING``: of the decoder's tokens, in an encoder-decoder.
    - ``CROSS_LAYER``: a decoder's layer with attention to the encoder's output as well.
    - ``HEAD``: the last norm, the logits and the loss.
    """

    EMBEDDING = "embedding"
    LAYER = "layer"
    TARGET_EMBEDDING = "target_embedding"
    CROSS_LAYER = "cross_layer"
    HEAD = "head"


#: What a transformer repeats.
LAYERS = (Item.LAYER, Item.CROSS_LAYER)


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """A transformer.

    Attributes:
        name: What it is called.
        layers: Layers; of the encoder in an encoder-decoder.
        hidden: Width of the residual stream.
        heads: Heads of attention.
        sequence: Tokens of a sample; as many on both sides of an encoder-decoder.
        vocabulary: Entries of the embedding.
        feed_forward: Width inside feed-forward blocks; four times ``hidden`` if 0.
        kv_heads: Heads of keys and values; as many as ``heads`` if 0.
        head_width: Channels of a head; ``hidden / heads`` if 0.
        gated: Whether feed-forward blocks multiply two projections (GLU).
        biases: Whether linear layers have biases.
        positions: Learnt embeddings of positions; 0 if there are none.
        tied: Whether head and embedding share their weight.
        causal: Whether a token sees only those before it.
        decoder_layers: Layers with cross-attention of an encoder-decoder; 0 in any other model.
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

    def __post_init__(self) -> None:
        kinds = {"int": int, "bool": bool, "str": str}
        odd = [
            f"{field.name}={getattr(self, field.name)!r} is no {getattr(field.type, '__name__', field.type)}"
            for field in fields(self)
            if type(getattr(self, field.name)) is not kinds[str(getattr(field.type, "__name__", field.type))]
        ]
        if odd:
            raise ValueError(f'model {self.name!r}: {", ".join(odd)} (JSON writes 12, true, "name")')
        names = ("layers", "hidden", "heads", "sequence", "vocabulary")
        wrong = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"model {self.name!r} needs at least 1 of each, not {', '.join(wrong)}")
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
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def items(self) -> tuple[Item, ...]:
        """The chain, in order."""
        decoder = (Item.TARGET_EMBEDDING, *(Item.CROSS_LAYER,) * self.decoder_layers)
        return (
            Item.EMBEDDING,
            *(Item.LAYER,) * self.layers,
            *(decoder if self.decoder_layers else ()),
            Item.HEAD,
        )

    def parameters(self, item: Item, tp: int = 1) -> int:
        """Parameters of one item on one of ``tp`` ranks; norms and second biases are whole on each.

        Vocabularies are padded to a multiple of the ranks. A tied head counts its weight, too: it is a copy
        where embedding and head lie in different stages.
        """
        h, v = self.hidden, -(-self.vocabulary // tp)
        bias = int(self.biases)
        norm = h * (1 + bias)
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
        """Elements of all parameters, each tied one counted once."""
        total = sum(self.parameters(item) for item in self.items)
        return total - self.tied_copies * self.vocabulary * self.hidden

    @property
    def tied_items(self) -> frozenset[Item]:
        """Items that use the first one's weight, itself too: a tied head, and a decoder's embedding."""
        head = {Item.HEAD} if self.tied else set()
        return frozenset({Item.EMBEDDING, Item.TARGET_EMBEDDING, *head}.intersection(self.items))

    @property
    def tied_copies(self) -> int:
        """Items beside the first that use its weight."""
        return len(self.tied_items) - 1
