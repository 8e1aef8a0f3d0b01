"""Profile of one tensor-parallel rank: its part of each segment, and the collectives between the ranks.

Its memory is that of the whole model's segments, minus the difference between the traces of the whole and of
its part; workspaces, which a trace does not contain, count in full. Its compute is scaled by the rank's share
of the FLOPs, or of the moved bytes where nothing is computed. Collectives are not hidden.
"""

import math
from dataclasses import replace

from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import PassProfile, Profile, SegmentProfile
from osdp.model.description import Affine, ModelDesc, Segment, Work
from osdp.plan.tensor_parallel_rank import Exchange, RankDesc

#: Profile of a segment in which nothing happens.
_UNKNOWN = SegmentProfile("", PassProfile(0.0, 0, 0), PassProfile(0.0, 0, 0), 0)


def part_profile(whole: ModelDesc, profile: Profile, rank: RankDesc) -> Profile:
    """Estimate the profile of one rank's segments from a profile of the whole model.

    Args:
        whole: Description of the whole model.
        profile: Its profile.
        rank: Description of one rank's part.

    Raises:
        ValueError: They are of different models.
    """
    if rank.model != whole.fingerprint or {s.signature for s in whole.segments} - set(profile.by_signature):
        raise ValueError(
            f"the profile, the description of {whole.name} and that of its parts are of different models or "
            "batches; describe and profile again"
        )
    batch = profile.local_batch
    by_key = {segment.key: segment for segment in whole.segments}
    alike: dict[str, dict[SegmentProfile, list[Segment]]] = {}
    for part in rank.desc.segments:
        one = by_key.get(part.key)
        of_one = _UNKNOWN if one is None else profile.of(one)
        alike.setdefault(part.signature, {}).setdefault(of_one, []).append(part)
    found = []
    for groups in alike.values():
        most, *others = sorted(groups.items(), key=lambda group: len(group[1]), reverse=True)
        for of_one, parts in (most, *others):
            # A segment that only the part has copies data for its collectives.
            one = by_key.get(parts[0].key, _idle(parts[0]))
            segment = _part_segment(one, parts[0], of_one, batch)
            keys = () if parts is most[1] else tuple(part.key for part in parts)
            found.append(replace(segment, keys=keys))
    return replace(profile, segments=tuple(found), model=rank.desc.fingerprint)


def _idle(segment: Segment) -> Segment:
    """A copy of the segment in which nothing happens."""
    zero = Affine(0.0, 0.0)
    nothing = Work(zero, zero, zero, zero)
    return replace(segment, signature="", forward=nothing, backward=nothing, saved_bytes=zero)


def with_exchanges(profile: Profile, rank: RankDesc, device: DeviceInfo) -> Profile:
    """The profile of one rank's segments, with the time of their collectives and the bytes of DTensors.

    Args:
        profile: Its profile, as measured without other ranks or from :func:`part_profile`.
        rank: Description of its part, with its collectives.
        device: The devices, with the links of the tensor-parallel group.

    Raises:
        ValueError: One of those links is unknown.
    """
    scale = profile.local_batch / rank.desc.local_batch
    exchanges = {entry.signature: entry.exchanges for entry in rank.exchanges}
    sums = _summed_apart(rank)

    def seconds(found: tuple[Exchange, ...], backward: bool) -> float:
        return sum(
            device.tensor_link(exchange.collective).seconds(
                exchange.nbytes * (scale if exchange.per_sample else 1.0)
            )
            for exchange in found
            if exchange.backward is backward
        )

    def with_seconds(segment: SegmentProfile) -> SegmentProfile:
        found, backward = exchanges.get(segment.signature, ()), segment.backward
        peak = max(backward.peak_bytes, 0) + sums[segment.signature] if segment.signature in sums else None
        return replace(
            segment,
            forward=replace(segment.forward, exchange_seconds=seconds(found, False)),
            backward=replace(
                backward,
                peak_bytes=backward.peak_bytes if peak is None else peak,
                gradient_peak_bytes=backward.gradient_peak_bytes if peak is None else None,
                bucket_peak_bytes=backward.bucket_peak_bytes if peak is None else None,
                exchange_seconds=seconds(found, True),
            ),
        )

    return replace(profile, segments=tuple(map(with_seconds, profile.segments)))


def _summed_apart(rank: RankDesc) -> dict[str, int]:
    """Bytes of gradient sums with several sources, by signature of the segment whose backward adds them.

    Autograd adds plain tensors in place, but not tensor subclasses such as DTensor (torch 2.13,
    ``InputBuffer``).
    """
    sharded = {f"{entry.module}.weight" for entry in rank.plan.modules}
    found: dict[str, int] = {}
    for operator in rank.desc.operators:
        # A weight used by several modules gets several gradients, and their sum is a tensor of its own.
        tied = [p for p in operator.parameters if p.trainable and sharded.intersection(p.aliases)]
        if tied and operator.executed:
            signature = rank.desc.segments[operator.first].signature
            found[signature] = max(p.nbytes for p in tied)
    return found


def _part_segment(whole: Segment, part: Segment, profile: SegmentProfile, batch: int) -> SegmentProfile:
    # Corrects the measurement by the traces' difference, so that what no trace contains stays in.
    saved = profile.saved_bytes + part.saved_bytes(batch) - whole.saved_bytes(batch)
    return SegmentProfile(
        signature=part.signature,
        forward=_part_pass(whole.forward, part.forward, profile.forward, batch),
        backward=_part_pass(whole.backward, part.backward, profile.backward, batch),
        saved_bytes=math.ceil(max(saved, 0.0)),
    )


def _part_pass(whole: Work, part: Work, profile: PassProfile, batch: int) -> PassProfile:
    live = profile.live_bytes + part.live_bytes(batch) - whole.live_bytes(batch)
    peak = profile.peak_bytes + part.peak_bytes(batch) - whole.peak_bytes(batch)
    return PassProfile(
        seconds=profile.seconds * _share(whole, part, batch),
        live_bytes=math.ceil(live),
        peak_bytes=math.ceil(max(peak, live, 0.0)),
        host_seconds=profile.host_seconds,
    )


def _share(whole: Work, part: Work, batch: int) -> float:
    """The part's fraction of the work: of FLOPs, else of moved bytes."""
    if whole.flops(batch) > 0:
        return part.flops(batch) / whole.flops(batch)
    return part.moved_bytes(batch) / whole.moved_bytes(batch) if whole.moved_bytes(batch) > 0 else 1.0
