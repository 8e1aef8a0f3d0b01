"""LayerProfile: what was measured of the items of a transformer on one kind of device, one file each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from osdp import codec
from osdp.described_shape import stream_of
from osdp.model_desc import ModelDesc
from osdp.profile import Profile, SegmentProfile
from osdp.transformer import Item

LAYER_PROFILE_VERSION = 2


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Activations of one item with one microbatch on one rank.

    Attributes:
        item: Which kind of item.
        samples: Of the microbatch.
        sequence: Tokens of each.
        tp: Tensor-parallel ranks.
        kept_bytes: What a forward leaves for its backward.
        working_bytes: Most that is there during the backward beside it.
    """

    item: Item
    samples: int
    sequence: int
    tp: int
    kept_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One item with one microbatch on one rank.

    Attributes:
        item: Which kind of item.
        samples: Of the microbatch.
        sequence: Tokens of each.
        tp: Tensor-parallel ranks; their communication is not in the seconds.
        forward: Seconds of a forward.
        backward: Seconds of a backward.
        kept_bytes: Activations that a forward leaves for its backward.
        working_bytes: Most that is there during the backward beside them.
    """

    item: Item
    samples: int
    sequence: int
    tp: int
    forward: float
    backward: float
    kept_bytes: int
    working_bytes: int

    def __post_init__(self) -> None:
        found = (self.forward, self.backward, self.kept_bytes, self.working_bytes)
        if min(self.samples, self.sequence, self.tp) < 1 or min(found) < 0:
            raise ValueError(
                "a measured item has at least 1 sample, token and rank, and no negative seconds or bytes: "
                f"{self}"
            )


_Point = TypeVar("_Point", LayerBytes, LayerTime)


@dataclass(frozen=True)
class LayerProfile:
    """What was measured on one kind of device.

    Attributes:
        gpu: Name of the device, as in cluster files.
        model: Name of the model's shape.
        hidden: Width of its residual stream.
        dtype: Of its activations, without ``torch.``.
        times: What was measured; each item, batch, length and degree once.
        version: Of this format.
    """

    gpu: str
    model: str
    hidden: int
    dtype: str
    times: tuple[LayerTime, ...]
    version: int = LAYER_PROFILE_VERSION

    def __post_init__(self) -> None:
        keys = [(time.item, time.samples, time.sequence, time.tp) for time in self.times]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"profile of {self.gpu}: measured several times: {twice}")

    @property
    def activations(self) -> tuple[LayerBytes, ...]:
        """The bytes alone."""
        return tuple(
            LayerBytes(t.item, t.samples, t.sequence, t.tp, t.kept_bytes, t.working_bytes) for t in self.times
        )

    def save(self, path: str | Path) -> None:
        """Write it to ``path`` as JSON."""
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "LayerProfile":
        """The profile saved at ``path``."""
        return codec.load(cls, path)


def points_around(
    points: Sequence[_Point], item: Item, samples: int, sequence: int, tp: int
) -> Sequence[tuple[_Point, float]]:
    """Points beside a batch, with weights that add up to 1; empty if there are none of the item.

    Between two batches weights are linear; beyond them the nearest counts, as do the nearest degree and, of
    it, the nearest length.
    """
    known = [point for point in points if point.item is item]
    if not known:
        return ()
    degree = min((point.tp for point in known), key=lambda other: (abs(other - tp), other))
    known = [point for point in known if point.tp == degree]
    length = min(
        (point.sequence for point in known), key=lambda other: (abs(math.log(other / sequence)), other)
    )
    known = sorted((point for point in known if point.sequence == length), key=lambda point: point.samples)
    below = [point for point in known if point.samples <= samples]
    above = [point for point in known if point.samples >= samples]
    if not below or not above or below[-1] == above[0]:
        return ((below[-1] if below else above[0], 1.0),)
    low, high = below[-1], above[0]
    share = (samples - low.samples) / (high.samples - low.samples)
    return ((low, 1 - share), (high, share))


def layer_bytes(model_desc: ModelDesc, profile: Profile, layers: int) -> tuple[LayerBytes, ...]:
    """Activations of the items of a model, an encoder-decoder too, by its profile.

    Args:
        model_desc: The trace.
        profile: Its profile, measured or estimated.
        layers: Blocks without cross-attention: all of them, or those of the encoder, which come first.

    Raises:
        ValueError: The model has no blocks, or they hand on no ``(samples, tokens, channels)``.
    """
    sequence = stream_of(model_desc).shape[1]
    return tuple(
        LayerBytes(item, profile.local_batch, sequence, 1, *_most(runs))
        for item, runs in _segments_of_items(model_desc, profile, layers).items()
    )


def _segments_of_items(
    model_desc: ModelDesc, profile: Profile, layers: int
) -> dict[Item, list[list[SegmentProfile]]]:
    """The segments of each item of a model with blocks; of layers those of every one."""
    blocks = list(model_desc.block_segments.values())
    parts: dict[Item, list[Sequence[int]]] = {
        Item.EMBEDDING: [range(blocks[0][0])],
        Item.LAYER: list(blocks[:layers]),
        Item.HEAD: [range(blocks[-1][-1] + 1, len(model_desc.segments))],
    }
    if blocks[layers:]:
        parts[Item.TARGET_EMBEDDING] = [range(blocks[layers - 1][-1] + 1, blocks[layers][0])]
        parts[Item.CROSS_LAYER] = list(blocks[layers:])
    found = [profile.by_signature[segment.signature] for segment in model_desc.segments]
    return {item: [[found[index] for index in run] for run in runs] for item, runs in parts.items()}


def _most(runs: Sequence[Sequence[SegmentProfile]]) -> tuple[int, int]:
    """Mean of what runs keep, and most of what is there beside it."""
    kept, working = zip(*(_activations(run) for run in runs), strict=True)
    return -(-sum(kept) // len(runs)), max(working)


def layer_profile(
    model_desc: ModelDesc,
    profile: Profile,
    gpu: str,
    model: str,
    *,
    tp: int = 1,
    dtype: str | None = None,
) -> LayerProfile:
    """The items of a decoder or an encoder that was traced and profiled on one rank.

    Its blocks are the layers, of which the mean counts; what runs before the first is the embedding, what
    runs after the last the head with the loss.

    Args:
        model_desc: The trace.
        profile: Its profile.
        gpu: Name of the device.
        model: Name of the shape.
        tp: Ranks of which the description is one's part.
        dtype: What it was computed in, without ``torch.``; that of the description if ``None``.

    Raises:
        ValueError: The model has no blocks, they hand on no ``(samples, tokens, channels)``, or nothing was
            measured.
    """
    if not profile.measured:
        raise ValueError(f"the profile of {model_desc.name} is an estimate, which a cluster has anyway")
    stream = stream_of(model_desc)
    times = []
    for item, runs in _segments_of_items(model_desc, profile, len(model_desc.block_segments)).items():
        kept, working = _most(runs)
        times.append(
            LayerTime(
                item=item,
                samples=profile.local_batch,
                sequence=stream.shape[1],
                tp=tp,
                forward=sum(segment.forward.seconds for run in runs for segment in run) / len(runs),
                backward=sum(segment.backward.seconds for run in runs for segment in run) / len(runs),
                kept_bytes=kept,
                working_bytes=working,
            )
        )
    return LayerProfile(gpu, model, stream.shape[2], dtype or stream.dtype, tuple(times))


def _activations(run: Sequence[SegmentProfile]) -> tuple[int, int]:
    """Bytes that are left after the forwards of segments, and most beside them in their backwards."""
    kept = level = max(sum(segment.forward.live_bytes for segment in run), 0)
    highest = level
    for segment in reversed(run):
        highest = max(highest, level + segment.backward.peak_bytes)
        level += segment.backward.live_bytes
    return kept, highest - kept


def merged(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """Several profiles of one device and model, for example at several batches, as one.

    Raises:
        ValueError: They are of different devices, models or dtypes.
    """
    first = profiles[0]
    kinds = sorted(
        {f"{other.model} of width {other.hidden} on {other.gpu} in {other.dtype}" for other in profiles}
    )
    if len(kinds) > 1:
        raise ValueError(f"profiles of one device and one model make one, these are of {', '.join(kinds)}")
    times = tuple(time for other in profiles for time in other.times)
    return LayerProfile(first.gpu, first.model, first.hidden, first.dtype, times)
