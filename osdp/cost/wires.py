"""Wires: over which ranks a sharded unit lies, and by which links its collectives go."""

from dataclasses import dataclass, replace

from osdp.device_info import DeviceInfo, Link
from osdp.plan import Route


@dataclass(frozen=True, slots=True)
class Wire:
    """How sharded units may lie and talk.

    Attributes:
        num_shards: Ranks a unit is sharded over.
        gather: Its all-gather.
        reduce: Its reduce-scatter.
        average: An all-reduce of what every rank holds.
        across: The all-reduce of reduced gradients over the groups, of HYBRID_SHARD.
        group_size: Ranks of a group; 0 without groups.
        route: How its collectives go.
        searched: Whether plans may use it; otherwise only plans of others are priced on it.
    """

    num_shards: int
    gather: Link
    reduce: Link
    average: Link
    across: Link | None = None
    group_size: int = 0
    route: Route = Route.FLAT
    searched: bool = True

    @property
    def hybrid(self) -> bool:
        """Whether units are sharded inside groups only."""
        return self.across is not None

    @property
    def reduce_buffers(self) -> float:
        """Bytes a reduction holds beside its input, as a part of that: see :mod:`osdp.comm.collectives`."""
        output = 1 / self.num_shards
        if not self.route.in_two_steps:
            # What the other ranks sent lies beside the input until it is summed.
            return output + self.route.by_exchange
        column, row = 1 / self.group_size, self.group_size / self.num_shards
        return output + column + (max(row, column) if self.route.by_exchange else 0.0)

    @property
    def reduce_latency(self) -> float:
        """Seconds a gradient reduction of no bytes takes."""
        return self.reduce.latency + (self.across.latency if self.across is not None else 0.0)


def wires_of(device: DeviceInfo) -> tuple[Wire, ...]:
    """All wires whose links are known; the first is flat, over all ranks.

    Raises:
        ValueError: There are several devices, and their links are unknown.
    """
    gather, reduce, average = (device.link(name) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    flat = Wire(
        device.world_size, gather, reduce, average, route=Route.EXCHANGE if reduce.by_exchange else Route.FLAT
    )
    found = [flat]
    for size in device.group_sizes:
        steps, inside = (
            [device.link(name, f"{group} {size}") for name in ("all_gather", "reduce_scatter")]
            for group in ("two_step", "inside")
        )
        two = Route.TWO_STEP_EXCHANGE if steps[1].by_exchange else Route.TWO_STEP
        found.append(replace(flat, gather=steps[0], reduce=steps[1], group_size=size, route=two))
        found.append(
            Wire(
                size,
                inside[0],
                inside[1],
                average,
                device.link("all_reduce", f"across {size}"),
                size,
                Route.EXCHANGE if inside[1].by_exchange else Route.FLAT,
            )
        )
    # What FSDP2 does by itself is priced even where an exchange is faster.
    slower = [
        link
        for link in device.links
        if (link.collective, link.group) == ("reduce_scatter", "world") and link is not reduce
    ]
    found += [replace(flat, reduce=link, route=Route.FLAT, searched=False) for link in slower]
    return tuple(found)
