"""Links that follow from timed units: latency and bandwidth of each collective, by least squares."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from osdp.hardware.device_info import Link
from osdp.plan.sharding import Route
from osdp.profiler.links.fsdp_probe import UnitTimes
from osdp.profiler.links.toy_model import NUM_TENSORS

#: By how much gathers by messages may seem slower: they fill no copy, and always take as long.
STEADY = 0.05

#: Bandwidth of a link whose times do not grow with size: a busy moment of the machine hid how they do.
NO_GROWTH = 2.0**60


def fit(
    sizes: Sequence[int], seconds: Sequence[float], *, largest_decides: bool = False
) -> tuple[float, float, float]:
    """Latency, bandwidth and largest relative error of the line through ``seconds`` over ``sizes``.

    Minimises the sum of ``(latency + size / bandwidth - seconds) ** 2 / seconds`` over bandwidths that are
    positive and latencies of at least what the smallest messages take beyond their bytes at the highest rate
    seen. Without that floor, large messages that take more than their share (caches, other programs) pull
    the latency down to nothing, and small units look free.

    Args:
        sizes: Bytes.
        seconds: What they took.
        largest_decides: Whether the largest decides the rate where it takes more than its share: a token
            bucket lets the first bytes after a pause pass at once, of which many small messages have more.

    >>> latency, bandwidth, residual = fit([1000, 2000, 4000], [2.0, 3.0, 5.0])
    >>> round(latency, 9), round(bandwidth, 6), round(residual, 9)
    (1.0, 1000.0, 0.0)
    >>> round(fit([1000, 2000, 4000], [2.0, 3.0, 20.0])[0], 9)
    0.5
    >>> latency, bandwidth, _ = fit([1, 1000, 2000, 4000], [1.0, 1.6, 3.0, 5.0], largest_decides=True)
    >>> round(latency + 4000 / bandwidth, 9)
    5.0
    """
    # Normal equations of a 2 x 2 system with the weights 1/t.
    aa = sum(1 / t for t in seconds)
    ab = sum(size / t for size, t in zip(sizes, seconds, strict=True))
    bb = sum(size * size / t for size, t in zip(sizes, seconds, strict=True))
    a, b = float(len(sizes)), float(sum(sizes))
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant > 0 else -1.0
    per_byte = (b * aa - a * ab) / determinant if determinant > 0 else -1.0
    # Of the faster of two messages, so that one odd time does not decide.
    fast = 0 if seconds[0] <= seconds[1] else 1
    floor = seconds[fast] - sizes[fast] * min(t / size for size, t in zip(sizes, seconds, strict=True))
    if latency < floor:
        latency, per_byte = floor, (b - floor * ab) / bb
    if largest_decides:
        size, took = max(zip(sizes, seconds, strict=True))
        per_byte = max(per_byte, (took - latency) / size)
    if per_byte <= 0:
        # Time that does not grow with size is latency alone; a bandwidth must still be given.
        latency, per_byte = a / aa, 1 / NO_GROWTH
    fitted = [latency + size * per_byte for size in sizes]
    residual = max(abs(f / t - 1) for f, t in zip(fitted, seconds, strict=True))
    return latency, 1 / per_byte, residual


def with_mixed_route(by_route: Mapping[Route, dict[int, UnitTimes]]) -> dict[Route, dict[int, UnitTimes]]:
    """The routes, and ``EXCHANGE``: gathers of ``FLAT``, and reductions of ``EXCHANGE_ALL``."""
    found = dict(by_route)
    if Route.FLAT in found and Route.EXCHANGE_ALL in found:
        own, messages = found[Route.FLAT], found[Route.EXCHANGE_ALL]
        found[Route.EXCHANGE] = {
            nbytes: replace(times, reduce=messages[nbytes].reduce)
            for nbytes, times in own.items()
            if nbytes in messages
        }
    return found


def fit_links(
    group: str, size: int, by_route: Mapping[Route, dict[int, UnitTimes]], *, on_one_machine: bool = True
) -> list[Link]:
    """The three links of a group, in the order of ``COLLECTIVES``, by the route that a unit is fastest on.

    Of all ranks the backend's own collectives are kept as well: they are what FSDP2 uses without a plan.

    Args:
        group: Name of the group.
        size: Number of its ranks.
        by_route: Times of units of each size, by the route of their collectives.
        on_one_machine: Whether messages stay inside one.
    """

    def link(collective: str, route: Route, seen: Mapping[int, float]) -> Link:
        return _fit_link(collective, group, size, route, seen, on_one_machine=on_one_machine)

    common = set.intersection(*(set(samples) for samples in by_route.values()))

    def total(route: Route) -> float:
        seconds = (t.unshard + t.reduce for size, t in by_route[route].items() if size in common)
        return sum(seconds) * (1 - STEADY * route.gathers_by_exchange)

    fastest, first = min(by_route, key=total), next(iter(by_route))
    links = [
        link(collective, route, {b: getattr(times, name) for b, times in by_route[route].items()})
        for collective, name, route in (
            ("all_gather", "unshard", fastest),
            ("reduce_scatter", "reduce", fastest),
            ("all_reduce", "all_reduce", first),
        )
    ]
    if group == "world" and fastest is not first:
        own = by_route[first].items()
        reduce = {nbytes: times.reduce for nbytes, times in own}
        links.append(link("reduce_scatter", first, reduce))
        if fastest.gathers_by_exchange:
            gather = {nbytes: times.unshard for nbytes, times in own}
            links.append(link("all_gather", first, gather))
    return links


def _fit_link(
    collective: str,
    group: str,
    size: int,
    route: Route,
    seen: Mapping[int, float],
    *,
    on_one_machine: bool,
) -> Link:
    # A time that noise swallowed whole says nothing; where hardly any is left, all are next to nothing.
    left = {nbytes: seconds for nbytes, seconds in seen.items() if seconds > 0}
    if len(left) < 2:
        left = {nbytes: max(seconds, 1e-9) for nbytes, seconds in seen.items()}
    latency, bandwidth, residual = fit(list(left), list(left.values()), largest_decides=not on_one_machine)
    gathers = collective == "all_gather" and not route.in_two_steps
    by_exchange = route.gathers_by_exchange if gathers else route.by_exchange
    return Link(collective, group, size, latency, bandwidth, residual, by_exchange=by_exchange)


def without_parameters(link: Link, seconds: float) -> Link:
    """``link`` without what the parameters of the timed units added to its latency.

    Args:
        link: A link that was fitted to units of :data:`osdp.profiler.links.toy_model.NUM_TENSORS` parameters.
        seconds: Seconds of one parameter.
    """
    if link.collective == "all_reduce":
        return link  # of one tensor
    # Noise in what a parameter takes must not make units free.
    return replace(link, latency=max(link.latency - NUM_TENSORS * seconds, link.latency / 4))
