"""Links as timed collectives show them: latency and bandwidth fitted, or both scaled where sizes are alike.

``seconds = latency + bytes / bandwidth`` (Hockney, Parallel Computing 20(3), 1994), as links are measured
before a training (:mod:`osdp.profiler.links.detect`). What no collective of the running plan says of a link
is taken from those that it does use: they share the network.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from osdp.hardware.device_info import DeviceInfo, Link
from osdp.refine.measurement import CollectiveTime

#: A collective and its group of ranks.
LinkKey = tuple[str, str]

#: From this ratio of the largest to the smallest tensor on latency and bandwidth can be told apart.
_APART = 4.0


def key_of(link: Link) -> LinkKey:
    """Its collective and group, which two links share that differ in how they reduce."""
    return link.collective, link.group


def fitted_link(link: Link, timed: Sequence[CollectiveTime]) -> Link:
    """``link`` as the collectives ``timed``, all of which are its own, show it.

    >>> slow = Link("all_gather", "world", 2, 1e-3, 1e9)
    >>> found = fitted_link(slow, [CollectiveTime("all_gather", "world", 10**6, 2e-2)])
    >>> round(found.latency, 6), round(found.bandwidth)
    (0.01, 100000000)
    """
    timed = _by_size(timed)
    measured = sum(each.count * each.seconds for each in timed)
    predicted = sum(each.count * link.seconds(each.nbytes) for each in timed)
    if measured <= 0 or predicted <= 0:
        return link
    both = measured / predicted
    latency, per_byte = both, both
    sizes = [each.nbytes for each in timed if each.nbytes]
    if link.latency > 0 and len(set(sizes)) > 1 and max(sizes) >= _APART * min(sizes):
        latency, per_byte = _two_factors(link, timed) or (both, both)
    found = replace(link, latency=link.latency * latency, bandwidth=link.bandwidth / per_byte)
    if len(set(sizes)) < 2:
        return found
    return replace(found, residual=max(abs(found.seconds(e.nbytes) / e.seconds - 1) for e in timed))


def with_measured_links(
    device: DeviceInfo, timed: Sequence[CollectiveTime], known: Collection[LinkKey] = ()
) -> tuple[DeviceInfo, frozenset[LinkKey]]:
    """The devices with links as collectives show them, and which links have been measured so far.

    Args:
        device: The devices.
        timed: What was measured now.
        known: Links that were measured in training before, which are left as they are unless they are again.
    """
    samples: dict[LinkKey, list[CollectiveTime]] = {}
    for each in timed:
        # What parameters take one by one is priced beside links. Noise in it must not make units free.
        apart = min(device.parameter_overhead * each.parameters, 0.75 * each.seconds)
        if each.seconds > 0:
            alone = replace(each, seconds=each.seconds - apart)
            samples.setdefault((each.collective, each.group), []).append(alone)
    now = {key_of(link): link for link in reversed(device.links) if key_of(link) in samples}
    fitted = {key: fitted_link(link, samples[key]) for key, link in now.items()}
    factors = [fitted[key].latency / link.latency for key, link in now.items() if link.latency > 0]
    alike = geometric_mean(factors)
    per_byte = geometric_mean([link.bandwidth / fitted[key].bandwidth for key, link in now.items()])

    def corrected(link: Link) -> Link:
        key = key_of(link)
        if key in fitted:
            # Of two links with one key, the other way to reduce is scaled like the one that was measured.
            first, found = now[key], fitted[key]
            grown = found.latency / first.latency if first.latency else 1.0
            rate = link.bandwidth * found.bandwidth / first.bandwidth
            return found if link is first else replace(link, latency=link.latency * grown, bandwidth=rate)
        if key in known:
            return link
        return replace(link, latency=link.latency * alike, bandwidth=link.bandwidth / per_byte)

    return replace(device, links=tuple(map(corrected, device.links))), frozenset(known) | set(fitted)


def geometric_mean(factors: Sequence[float]) -> float:
    """The geometric mean; 1 of none."""
    return math.exp(sum(map(math.log, factors)) / len(factors)) if factors else 1.0


def _by_size(timed: Sequence[CollectiveTime]) -> list[CollectiveTime]:
    """Those of each size as one, of their mean seconds: how they differ is noise, no error of the line."""
    sizes: dict[int, list[CollectiveTime]] = {}
    for each in timed:
        sizes.setdefault(each.nbytes, []).append(each)
    found = []
    for alike in sizes.values():
        count = sum(each.count for each in alike)
        seconds = sum(each.count * each.seconds for each in alike) / count
        found.append(replace(alike[0], seconds=seconds, count=count))
    return found


def _two_factors(link: Link, timed: Sequence[CollectiveTime]) -> tuple[float, float] | None:
    """Factors of latency and of the time of bytes, by least squares weighted by one over the seconds."""
    rows = [(link.latency, each.nbytes / link.bandwidth, each.seconds, each.count) for each in timed]
    aa = sum(count * a * a / t for a, _, t, count in rows)
    ab = sum(count * a * b / t for a, b, t, count in rows)
    bb = sum(count * b * b / t for _, b, t, count in rows)
    at, bt = sum(count * a for a, _, _, count in rows), sum(count * b for _, b, _, count in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return None
    latency, per_byte = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    return (latency, per_byte) if latency > 0 and per_byte > 0 else None
