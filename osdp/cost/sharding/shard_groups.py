"""Shard groups: the ranks over which a unit is sharded, and the links its collectives use."""

from dataclasses import dataclass, replace

from osdp.arrays import Floats
from osdp.hardware.device_info import DeviceInfo, Link
from osdp.plan.shard_math import SMALL_SHARD
from osdp.plan.sharding import Route

#: Bytes of an element, for what a message takes.
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The ranks over which a unit is sharded, with the links of its collectives.

    Attributes:
        num_shards: Number of ranks a unit is sharded over.
        gather: Link of its all-gather.
        reduce: Link of its reduce-scatter.
        average: Link of an all-reduce of replicated gradients.
        across: Link of the all-reduce of reduced gradients between groups (HYBRID_SHARD); ``None`` otherwise.
        group_size: Ranks of a group; 0 without groups.
        route: Route of its collectives (flat, two-step, by exchange).
        searched: Whether the search may choose it; otherwise it only costs plans given by the user.
        copies: Whether the backend holds copies of what it gathers.
        messages: Link of messages from each rank to every other; that of the all-gather if ``None``.
    """

    num_shards: int
    gather: Link
    reduce: Link
    average: Link
    across: Link | None = None
    group_size: int = 0
    route: Route = Route.FLAT
    searched: bool = True
    copies: bool = False
    messages: Link | None = None

    @property
    def hybrid(self) -> bool:
        """Whether units are sharded inside groups only (HYBRID_SHARD)."""
        return self.across is not None

    @property
    def is_flat(self) -> bool:
        """Whether it is all ranks, by the backend's own collectives."""
        return not self.hybrid and self.route is Route.FLAT

    @property
    def reduce_buffers(self) -> float:
        """Bytes of a reduction's buffers in addition to its input, as a fraction of the input.

        See :mod:`osdp.comm.collectives`.
        """
        output = 1 / self.num_shards
        if not self.route.in_two_steps:
            # An exchange keeps the pieces received from the other ranks next to the input until they are
            # summed. Where a backend would copy the input of its own reduce-scatter, a plan's units are
            # all-reduced in place instead (osdp.comm.collectives.scatter_sum).
            return output + self.route.by_exchange
        column, row = 1 / self.group_size, self.group_size / self.num_shards
        return output + column + (max(row, column) if self.route.by_exchange else 0.0)

    @property
    def gather_buffers(self) -> float:
        """Bytes of an all-gather's buffers in addition to its output, as a fraction of the output."""
        if not self.route.in_two_steps:
            return float(self.copies and not self.route.gathers_by_exchange)
        column, row = 1 / self.group_size, self.group_size / self.num_shards
        # Messages of an exchange are not copied; each row is gathered by the backend on every route.
        first = column if self.copies and not self.route.by_exchange else 0.0
        return column + max(first, row if self.copies else 0.0)

    def exchange_seconds(self, nbytes: Floats, num_messages: Floats, model_bytes: float) -> Floats:
        """Seconds in which all ranks send each other their shards of stepped tensors.

        All that an optimizer has stepped is sent at once, whatever its units
        (:class:`osdp.comm.collectives.GatherInPlace`): what one message takes counts for large shards, and
        one latency for all together, of which tensors have a share by their bytes: exact if everything is
        stepped in shards, and less than a latency if only a part is, as costs of units must add up.

        Args:
            nbytes: Bytes of the tensors.
            num_messages: Number of tensors whose shards are not sent together with others.
            model_bytes: Bytes of all trainable parameters.
        """
        link = self.messages or self.gather
        share = nbytes / max(model_bytes, 1.0)
        return (nbytes + num_messages * SMALL_SHARD * _FLOAT32) / link.bandwidth + share * link.latency

    @property
    def reduce_latency(self) -> float:
        """Seconds that a gradient reduction of zero bytes takes."""
        return self.reduce.latency + (self.across.latency if self.across is not None else 0.0)


def shard_groups_of(device: DeviceInfo) -> tuple[ShardGroup, ...]:
    """All shard groups whose links are known; the first is flat, over all ranks.

    Raises:
        ValueError: There are several devices, and their links are unknown.
    """
    gather, reduce, average = (device.link(name) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    flat = ShardGroup(
        device.world_size,
        gather,
        reduce,
        average,
        route=_flat_route(gather, reduce),
        copies=device.holds_copies,
        messages=_messages(device, gather, reduce),
    )
    # Each known group size gives two candidates: two-step collectives over all ranks, and HYBRID_SHARD.
    found = [flat]
    for size in device.group_sizes:
        steps, inside = (
            [device.link(name, f"{group} {size}") for name in ("all_gather", "reduce_scatter")]
            for group in ("two_step", "inside")
        )
        two = Route.TWO_STEP_EXCHANGE if steps[1].by_exchange else Route.TWO_STEP
        found.append(replace(flat, gather=steps[0], reduce=steps[1], group_size=size, route=two))
        found.append(
            ShardGroup(
                size,
                inside[0],
                inside[1],
                average,
                device.link("all_reduce", f"across {size}"),
                size,
                _flat_route(*inside),
                copies=device.holds_copies,
            )
        )
    # FSDP2's own collectives stay known even where exchanges are faster.
    own = {
        link.collective: link
        for link in device.links
        if link.group == "world" and link not in (gather, reduce) and not link.by_exchange
    }
    if "reduce_scatter" in own:
        found.append(
            replace(
                flat,
                gather=own.get("all_gather", gather),
                reduce=own["reduce_scatter"],
                route=Route.FLAT,
                searched=False,
            )
        )
    return tuple(found)


def _messages(device: DeviceInfo, gather: Link, reduce: Link) -> Link:
    """The link for parts that each rank sends to every other."""
    if gather.by_exchange:
        return gather
    if reduce.by_exchange:
        return reduce
    # Each part leaves its node once for every rank of the others, where a ring takes it on to the next node.
    ranks, inside = device.world_size, device.devices_per_node
    times = inside * (ranks - inside) / max(ranks - 1, 1)
    return replace(gather, bandwidth=gather.bandwidth / max(times, 1.0))


def _flat_route(gather: Link, reduce: Link) -> Route:
    """The route in one step by which these links were measured."""
    if not reduce.by_exchange:
        return Route.FLAT
    return Route.EXCHANGE_ALL if gather.by_exchange else Route.EXCHANGE
