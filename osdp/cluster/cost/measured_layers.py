"""Measured time and memory of an item, scaled to other batches, lengths and degrees by the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from osdp.cluster.cost.layer_time import LayerSeconds
from osdp.cluster.cost.layer_work import LayerWork
from osdp.cluster.layer_profile import LayerCase, LayerCost, LayerProfile, points_around


def measured_seconds(
    profile: LayerProfile, case: LayerCase, modelled: Callable[[LayerCase], LayerSeconds]
) -> LayerSeconds | None:
    """Measured seconds of an item, scaled from the nearest measured points by the ratio of modelled seconds.

    Args:
        profile: Layer profile of the device.
        case: The item, microbatch and degree.
        modelled: Function of a case that returns its modelled seconds.

    Returns:
        The seconds; ``None`` if the item was not measured.
    """
    points = points_around(profile.layers, case)
    if not points:
        return None
    here = modelled(case)
    there = [(layer, weight, modelled(layer.case)) for layer, weight in points]

    # measured(here) = modelled(here) * (measured / modelled) at the interpolated points.
    def scale(measured: float, model: float, at_points: float) -> float:
        return measured * model / at_points if at_points > 0 else measured

    forward = scale(
        sum(weight * layer.forward for layer, weight, _ in there),
        here.forward,
        sum(weight * model.forward for _, weight, model in there),
    )
    backward = scale(
        sum(weight * layer.backward for layer, weight, _ in there),
        here.backward,
        sum(weight * model.backward for _, weight, model in there),
    )
    # Attention alone is not measured: it keeps its modelled share of the forward.
    attention, selective = (
        scale(of_forward, forward, here.forward) for of_forward in (here.attention, here.selective)
    )
    return LayerSeconds(forward, backward, attention, selective)


def with_measured_bytes(
    work: LayerWork,
    known: Sequence[LayerCost],
    case: LayerCase,
    modelled: Callable[[LayerCase], LayerWork],
) -> LayerWork:
    """``work`` with activation bytes scaled by the ratio of measured (or traced) to modelled bytes.

    Args:
        work: Modelled work for a microbatch or a token slice of one.
        known: Measured or traced activations.
        case: The item, microbatch and degree.
        modelled: Function of a case that returns the modelled work of a whole microbatch.

    Returns:
        The scaled work; ``work`` itself if the item was not measured.
    """
    points = points_around(known, case)
    there = [(layer, weight, modelled(layer.case)) for layer, weight in points]
    kept = sum(weight * at.kept_bytes for _, weight, at in there)
    working = sum(weight * at.working_bytes for _, weight, at in there)
    if not kept or not working:
        return work
    of_kept = sum(weight * layer.kept_bytes for layer, weight, _ in there) / kept
    of_working = sum(weight * layer.working_bytes for layer, weight, _ in there) / working
    # Round memory up, and what selective recomputation saves of it down.
    return replace(
        work,
        kept_bytes=math.ceil(work.kept_bytes * of_kept),
        score_bytes=math.floor(work.score_bytes * of_kept),
        working_bytes=math.ceil(work.working_bytes * of_working),
    )
