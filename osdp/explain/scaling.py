"""Profiles and links under settings that were not measured, by what is known of how they grow.

Work grows with the batch as the trace says (:class:`osdp.model.description.Work`), collectives with the ranks
as those of a ring (:mod:`osdp.cluster.cost.links` has the source), the step of an optimizer with the tensors
that it reads and writes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from osdp.hardware.device_info import DeviceInfo, Link, ring_steps
from osdp.hardware.profile import OptimizerProfile, PassProfile, Profile, SegmentProfile
from osdp.model.description import DTYPE_BYTES, ModelDesc, Operator, Work
from osdp.model.training import FUSED, Training
from osdp.profiler.roofline import LAUNCH_SECONDS

#: FLOPs that take as long as moving a byte, on the roofline of :mod:`osdp.profiler.roofline`, and seconds
#: that a pass of a segment takes on CPUs whatever its work: a few calls of kernels and of autograd. With them
#: profiles of the ten models that they were chosen on tell, from batch 8, those at 4 and 16 to 4 % on average
#: and 8 % at worst (two ranks, a core each; torch 2.13, 2026-11).
_FLOPS_PER_BYTE = 12
_CALL_SECONDS = 4e-5

#: Share of a network's nominal rate that is left for the payload of TCP segments of 1,448 bytes in Ethernet
#: frames of 1,538.
_PAYLOAD = 1448 / 1538

#: Channels that oneDNN pads the weights of a depthwise convolution to, both inputs and outputs, on CPUs: as
#: many as a vector of AVX-512 has, or one of AVX2.
_BLOCKS = (16, 8)

#: Share of the bytes that are expected of padded weights from which they are taken to be there.
_SEEN = 0.9

#: Seconds of a core for each byte that a rank sends over a network, and as much that it receives meanwhile.
#: Between two hosts the all-reduce of two ranks could not hide 19 % at 1 Gbit/s and 3 % at 200 Mbit/s (twice
#: each; network namespaces of Linux 6.18 on AMD EPYC, gloo of torch 2.13, 2026-11).
_TCP_SECONDS = 1.5e-9

#: Seconds that a pass of a segment takes longer on a CPU while another rank computes on the same machine,
#: whose caches they share: passes of less than 0.1 ms of ConvNeXt, BERT and GPT-2 took 15 us more on average
#: (two ranks, a core each, beside one alone; AMD EPYC, torch 2.13, 2026-11).
_BESIDE_SECONDS = 1.5e-5

#: Times that a collective copies its tensor in local memory: into the message and out of it.
_COPIES = 2


def profile_at_batch(profile: Profile, model_desc: ModelDesc, local_batch: int) -> Profile:
    """A profile at another local batch.

    Raises:
        ValueError: The model accepts only the batch that it was traced with.
    """
    before = profile.local_batch
    if local_batch == before:
        return profile
    if not model_desc.batch_is_free:
        raise ValueError(
            f"{model_desc.name} accepts only the traced batch of {model_desc.local_batch}, not {local_batch}"
        )
    traced = {segment.signature: segment for segment in model_desc.distinct_segments}
    operators = {operator.name: operator for operator in model_desc.operators}

    def scaled(segment: SegmentProfile) -> SegmentProfile:
        of_trace = traced[segment.signature]
        depthwise, launch = 0, LAUNCH_SECONDS
        if profile.device == "cpu":
            depthwise = sum(_depthwise_bytes(operators[name]) for name in of_trace.operators)
            launch = _CALL_SECONDS
        scaled_pass = partial(_scaled_pass, before=before, after=local_batch, launch=launch)
        saved = _ratio(of_trace.saved_bytes(before), of_trace.saved_bytes(local_batch))
        return replace(
            segment,
            forward=scaled_pass(segment.forward, of_trace.forward),
            backward=scaled_pass(segment.backward, of_trace.backward, depthwise),
            saved_bytes=math.ceil(saved * segment.saved_bytes),
        )

    sample = sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in model_desc.sample)
    more = sample * (local_batch - before) / model_desc.local_batch
    return replace(
        profile,
        local_batch=local_batch,
        segments=tuple(map(scaled, profile.segments)),
        resident_bytes=math.ceil(profile.resident_bytes + more),
    )


def _depthwise_bytes(operator: Operator) -> int:
    """Bytes of the weights of depthwise convolutions, of shape (channels, 1, height, width).

    Where images have their channels last, their backward on CPUs takes them padded whatever the batch.
    ConvNeXt's measured workspace is that to 1 % (torch 2.13); what other convolutions take grows with the
    batch.
    """
    return sum(
        parameter.nbytes
        for parameter in operator.parameters
        if len(parameter.shape) > 2 and parameter.shape[1] == 1 < parameter.shape[0]
    )


def _scaled_pass(
    measured: PassProfile, work: Work, depthwise: int = 0, *, before: int, after: int, launch: float
) -> PassProfile:
    """A pass at another batch; if it pads ``depthwise`` bytes of weights, it does so as before."""
    traced = work.peak_bytes(before)
    # Where the trace frees more than it allocates, what was measured is workspace.
    peak = _ratio(traced, work.peak_bytes(after)) if traced > 0 else after / before
    beyond = measured.peak_bytes - max(traced, 0)
    block = next((block for block in _BLOCKS if beyond > _SEEN * block**2 * depthwise), 1)
    workspace = min(measured.peak_bytes, block**2 * depthwise) if block > 1 else 0

    def busy(batch: int) -> float:
        # Where weights are padded on both sides, images are on one, and take as many times as long.
        return max(work.flops(batch) / _FLOPS_PER_BYTE, work.moved_bytes(batch) + workspace / block)

    launch = min(launch, measured.seconds)
    seconds = launch + (measured.seconds - launch) * _ratio(busy(before), busy(after))

    def larger(nbytes: int) -> int:
        kept = min(workspace, max(nbytes, 0))
        return math.ceil(peak * (nbytes - kept) + kept)

    def later(nbytes: int | None) -> int | None:
        return None if nbytes is None else larger(nbytes)

    return PassProfile(
        seconds=seconds,
        live_bytes=math.ceil(_ratio(work.live_bytes(before), work.live_bytes(after)) * measured.live_bytes),
        peak_bytes=larger(measured.peak_bytes),
        exchange_seconds=measured.exchange_seconds * after / before,
        gradient_peak_bytes=later(measured.gradient_peak_bytes),
        bucket_peak_bytes=later(measured.bucket_peak_bytes),
        host_seconds=measured.host_seconds,  # as many kernels, whatever their size
        gradient_bytes=measured.gradient_bytes,
    )


def _ratio(before: float, after: float) -> float:
    return after / before if (before > 0 and after > 0) or (before < 0 and after < 0) else 1.0


def profile_with_optimizer(profile: Profile, before: Training, after: Training, kind: str) -> Profile:
    """A profile with the optimizer of another training."""
    host = profile.host_optimizer
    return replace(
        profile,
        optimizer=_scaled_step(profile.optimizer, before, after, kind),
        host_optimizer=None if host is None else _scaled_step(host, before, after, "cpu"),
    )


def _scaled_step(step: OptimizerProfile, before: Training, after: Training, kind: str) -> OptimizerProfile:
    scaled = step.scaled(_tensors_touched(after, kind) / _tensors_touched(before, kind))
    # What it takes to step the local tensor of a DTensor is the same.
    # The difference first: rounding must not make a DTensor's the shorter one.
    return replace(scaled, per_dtensor=scaled.per_tensor + (step.per_dtensor - step.per_tensor))


def _tensors_touched(training: Training, kind: str) -> float:
    """Tensors of a parameter's size that a step reads or writes."""
    states = training.num_states
    if training.implementation(kind) == FUSED:
        return 2 * (1 + states) + 1
    # Each state takes three kernels, such as lerp, mul and addcmul, and the parameter two; a kernel reads two
    # tensors and writes one, roughly.
    return 3 * (3 * states + 2)


def device_with_bandwidth(device: DeviceInfo, bandwidth: float) -> DeviceInfo:
    """The devices with another network: between nodes, or between all ranks if there is one node.

    Args:
        device: The devices.
        bandwidth: Bytes per second of each node, or rank, in one direction.

    Raises:
        ValueError: There is no network.
    """
    if device.world_size == 1:
        raise ValueError("there is one device, and no network")
    links = tuple(_over_network(link, device, _PAYLOAD * bandwidth) for link in device.links)
    found = replace(device, links=links, measured=False)
    reduced = found.link("all_reduce")
    # What is hidden is told of the all-reduce. Of a longer one, the part that is on the wire needs no core
    # but for what TCP computes, which ranks of one machine hardly have to do.
    wire = max(0.0, 1 - reduced.bandwidth / device.link("all_reduce").bandwidth)
    if device.kind == "cpu":
        wire = max(0.0, wire - _TCP_SECONDS * _sent(reduced) * reduced.bandwidth)
    # Beside sharded units an all-reduce has half the link while a unit is gathered, and goes on while compute
    # alone runs: what the gather takes of the link meanwhile is not hidden.
    shared_wire = wire * max(0.0, 1 - reduced.bandwidth / found.link("all_gather").bandwidth)
    mixed = device.overlap if device.mixed_overlap is None else device.mixed_overlap

    def hidden(share: float, wire: float) -> float:
        return wire + (1 - wire) * share

    return replace(
        found,
        overlap=hidden(device.overlap, wire),
        mixed_overlap=hidden(mixed, shared_wire),
        compute_overlap=hidden(device.compute_overlap, wire),
    )


def device_with_faster_links(device: DeviceInfo, factor: float) -> DeviceInfo:
    """The devices with collectives that take ``1 / factor`` of the time."""
    links = tuple(
        replace(link, latency=link.latency / factor, bandwidth=link.bandwidth * factor)
        for link in device.links
    )
    return replace(device, links=links)


def profile_with_faster_compute(profile: Profile, factor: float) -> Profile:
    """A profile whose forward and backward passes take ``1 / factor`` of the time."""
    return _with_passes(profile, lambda each: replace(each, seconds=each.seconds / factor))


def profile_with_faster_host(profile: Profile, factor: float) -> Profile:
    """A profile whose kernels the host issues in ``1 / factor`` of the time."""
    return _with_passes(profile, lambda each: replace(each, host_seconds=each.host_seconds / factor))


def _with_passes(profile: Profile, changed: Callable[[PassProfile], PassProfile]) -> Profile:
    segments = tuple(
        replace(segment, forward=changed(segment.forward), backward=changed(segment.backward))
        for segment in profile.segments
    )
    return replace(profile, segments=segments)


def _over_network(link: Link, device: DeviceInfo, bandwidth: float) -> Link:
    """A link where the payload of the network is ``bandwidth`` bytes per second."""
    kind, size = _kind_and_size(link)
    in_node = device.nodes > 1 and kind == "inside" and size <= device.devices_per_node
    if in_node:
        return link
    if link.collective == "reduce_scatter" and device.holds_copies:
        # Where parts are exchanged, half as much is sent: what pays is found out again for this network.
        link = replace(link, by_exchange=True)
    # All devices of a node send at once where groups lie across nodes.
    users = device.devices_per_node if device.nodes > 1 else 1
    least = 0.0
    if kind == "two_step":
        # A device moves its part of a group's tensor across groups, then the groups share all parts.
        inside = _inside(device, link.collective, size)
        groups = link.size // size
        within = 1 / inside.bandwidth if inside is not None else (size - 1) / size / bandwidth
        sent = within + (groups - 1) / groups / size * users / bandwidth
    elif kind == "across":
        sent = _sent(link) * users / bandwidth
    else:
        # A ring enters and leaves each node once, and is as slow as its slowest part.
        inside = _inside(device, link.collective, device.devices_per_node)
        sent = _sent(link) / bandwidth
        least = 0.0 if inside is None else _sent(link) / _rate(inside)
    copied = _COPIES / device.copy_bandwidth
    return replace(link, bandwidth=1 / max(sent + copied, least), residual=0.0)


def _kind_and_size(link: Link) -> tuple[str, int]:
    """The first word of a link's group, and the ranks of each group: all of them if there is one."""
    kind, _, size = link.group.partition(" ")
    return kind, int(size or link.size)


def _inside(device: DeviceInfo, collective: str, size: int) -> Link | None:
    """The link inside groups of a node, if there are several nodes and it is known."""
    found = (link for link in device.links if (link.collective, link.group) == (collective, f"inside {size}"))
    return next(found, None) if device.nodes > 1 and size <= device.devices_per_node else None


def _sent(link: Link) -> float:
    """Bytes that a rank sends for each byte of the tensor."""
    part = (link.size - 1) / link.size
    return 2 * part if link.collective == "all_reduce" else part


def _rate(link: Link) -> float:
    """Bytes per second that a rank sends."""
    return _sent(link) * link.bandwidth


def device_with_ranks(device: DeviceInfo, ranks: int) -> DeviceInfo:
    """More or fewer of the same devices: whole nodes, or devices of the only node.

    Raises:
        ValueError: Nodes would be split, or links between devices are not known.
    """
    if ranks == device.world_size:
        return device
    per_node = device.devices_per_node
    if device.nodes > 1 and ranks % per_node and ranks > per_node:
        raise ValueError(f"{ranks} ranks do not fill nodes of {per_node}: ask for a multiple of {per_node}")
    if device.world_size == 1:
        raise ValueError(
            "links between devices cannot be told from one device: profile on two, or use --devices"
        )
    if device.nodes > 1:
        nodes, per_node = max(ranks // per_node, 1), min(ranks, per_node)
    else:
        nodes, per_node = 1, ranks
    cores = device.ranks_per_core / device.devices_per_node
    shared = device.copy_bandwidth
    if per_node < device.devices_per_node:
        # Fewer share the bandwidth of the machine's memory; how much more it has for more is not known.
        share = shared * device.devices_per_node / per_node
        shared = max(shared, min(share, device.copy_alone))
    if ranks == 1:
        # Nothing is gathered or reduced. A CPU alone is planned without hooks, as DeviceInfo.detect has it.
        device = replace(device, unit_overhead=0.0, parameter_overhead=0.0)
        if device.kind == "cpu":
            device = replace(device, gradient_overhead=0.0, pass_overhead=0.0)
    return replace(
        device,
        nodes=nodes,
        devices_per_node=per_node,
        links=tuple(_links_over(device, nodes, per_node)),
        copy_bandwidth=shared,
        ranks_per_core=min(device.ranks_per_core, math.ceil(cores * per_node)),
        measured=False,
    )


def profile_with_copies(profile: Profile, factor: float) -> Profile:
    """A profile where copies inside a device take ``factor`` of the time, as optimizer steps do by byte.

    What is copied beside, in forward and backward, comes from caches for the most part.
    """
    optimizer = profile.optimizer
    return replace(profile, optimizer=replace(optimizer, per_byte=optimizer.per_byte * factor))


def profile_without_neighbours(profile: Profile) -> Profile:
    """A profile of ranks that shared the machine of a CPU, as one rank alone would have it."""

    def alone(each: PassProfile) -> PassProfile:
        return replace(each, seconds=max(each.seconds - _BESIDE_SECONDS, each.seconds / 2))

    segments = tuple(
        replace(segment, forward=alone(segment.forward), backward=alone(segment.backward))
        for segment in profile.segments
    )
    return replace(profile, segments=segments)


def _links_over(device: DeviceInfo, nodes: int, per_node: int) -> Iterator[Link]:
    """The links of ``device`` among more or fewer of its ranks."""
    ranks = nodes * per_node
    in_steps = device.kind == "cpu"
    of_node = f"inside {device.devices_per_node}"
    one_node = device.nodes > 1 and nodes == 1 and any(link.group == of_node for link in device.links)
    for link in device.links if ranks > 1 else ():
        kind, size = _kind_and_size(link)
        if one_node and link.group == of_node:
            # What was a group is all there is now, and what lay across nodes is gone.
            yield replace(_over_ranks(link, ranks, in_steps), group="world")
        elif kind == "world" and not one_node:
            yield _over_nodes(device, _over_ranks(link, ranks, in_steps), nodes, in_steps)
        elif kind != "world" and size < ranks and ranks % size == 0 and not one_node:
            # Groups are as large as they were, and there are more or fewer of them.
            if kind == "inside":
                yield link
            elif kind == "across":
                yield _over_ranks(link, ranks // size, in_steps)
            else:
                inside = device.link(link.collective, f"inside {size}")
                yield _two_steps(link, inside, ranks, in_steps)


def _over_nodes(device: DeviceInfo, found: Link, nodes: int, in_steps: bool) -> Link:
    """A link over all ranks with the latency of other numbers of nodes.

    Of the steps of a ring, which NCCL has for gathers and reduce-scatters, one a node goes over the network.
    """
    of_node = f"inside {device.devices_per_node}"
    inside = [each for each in device.links if (each.collective, each.group) == (found.collective, of_node)]
    if in_steps or not inside or found.collective == "all_reduce" or device.nodes == 1:
        return found
    near, before = inside[0].latency, device.link(found.collective).latency
    far = max(before - device.nodes * near, 0.0) / (device.nodes - 1)
    return replace(found, latency=(nodes - 1) * far + nodes * near)


def _over_ranks(link: Link, ranks: int, in_steps: bool) -> Link:
    """A link of a ring over another number of ranks, which gloo goes around ``in_steps`` of one rank each.

    So does NCCL, but for all-reduces, for which it has trees.
    """
    part, wanted = (link.size - 1) / link.size, (ranks - 1) / ranks
    in_steps = in_steps or link.collective != "all_reduce"
    steps = (ranks - 1) / (link.size - 1) if in_steps else ring_steps(ranks) / ring_steps(link.size)
    return replace(
        link, size=ranks, latency=link.latency * steps, bandwidth=link.bandwidth * part / wanted, residual=0.0
    )


def _two_steps(link: Link, inside: Link, ranks: int, in_steps: bool) -> Link:
    """A route in two steps with another number of groups: what it takes beyond ``inside`` lies across."""
    slower = max(1 / link.bandwidth - 1 / inside.bandwidth, 0.01 / link.bandwidth)
    across = Link(
        link.collective, "", link.size // inside.size, max(link.latency - inside.latency, 0.0), 1 / slower
    )
    across = _over_ranks(across, ranks // inside.size, in_steps)
    return replace(
        link,
        size=ranks,
        latency=inside.latency + across.latency,
        bandwidth=1 / (1 / inside.bandwidth + 1 / across.bandwidth),
        residual=0.0,
    )
