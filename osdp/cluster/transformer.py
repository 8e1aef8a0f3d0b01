"""TransformerShape: dimensions of a transformer, a chain of an embedding, layers and a head."""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property


class Item(StrEnum):
    """Items of the chain, between which stages can be cut.

    - ``EMBEDDING``: token embedding, and position embedding if learnt.
    - ``LAYER``: self-attention and a feed-forward block.
    - ``EXPERT_LAYER``: the same with a feed-forward block of experts, of which each token visits a few.
    - ``TARGET_EMBEDDING``: embedding of the decoder's tokens in an encoder-decoder.
    - ``CROSS_LAYER``: decoder layer with self-attention, cross-attention and a feed-forward block.
    - ``HEAD``: last norm, logits and loss.
    """

    EMBEDDING = "embedding"
    LAYER = "layer"
    EXPERT_LAYER = "expert_layer"
    TARGET_EMBEDDING = "target_embedding"
    CROSS_LAYER = "cross_layer"
    HEAD = "head"


#: Items that are repeated layers.
LAYERS = (Item.LAYER, Item.EXPERT_LAYER, Item.CROSS_LAYER)


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
        kv_latent: Width that keys and values are projected to before they are projected to heads: latent
            attention (DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, section 2.1); 0 for ordinary attention.
        query_latent: The same for queries; 0 if they are projected to heads directly.
        rotary_width: Channels with rotary positions that each head of latent attention has beside
            ``head_width``, whose key all heads share.
        value_width: Channels per head of values in latent attention; as ``head_width`` if 0.
        head_norms: Whether the queries and keys of each head are normalised.
        gated: Whether feed-forward blocks multiply two projections (GLU).
        biases: Whether linear layers have biases.
        qkv_biases: Whether projections to queries, keys and values have biases, whatever others have.
        positions: Number of learnt position embeddings; 0 if there are none.
        tied: Whether head and embedding share their weight.
        causal: Whether attention is causal.
        decoder_layers: Number of decoder layers of an encoder-decoder; 0 for any other model.
        rotary_base: Base of the wavelengths of rotary positions; 0 without them, or for the usual 10000.
        dropout: Whether its layers are trained with dropout.
        experts: Feed-forward blocks of a layer of which each token visits some; 0 for dense layers.
        experts_per_token: How many of them a token visits.
        expert_width: Width inside an expert; that inside feed-forward blocks if 0.
        shared_width: Width inside all experts together that every token visits beside those; 0 for none.
        dense_layers: Layers at the beginning that have one feed-forward block, no experts.
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
    kv_latent: int = 0
    query_latent: int = 0
    rotary_width: int = 0
    value_width: int = 0
    head_norms: bool = False
    gated: bool = False
    biases: bool = True
    qkv_biases: bool = False
    positions: int = 0
    tied: bool = True
    causal: bool = True
    decoder_layers: int = 0
    rotary_base: int = 0
    dropout: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense_layers: int = 0

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
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        if wrong := [
            f"{name}={size}" for name, size in sizes.items() if not isinstance(size, str) and size < 0
        ]:
            raise ValueError(
                f"model {self.name!r} has dimensions that cannot be negative: got {', '.join(wrong)}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name!r}: {self.kv_heads} key-value heads do not divide its {self.heads} heads"
            )
        if not self.head_width and self.hidden % self.heads:
            raise ValueError(
                f"model {self.name!r}: {self.heads} heads do not divide a hidden size of {self.hidden}; "
                "give head_width"
            )
        self._check_latent()
        self._check_experts()

    def _check_latent(self) -> None:
        given = [name for name in ("query_latent", "rotary_width", "value_width") if getattr(self, name)]
        if given and not self.kv_latent:
            raise ValueError(
                f"model {self.name!r} has no latent attention; {', '.join(given)} need kv_latent"
            )
        if self.kv_latent and self.head_norms:
            raise ValueError(
                f"model {self.name!r}: latent attention has norms of its latents, not of heads (head_norms)"
            )
        if self.kv_latent and (self.key_heads != self.heads or self.decoder_layers or self.biases):
            raise ValueError(
                f"model {self.name!r}: latent attention has a key for each head and no biases, and encoder-"
                "decoders with it are not supported"
            )

    def _check_experts(self) -> None:
        fields_of_experts = ("experts_per_token", "expert_width", "shared_width", "dense_layers")
        if not self.experts:
            given = [f"{name}={value}" for name in fields_of_experts if (value := getattr(self, name))]
            if given:
                raise ValueError(f"model {self.name!r} has no experts; {', '.join(given)} need experts")
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"model {self.name!r}: a token visits 1 to {max(self.experts, 1)} of experts={self.experts}, "
                f"but experts_per_token={self.experts_per_token}"
            )
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"model {self.name!r}: dense_layers={self.dense_layers} leaves none of its {self.layers} "
                "layers for experts"
            )
        if self.decoder_layers:
            raise ValueError(f"model {self.name!r}: encoder-decoders with experts are not supported")
        if min(self.expert_width, self.shared_width) < 0:
            raise ValueError(f"model {self.name!r}: widths of experts cannot be negative")

    @property
    def inner(self) -> int:
        """Width inside feed-forward blocks."""
        return self.feed_forward or 4 * self.hidden

    @property
    def expert_inner(self) -> int:
        """Width inside an expert."""
        return self.expert_width or self.inner

    @property
    def key_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Channels per head, without those of latent attention that have rotary positions."""
        return self.head_width or self.hidden // self.heads

    @property
    def key_width(self) -> int:
        """Channels per head of queries and keys."""
        return self.width + self.rotary_width

    @property
    def head_values(self) -> int:
        """Channels per head of values."""
        return self.value_width or self.width

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Items of the chain, in order."""
        decoder = (Item.TARGET_EMBEDDING, *(Item.CROSS_LAYER,) * self.decoder_layers)
        return (
            Item.EMBEDDING,
            *(Item.LAYER,) * (self.dense_layers if self.experts else self.layers),
            *(Item.EXPERT_LAYER,) * (self.layers - self.dense_layers if self.experts else 0),
            *(decoder if self.decoder_layers else ()),
            Item.HEAD,
        )

    def parameters(self, item: Item, tp: int = 1, ep: int = 1) -> int:
        """Parameter count of one item on one of ``tp`` tensor-parallel and ``ep`` expert-parallel ranks.

        Norms and the biases of row-parallel layers are replicated on all ranks. The vocabulary is padded to a
        multiple of ``tp``. A tied head counts its weight, because it has a copy if embedding and head are in
        different stages.
        """
        h, v = self.hidden, -(-self.vocabulary // tp)
        bias = int(self.biases)
        norm = h * (1 + bias)
        attention = self._attention(tp) + norm
        feed = self._feed_forward(self.inner, tp) + norm
        match item:
            case Item.EMBEDDING:
                return v * h + self.positions * h
            case Item.TARGET_EMBEDDING:
                return v * h
            case Item.LAYER:
                return attention + feed
            case Item.EXPERT_LAYER:
                shared = self._feed_forward(self.shared_width, tp) if self.shared_width else 0
                router = h * self.experts
                return attention + norm + router + shared + self.expert_parameters(item, tp, ep)
            case Item.CROSS_LAYER:
                return 2 * attention + feed
            case Item.HEAD:
                return v * h + norm

    def expert_parameters(self, item: Item, tp: int = 1, ep: int = 1) -> int:
        """The part of :meth:`parameters` that is of experts, which ``ep`` ranks divide among them."""
        if item is not Item.EXPERT_LAYER:
            return 0
        return self.experts // ep * self._feed_forward(self.expert_inner, tp)

    def _attention(self, tp: int) -> int:
        # Column-parallel layers (queries, keys, values; up-projections) split their bias with their outputs,
        # row-parallel ones (attention output, down-projection) have the whole bias.
        h, bias = self.hidden, int(self.biases)
        queries, values = self.heads * self.key_width, self.key_heads * self.head_values
        norms = 2 * self.width * int(self.head_norms)
        output = self.heads * self.head_values * h // tp + bias * h
        if not self.kv_latent:
            inputs = h + int(self.biases or self.qkv_biases)
            return (queries + self.key_heads * self.key_width + values) * inputs // tp + norms + output
        # Projections to latents, with a norm each, are on every rank.
        down = (self.query_latent + self.kv_latent) * (h + 1) + self.rotary_width * h
        up = queries * (self.query_latent or h) + self.kv_latent * (self.heads * self.width + values)
        return down + up // tp + output

    def _feed_forward(self, inner: int, tp: int) -> int:
        h, bias = self.hidden, int(self.biases)
        return (2 if self.gated else 1) * inner * (h + bias) // tp + inner * h // tp + bias * h

    @property
    def num_parameters(self) -> int:
        """Parameter count of the model; tied parameters count once."""
        total = sum(self.parameters(item) for item in self.items)
        return total - self.tied_copies * self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of experts those that it visits."""
        if not self.experts:
            return self.num_parameters
        visited = self.experts_per_token / self.experts
        idle = sum(round((1 - visited) * self.expert_parameters(item)) for item in self.items)
        return self.num_parameters - idle

    @cached_property
    def tied_items(self) -> frozenset[Item]:
        """Items that share the embedding's weight, including it: a tied head, and the decoder's embedding."""
        head = {Item.HEAD} if self.tied else set()
        return frozenset({Item.EMBEDDING, Item.TARGET_EMBEDDING, *head}.intersection(self.items))

    @property
    def tied_copies(self) -> int:
        """Number of items that share the embedding's weight, not counting the embedding itself."""
        return len(self.tied_items) - 1
