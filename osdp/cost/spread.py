"""Spread: how far the figures that a step is simulated from may be off, and what that leaves open.

Each link has the largest error of its line over the measured sizes (``Link.residual``), each profile the
spread of its runs (``Profile.spread``, ``OptimizerProfile.spread``), and devices that of what is hidden and
of hooks (``DeviceInfo.overlap_spread``, ``overhead_spread``). Errors of the links move plans against
each other: one collective may take longer or shorter than the others and compute, or small messages may and
large ones do the opposite. To tell plans apart a step is simulated at the end of each of these errors; how
far it may be off by itself is told by the ends at which all errors point the same way. What is hidden and
what hooks take move together, to two ends more.
"""

from collections.abc import Sequence
from dataclasses import replace

from osdp.cost.sharding.problem import ShardingProblem, with_links
from osdp.cost.sharding.simulate import StepEstimate, simulate_units
from osdp.cost.sharding.solution import ShardingSolution, solution_root
from osdp.hardware.device_info import COLLECTIVES, OVERHEADS, OVERLAPS, DeviceInfo, Link

#: How many times as fast as measured links may be beside compute, of which no error is told: compute of one
#: model took 0.13 to 0.21 s in three starts on one machine.
_FASTER = 2.0

#: Directions in which the errors of some collectives' links move their latency and their seconds per byte.
_DIRECTIONS = (
    *(((collective,), sign, sign) for collective in COLLECTIVES for sign in (1, -1)),
    (COLLECTIVES, 1, -1),
    (COLLECTIVES, -1, 1),
)


def spread_corners(problem: ShardingProblem) -> tuple[ShardingProblem, ...]:
    """The problem with links at the ends of their errors; empty where no error is known.

    That compute takes longer is the same to all plans as that communication takes shorter, so the spread of
    the profile widens the error of the links.
    """
    device, compute = problem.device, problem.profile.spread
    corners: list[DeviceInfo] = []
    if device.world_size > 1 and (compute or any(link.residual for link in device.links)):
        corners += [_moved(device, compute, *direction) for direction in _DIRECTIONS]
    if device.world_size > 1 and (device.overlap_spread or device.overhead_spread):
        corners += [_beside_links(device, sign) for sign in (1, -1)]
    return tuple(with_links(problem, corner) for corner in corners)


def _moved(
    device: DeviceInfo, compute: float, moving: Sequence[str], latency: int, per_byte: int
) -> DeviceInfo:
    def moved(link: Link) -> Link:
        if link.collective not in moving:
            return link
        factor = (1 + link.residual) * (1 + compute)
        return replace(
            link, latency=link.latency * factor**latency, bandwidth=link.bandwidth / factor**per_byte
        )

    return replace(device, links=tuple(map(moved, device.links)))


def with_faster_links(problem: ShardingProblem) -> ShardingProblem:
    """The problem with links as much faster as they may be beside compute, which is slower than measured."""
    links = tuple(replace(link, bandwidth=link.bandwidth * _FASTER) for link in problem.device.links)
    return with_links(problem, replace(problem.device, links=links))


def step_spread(problem: ShardingProblem, found: ShardingSolution) -> float:
    """How far the seconds of a step may be off at most, relative to them; 0 where no error is known.

    All links, overlaps and overheads at the same end of their errors, and all of compute and of the optimizer
    step at that of theirs.
    """
    own, profile, device = found.outcome, problem.profile, problem.device
    communication = 0.0
    if device.overlap_spread or device.overhead_spread or any(link.residual for link in device.links):
        ends = [
            with_links(problem, _beside_links(_moved(device, 0.0, COLLECTIVES, sign, sign), sign))
            for sign in (1, -1)
        ]
        communication = max(abs(simulate_at(end, found).seconds - own.seconds) for end in ends)
    spread = own.compute_seconds * profile.spread + own.optimizer_seconds * profile.optimizer.spread
    return (communication + spread) / own.seconds


def _beside_links(device: DeviceInfo, sign: int) -> DeviceInfo:
    """The devices on which as little is hidden and hooks take as long as may be (1), or the opposite (-1)."""
    # Nothing takes less than no time.
    more, hidden = max(1 + sign * device.overhead_spread, 0.0), sign * device.overlap_spread
    overheads = {name: more * getattr(device, name) for name in OVERHEADS}
    overlaps = {
        name: min(1.0, max(0.0, value - hidden))
        for name in OVERLAPS
        if (value := getattr(device, name)) is not None
    }
    return replace(device, **overheads, **overlaps)


def simulate_at(problem: ShardingProblem, found: ShardingSolution) -> StepEstimate:
    """The step of a plan in another problem of the same model."""
    return simulate_units(problem, found.units, solution_root(problem, found))
