"""What an item takes by what was measured, carried to other batches, lengths and degrees by the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from osdp.cost.layer_seconds import LayerSeconds
from osdp.cost.layer_work import LayerWork
from osdp.layer_profile import LayerBytes, LayerProfile, points_around
from osdp.transformer import Item


def measured_seconds(
    profile: LayerProfile,
    item: Item,
    samples: int,
    sequence: int,
    tp: int,
    modelled: Callable[[int, int, int], LayerSeconds],
) -> LayerSeconds | None:
    """What was measured; elsewhere times what the model says the difference makes.

    Args:
        profile: Of the device.
        item: The item.
        samples: Of a microbatch.
        sequence: Tokens of each.
        tp: Tensor-parallel ranks.
        modelled: Seconds by samples, tokens and ranks without any measurement.

    Returns:
        The seconds; ``None`` if the item was not measured.
    """
    points = points_around(profile.times, item, samples, sequence, tp)
    if not points:
        return None
    here = modelled(samples, sequence, tp)
    there = [(time, weight, modelled(time.samples, time.sequence, time.tp)) for time, weight in points]

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
    # Of attention alone nothing is measured: it stays the same part of a forward.
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
    """``work`` with activations as measured or traced, times what the model says the difference makes.

    Args:
        work: Of a microbatch, or of a slice of one.
        known: What was measured or traced.
        item: The item.
        samples: Of the microbatch.
        sequence: Tokens of each.
        tp: Tensor-parallel ranks.
        modelled: Work on a whole microbatch by samples, tokens and ranks.

    Returns:
        The work; as it is if the item was not measured.
    """
    points = points_around(known, item, samples, sequence, tp)
    there = [(time, weight, modelled(time.samples, time.sequence, time.tp)) for time, weight in points]
    kept = sum(weight * at.kept_bytes for _, weight, at in there)
    working = sum(weight * at.working_bytes for _, weight, at in there)
    if not kept or not working:
        return work
    more = sum(weight * time.kept_bytes for time, weight, _ in there) / kept
    beside = sum(weight * time.working_bytes for time, weight, _ in there) / working
    return replace(
        work,
        kept_bytes=math.ceil(work.kept_bytes * more),
        score_bytes=math.floor(work.score_bytes * more),
        working_bytes=math.ceil(work.working_bytes * beside),
    )
