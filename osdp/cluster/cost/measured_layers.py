"""Measured time and memory of an item, scaled to other batches, lengths and degrees by the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from osdp.cluster.cost.layer_time import LayerSeconds
from osdp.cluster.cost.layer_work import LayerWork
from osdp.cluster.layer_profile import LayerBytes, LayerProfile, points_around
from osdp.cluster.transformer import Item


def measured_seconds(
    profile: LayerProfile,
    item: Item,
    samples: int,
    sequence: int,
    tp: int,
    modelled: Callable[[int, int, int], LayerSeconds],
) -> LayerSeconds | None:
    """Measured seconds of an item, scaled from the nearest measured points by the ratio of modelled seconds.

    Args:
        profile: Layer profile of the device.
        item: The item.
        samples: Samples of a microbatch.
        sequence: Tokens per sample.
        tp: Tensor-parallel degree.
        modelled: Function of (samples, tokens, degree) that returns the modelled seconds.

    Returns:
        The seconds; ``None`` if the item was not measured.
    """
    points = points_around(profile.times, item, samples, sequence, tp)
    if not points:
        return None
    here = modelled(samples, sequence, tp)
    there = [(time, weight, modelled(time.samples, time.sequence, time.tp)) for time, weight in points]

    # measured(here) = modelled(here) * (measured / modelled) at the interpolated points.
    def carried(measured: float, model: float, at_points: float) -> float:
        return measured * model / at_points if at_points > 0 else measured

    forward = carried(
        sum(weight * time.forward for time, weight, _ in there),
        here.forward,
        sum(weight * model.forward for _, weight, model in there),
    )
    backward = carried(
        sum(weight * time.backward for time, weight, _ in there),
        here.backward,
        sum(weight * model.backward for _, weight, model in there),
    )
    # Attention alone is not measured: it keeps its modelled share of the forward.
    return LayerSeconds(forward, backward, carried(here.attention, forward, here.forward))


def with_measured_bytes(
    work: LayerWork,
    known: Sequence[LayerBytes],
    item: Item,
    samples: int,
    sequence: int,
    tp: int,
    modelled: Callable[[int, int, int], LayerWork],
) -> LayerWork:
    """``work`` with activation bytes scaled by the ratio of measured (or traced) to modelled bytes.

    Args:
        work: Modelled work for a microbatch or a token slice of one.
        known: Measured or traced activations.
        item: The item.
        samples: Samples of the microbatch.
        sequence: Tokens per sample.
        tp: Tensor-parallel degree.
        modelled: Function of (samples, tokens, degree) that returns the modelled work of a whole microbatch.

    Returns:
        The scaled work; ``work`` itself if the item was not measured.
    """
    points = points_around(known, item, samples, sequence, tp)
    there = [(time, weight, modelled(time.samples, time.sequence, time.tp)) for time, weight in points]
    kept = sum(weight * at.kept_bytes for _, weight, at in there)
    working = sum(weight * at.working_bytes for _, weight, at in there)
    if not kept or not working:
        return work
    more = sum(weight * time.kept_bytes for time, weight, _ in there) / kept
    beside = sum(weight * time.working_bytes for time, weight, _ in there) / working
    # Round memory up, and what selective recomputation saves of it down.
    return replace(
        work,
        kept_bytes=math.ceil(work.kept_bytes * more),
        score_bytes=math.floor(work.score_bytes * more),
        working_bytes=math.ceil(work.working_bytes * beside),
    )
