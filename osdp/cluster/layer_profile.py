"""LayerProfile: measured time and memory of transformer items on one kind of device, one file per device."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from osdp.cluster.infer_shape import stream_of
from osdp.cluster.transformer import Item
from osdp.codec import Savable
from osdp.hardware.profile import Profile, SegmentProfile
from osdp.model.description import ModelDesc

LAYER_PROFILE_VERSION = 3


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One item of the chain, for one microbatch, on one rank.

    Attributes:
        item: Kind of item.
        samples: Samples per microbatch.
        sequence: Tokens per sample.
        tp: Tensor-parallel degree.
    """

    item: Item
    samples: int
    sequence: int
    tp: int


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Activation bytes and, if measured, compute time of one item for one microbatch on one rank.

    Attributes:
        case: Item, microbatch and degree.
        kept_bytes: Bytes saved for backward.
        working_bytes: Peak bytes during the backward in addition to those.
        forward: Seconds of a forward without communication; 0 if only traced.
        backward: Seconds of a backward, likewise.
    """

    case: LayerCase
    kept_bytes: int
    working_bytes: int
    forward: float = 0.0
    backward: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.forward, self.backward, self.kept_bytes, self.working_bytes)
        if min(self.case.samples, self.case.sequence, self.case.tp) < 1 or min(costs) < 0:
            raise ValueError(
                "a measured item needs at least 1 sample, token and rank, and no negative seconds or bytes, "
                f"got {self}"
            )


@dataclass(frozen=True)
class LayerProfile(Savable):
    """Measured items of one model on one kind of device.

    Attributes:
        gpu: Name of the device, as in cluster files.
        model: Name of the model's shape.
        hidden: Width of its residual stream.
        dtype: Dtype of its activations, without ``torch.``.
        layers: Measurements; at most one per case.
        version: Version of this format.
    """

    gpu: str
    model: str
    hidden: int
    dtype: str
    layers: tuple[LayerCost, ...]
    version: int = LAYER_PROFILE_VERSION

    def __post_init__(self) -> None:
        cases = [layer.case for layer in self.layers]
        if repeated := sorted({astuple(case) for case in cases if cases.count(case) > 1}):
            raise ValueError(
                f"profile of {self.gpu}: (item, samples, sequence, tp) measured several times: {repeated}; "
                "keep one of each"
            )


def points_around(points: Sequence[LayerCost], case: LayerCase) -> Sequence[tuple[LayerCost, float]]:
    """Measured points nearest to a case, with interpolation weights that sum to 1.

    Uses the points with the nearest degree and, among these, the nearest length. Between two batch sizes the
    interpolation is linear; outside of their range the nearest one counts.

    Args:
        points: Measurements of any items.
        case: The case to look up.

    Returns:
        One or two points with their weights; empty if the item was not measured.
    """
    known = [point for point in points if point.case.item is case.item]
    if not known:
        return ()
    # Ties go to the smaller degree and length, so that the choice does not depend on the order of points.
    degree = min((point.case.tp for point in known), key=lambda other: (abs(other - case.tp), other))
    known = [point for point in known if point.case.tp == degree]
    length = min(
        (point.case.sequence for point in known),
        key=lambda other: (abs(math.log(other / case.sequence)), other),
    )
    known = [point for point in known if point.case.sequence == length]
    known.sort(key=lambda point: point.case.samples)
    below = [point for point in known if point.case.samples <= case.samples]
    above = [point for point in known if point.case.samples >= case.samples]
    if not below or not above or below[-1] == above[0]:
        return ((below[-1] if below else above[0], 1.0),)
    low, high = below[-1], above[0]
    share = (case.samples - low.case.samples) / (high.case.samples - low.case.samples)
    return ((low, 1 - share), (high, share))


def layer_bytes(model_desc: ModelDesc, profile: Profile, layers: int) -> tuple[LayerCost, ...]:
    """Activation bytes of the items of a model, from its profile; supports encoder-decoders.

    Args:
        model_desc: The trace.
        profile: Its profile, measured or estimated.
        layers: Number of blocks without cross-attention: all of them, or those of the encoder, which come
            first.

    Raises:
        ValueError: The model has no blocks, or their output is not ``(samples, tokens, channels)``.
    """
    sequence = stream_of(model_desc).shape[1]
    return tuple(
        LayerCost(LayerCase(item, profile.local_batch, sequence, 1), *_most(runs))
        for item, runs in _segments_of_items(model_desc, profile, layers).items()
    )


def _segments_of_items(
    model_desc: ModelDesc, profile: Profile, layers: int
) -> dict[Item, list[list[SegmentProfile]]]:
    """Profiled segments of each kind of item, one list for each occurrence of the item."""
    # Segments are numbered in order of execution: those before the first block are the embedding, and so on.
    blocks = list(model_desc.block_segments.values())
    parts: dict[Item, list[Sequence[int]]] = {
        Item.EMBEDDING: [range(blocks[0][0])],
        Item.LAYER: list(blocks[:layers]),
        Item.HEAD: [range(blocks[-1][-1] + 1, len(model_desc.segments))],
    }
    if blocks[layers:]:
        parts[Item.TARGET_EMBEDDING] = [range(blocks[layers - 1][-1] + 1, blocks[layers][0])]
        parts[Item.CROSS_LAYER] = list(blocks[layers:])
    found = [profile.of(segment) for segment in model_desc.segments]
    return {item: [[found[index] for index in run] for run in runs] for item, runs in parts.items()}


def _most(runs: Sequence[Sequence[SegmentProfile]]) -> tuple[int, int]:
    """Mean of the bytes saved by the occurrences of an item, and the maximum of their transient bytes."""
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
    """Layer profile of a decoder or an encoder that was traced and profiled on one rank.

    Its blocks are the layers, which are averaged. All segments before the first block are the embedding, all
    after the last one the head with the loss.

    Args:
        model_desc: The trace.
        profile: Its profile.
        gpu: Name of the device.
        model: Name of the shape.
        tp: Tensor-parallel degree; the description is the part of one rank.
        dtype: Compute dtype, without ``torch.``; that of the description if ``None``.

    Raises:
        ValueError: The model has no blocks, their output is not ``(samples, tokens, channels)``, or the
            profile is an estimate.
    """
    if not profile.measured:
        raise ValueError(
            f"the profile of {model_desc.name} is an estimate, which the cluster planner makes itself; "
            "measure one on the device"
        )
    stream = stream_of(model_desc)
    layers = []
    for item, runs in _segments_of_items(model_desc, profile, len(model_desc.block_segments)).items():
        kept, working = _most(runs)
        layers.append(
            LayerCost(
                LayerCase(item, profile.local_batch, stream.shape[1], tp),
                kept,
                working,
                forward=sum(segment.forward.seconds for run in runs for segment in run) / len(runs),
                backward=sum(segment.backward.seconds for run in runs for segment in run) / len(runs),
            )
        )
    return LayerProfile(gpu, model, stream.shape[2], dtype or stream.dtype, tuple(layers))


def _activations(run: Sequence[SegmentProfile]) -> tuple[int, int]:
    """Bytes saved by the forwards of consecutive segments, and the peak in addition to these in backward."""
    # ``level`` follows the live bytes: up to ``kept`` after all forwards, then down again in reverse order.
    kept = level = max(sum(segment.forward.live_bytes for segment in run), 0)
    highest = level
    for segment in reversed(run):
        highest = max(highest, level + segment.backward.peak_bytes)
        level += segment.backward.live_bytes
    return kept, highest - kept


def merge_profiles(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """Merge profiles of one device and model, for example at several batch sizes.

    Raises:
        ValueError: The profiles are of different devices, models or dtypes.
    """
    first = profiles[0]
    kinds = sorted(
        {f"{other.model} of width {other.hidden} on {other.gpu} in {other.dtype}" for other in profiles}
    )
    if len(kinds) > 1:
        raise ValueError(
            f"only profiles of one device, model and dtype can be merged, these are of {', '.join(kinds)}"
        )
    layers = tuple(layer for other in profiles for layer in other.layers)
    return LayerProfile(first.gpu, first.model, first.hidden, first.dtype, layers)
