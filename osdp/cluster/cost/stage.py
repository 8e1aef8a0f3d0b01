"""Time and memory of every stage that a chain of items can be cut into, on one kind of slot.

A stage is a contiguous part ``start .. stop - 1`` of the chain of ``I`` items. A sum over its items is
computed as the number of items of each kind times the cost of that kind. All stages are thereby evaluated at
once, and equal stages have equal costs to the last bit.

Bytes of weights, gradients and optimizer states under ZeRO are those of Rajbhandari et al. (SC 2020,
arXiv:1910.02054, section 5). Communication volumes are those of the collectives actually run: gradients are
reduced in ``reduce_bytes`` and weights gathered in ``weight_bytes`` per number; ZeRO 2 and 3 reduce gradients
after every microbatch, and ZeRO 3 all-gathers weights for every forward and every backward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from osdp.cluster.cost.context_exchange import exchange_seconds, exchanged_bytes
from osdp.cluster.cost.corrections import LayerSize, correction_factor, deviation_at
from osdp.cluster.cost.item_prices import ItemPrices
from osdp.cluster.cost.layer_time import LayerSeconds, layer_seconds
from osdp.cluster.cost.layer_work import WHOLE, Kernels, LayerWork, SequenceParts, layer_work
from osdp.cluster.cost.links import SlotHardware, slot_hardware
from osdp.cluster.cost.measured_layers import measured_seconds, with_measured_bytes
from osdp.cluster.cost.rates import PUBLISHED, Efficiencies
from osdp.cluster.hardware import Cluster, Gpu
from osdp.cluster.layer_profile import LayerCase, LayerCost, LayerProfile
from osdp.cluster.plan import LayerStrategy, ParallelLayout, RecomputeLayers, StageSlot, Workload
from osdp.cluster.spread import PUBLISHED_SPREAD, Spread, fitted_spread
from osdp.cluster.transformer import LAYERS, Item, TransformerShape

Floats = NDArray[np.float64]


class StagePrices:
    """Costs of stages on one kind of slot, with one strategy for all items, by the number of their items.

    All arrays have the shape of those counts.

    Attributes:
        hardware: The slot's devices and links.
        items: Costs of each kind of item.
    """

    def __init__(
        self, prices: "ClusterPrices", layout: ParallelLayout, slot: StageSlot, counts: Mapping[Item, Floats]
    ) -> None:
        self.hardware = prices.hardware(layout, slot)
        self.items = prices.item_prices(layout, slot)
        self._prices, self._layout, self._counts = prices, layout, counts

    @cached_property
    def seconds(self) -> Floats:
        """Seconds per microbatch, forward and backward, without transfers between stages."""
        return self._sum({kind: item.seconds for kind, item in self.items.items()})

    @cached_property
    def backward(self) -> Floats:
        """Seconds of a backward's compute."""
        return self._sum({kind: item.backward for kind, item in self.items.items()})

    @cached_property
    def parameters(self) -> Floats:
        """Parameter count on a rank before data-parallel sharding."""
        total = self._sum({kind: item.parameters for kind, item in self.items.items()})
        return total - self._stored_once

    @cached_property
    def undivided(self) -> Floats:
        """The same with all experts, of which a rank may have a part."""
        if self._layout.ep == 1:
            return self.parameters
        return self._sum({kind: item.undivided for kind, item in self.items.items()}) - self._stored_once

    @cached_property
    def _stored_once(self) -> Floats:
        """Parameters that several of the tied items of a stage have in common."""
        tied = self._sum(dict.fromkeys(self._prices.workload.shape.tied_items, 1))
        copies: Floats = np.maximum(tied - 1, 0)
        return copies * self._prices.tied_numbers(self._layout)

    @cached_property
    def kept(self) -> Floats:
        """Bytes saved for backward per microbatch in flight, without those of the head."""
        return self._sum({kind: item.kept for kind, item in self.items.items() if kind is not Item.HEAD})

    @cached_property
    def logits(self) -> Floats:
        """Bytes saved by the head per microbatch that it has in flight."""
        return self._sum({Item.HEAD: self.items[Item.HEAD].kept})

    @cached_property
    def working(self) -> Floats:
        """Maximum transient bytes of any item, without the buffers of transfers between stages."""
        there = [
            (self._counts[kind] > 0) * self._prices.working_bytes(self._layout, item)
            for kind, item in self.items.items()
        ]
        most: Floats = np.max(there, axis=0)
        return most

    @cached_property
    def end(self) -> Floats:
        """Seconds after the last microbatch: gradient collectives and the optimizer step."""
        # The backward matters only where it can hide gradient collectives.
        backward = self.backward if self._prices.workload.overlap else 0.0
        return self._prices.end_seconds(
            self._layout, self.hardware, self.parameters, self.undivided, backward
        )

    def _sum(self, values: Mapping[Item, float]) -> Floats:
        """Sum of a value per kind of item over the items of each stage."""
        first, *others = (self._counts[kind] * value for kind, value in values.items())
        return sum(others, first)


class ClusterPrices:
    """Costs of one workload on one cluster; intermediate results that layouts share are cached."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        rates: Efficiencies = PUBLISHED,
        profiles: Sequence[LayerProfile] = (),
        traced: Sequence[LayerCost] = (),
        *,
        certain: bool = False,
    ) -> None:
        self.cluster = cluster
        #: Whether a stage fits only if it does at the end of the interval of its peak as well.
        self.certain = certain
        self.profiles = tuple(profiles)
        #: Activations of this model as traced, for devices without a measured profile.
        self.traced = tuple(traced)
        #: Measured profiles of this model, by the name of the device.
        self._profiles = {p.gpu: p for p in profiles if p.model == workload.shape.name}
        self.workload = workload
        self._kernels = Kernels(
            width=workload.weight_bytes,
            flash=workload.flash,
            sequence_parallel=workload.sequence_parallel,
            regathers_inputs=workload.regathers_inputs,
            dropout=workload.has_dropout,
            fused_gate=workload.fused_gate,
            fused_loss=workload.fused_loss,
            ring_attention=workload.ring_attention,
        )
        self.rates = rates
        self.items = workload.shape.items
        self.kinds = tuple(dict.fromkeys(self.items))
        #: Number of items of each kind in the stage ``start .. stop - 1``, indexed ``[start, stop]``;
        #: ``(I + 1, I + 1)`` each.
        self.counts = {kind: _count(self.items, kind) for kind in self.kinds}
        self._hardware: dict[tuple[object, ...], SlotHardware] = {}
        self._items: dict[tuple[object, ...], dict[Item, ItemPrices]] = {}
        self._work: dict[tuple[LayerCase, SequenceParts, int], LayerWork] = {}
        self._seconds: dict[tuple[LayerCase, SequenceParts, int, Gpu], LayerSeconds] = {}
        self._factors: dict[tuple[int, int], float] = {}
        self._spreads: dict[tuple[int, int], Spread] = {}
        self._padded: dict[int, TransformerShape] = {}

    @cached_property
    def as_predicted(self) -> "ClusterPrices":
        """The same costs where a stage fits if it does as predicted."""
        if not self.certain:
            return self
        return ClusterPrices(self.cluster, self.workload, self.rates, self.profiles, self.traced)

    def work(self, item: Item, layout: ParallelLayout) -> LayerWork:
        """Work of one rank for one item on one token slice of a microbatch."""
        key = (self._case(item, layout), SequenceParts(layout.token_slices, layout.cp), layout.ep)
        if key not in self._work:
            self._work[key] = self._work_of(*key)
        return self._work[key]

    def _case(self, item: Item, layout: ParallelLayout) -> LayerCase:
        return LayerCase(item, layout.samples, self.workload.shape.sequence, layout.degrees.tp)

    def _work_of(self, case: LayerCase, parts: SequenceParts = WHOLE, ep: int = 1) -> LayerWork:
        shape = self.padded(case.tp)
        if case.sequence != shape.sequence:
            shape = replace(shape, sequence=case.sequence)
        return layer_work(shape, case.item, case.samples, case.tp, self._kernels, parts=parts, ep=ep)

    def padded(self, tp: int) -> TransformerShape:
        """The model with its vocabulary as the framework pads it for ``tp`` tensor-parallel ranks."""
        if tp not in self._padded:
            shape, multiple = self.workload.shape, self.workload.vocabulary_multiple * tp
            self._padded[tp] = replace(shape, vocabulary=-(-shape.vocabulary // multiple) * multiple)
        return self._padded[tp]

    def hardware(self, layout: ParallelLayout, slot: StageSlot) -> SlotHardware:
        """Devices and links of a slot."""
        margin = self.spread(layout).peak_high if self.certain else 1.0
        degrees = layout.degrees
        key = (degrees.tp, degrees.dp, layout.cp, layout.ep, layout.shard_degree, slot.nodes, margin)
        if key not in self._hardware:
            self._hardware[key] = slot_hardware(self.cluster, layout, slot, margin=margin)
        return self._hardware[key]

    def border_bytes(self, layout: ParallelLayout) -> Floats:
        """Bytes of a token slice sent forward over the boundary before each item; shape ``(I + 1,)``."""
        outputs = {kind: self.work(kind, layout).output_bytes for kind in self.kinds}
        return np.array([0.0, *(outputs[item] for item in self.items[:-1]), 0.0])

    def stage_prices(self, layout: ParallelLayout, slot: StageSlot) -> StagePrices:
        """Costs of all stages of ``layout``, which has one strategy for all items, on a kind of slot.

        Arrays are indexed ``[start, stop]`` and have shape ``(I + 1, I + 1)``.
        """
        return StagePrices(self, layout, slot, self.counts)

    def item_prices(self, layout: ParallelLayout, slot: StageSlot) -> dict[Item, ItemPrices]:
        """Costs of each kind of item, in order of first appearance in the chain."""
        degrees, strategy = layout.degrees, layout.strategy
        parts = (layout.samples, layout.token_slices, layout.cp, layout.ep, layout.shard_degree)
        # On a part of the cluster the same stage may be the only one, and then shards while it runs.
        key = (degrees.tp, degrees.dp, degrees.pp > 1, *parts, strategy, slot.nodes)
        if key not in self._items:
            hardware = self.hardware(layout, slot)
            self._items[key] = {item: self._item(item, layout, hardware) for item in self.kinds}
        return self._items[key]

    def tied_numbers(self, layout: ParallelLayout) -> int:
        """Parameter count of a tied embedding's weight on one rank."""
        shape = self.padded(layout.degrees.tp)
        return shape.vocabulary // layout.degrees.tp * shape.hidden

    def gradient_seconds(
        self,
        layout: ParallelLayout,
        hardware: SlotHardware,
        parameters: Floats,
        undivided: Floats,
        backward: Floats | float,
    ) -> Floats:
        """Exposed seconds of the collectives at the end of a step.

        ZeRO 0 all-reduces gradients, ZeRO 1 reduce-scatters them, or all-reduces them where the framework
        does (``whole_reductions``); ZeRO 1 and 2 then all-gather the updated weights. ZeRO 2 and 3 have
        reduced their gradients in every microbatch.

        Args:
            layout: Degrees and sharding.
            hardware: Devices and links of the slot.
            parameters: Parameter count on a rank before data-parallel sharding; any shape.
            undivided: The same with all experts; likewise.
            backward: Seconds of the last backward, behind which reductions can hide.

        Returns:
            Seconds, in the shape of ``parameters``.
        """
        if layout.replicas == 1:
            return np.zeros_like(parameters)
        load, ring = self.workload, hardware.data
        zero = self._shards_while_running(layout.strategy, layout)
        fixed = ring.scatter_seconds(0.0) if zero else ring.reduce_seconds(0.0) / 2
        of_byte = _seconds_of_byte(layout, hardware, parameters, undivided)
        # In units of one reduce-scatter; an all-reduce costs two.
        scatters = {0: 2, 1: 1 + load.whole_reductions}.get(zero, 0)
        reduction = scatters * (fixed + load.reduce_bytes * of_byte) + _copied_seconds(
            layout, hardware, load.reduce_bytes * parameters
        ) * (zero == 1)
        # torch's pipelines reduce when the last backward has ended: nothing is beside it.
        overlap = 0.0 if self._reduces_late(layout) else load.overlap
        exposed = reduction - overlap * np.minimum(reduction, backward)
        if zero == 1 or (zero == 2 and not load.gathers_each_microbatch):
            gather = fixed + load.weight_bytes * of_byte
            # Beside the next forward, which takes about half of a backward.
            exposed = exposed + gather - load.overlap * np.minimum(gather, np.divide(backward, 2))
        return np.where(parameters > 0, exposed, 0.0)

    def update_seconds(
        self, layout: ParallelLayout, hardware: SlotHardware, parameters: Floats, undivided: Floats
    ) -> Floats:
        """Seconds of the optimizer step: gradients are read, weights and states are read and written.

        With those of passes over all gradients before they are sharded.
        """
        load = self.workload
        moved = load.gradient_bytes + 2 * (load.weight_bytes + load.state_bytes)
        held = self.updated(layout.strategy, layout, parameters, undivided)
        slowest = min(gpu.memory_bandwidth * self.rates.on(gpu.name).memory_share for gpu in hardware.gpus)
        seconds: Floats = held * (moved / slowest) + parameters * (load.whole_passes_bytes / slowest)
        return seconds

    def updated(
        self, strategy: LayerStrategy, layout: ParallelLayout, parameters: Floats, undivided: Floats
    ) -> Floats:
        """Parameters that a rank's optimizer updates; ``undivided`` as for :meth:`gradient_seconds`."""
        return undivided / layout.shards if strategy.zero else parameters

    def parameter_bytes(
        self, strategy: LayerStrategy, layout: ParallelLayout, parameters: Floats, undivided: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Bytes of weights, gradients and optimizer states that a rank keeps; arguments as above."""
        load, sharded = self.workload, undivided / layout.shards
        sizes = ((load.weight_bytes, 3), (load.gradient_bytes, 2), (load.state_bytes, 1))
        zero = self._shards_while_running(strategy, layout)
        weights, gradients, states = (
            (sharded if zero >= stage else parameters) * size for size, stage in sizes
        )
        return weights, gradients, states

    def _shards_while_running(self, strategy: LayerStrategy, layout: ParallelLayout) -> int:
        """The ZeRO stage of what is kept, and communicated, while microbatches run."""
        return min(strategy.zero, 1) if self._reduces_late(layout) else strategy.zero

    def _reduces_late(self, layout: ParallelLayout) -> bool:
        """Whether gradients stay whole until the last backward of a pipeline has ended."""
        return layout.degrees.pp > 1 and not self.workload.reduces_in_stages

    def reserve(self, layout: ParallelLayout) -> int:
        """Bytes of each device outside of PyTorch's allocator: its context, and a communicator an axis."""
        degrees = layout.degrees
        axes = sum(ranks > 1 for ranks in (degrees.pp, degrees.dp, degrees.tp, layout.cp, layout.ep))
        axes += 1 < layout.ep < layout.replicas  # those who hold the same experts
        return self.workload.reserve + axes * self.workload.communicator_bytes

    def _item(self, item: Item, layout: ParallelLayout, hardware: SlotHardware) -> ItemPrices:
        """Costs of one item with the strategy of a uniform layout; all token slices of a microbatch."""
        work, slices = self._work_on(item, layout, hardware), layout.token_slices
        recompute = layout.strategy.recompute
        slowest = [self._layer_seconds(item, layout, gpu) for gpu in hardware.gpus]
        # 1. Compute: a stage on several kinds of devices runs at the pace of the slowest.
        forward, backward = max(s.forward for s in slowest), max(s.backward for s in slowest)
        layer = item in LAYERS
        full = layer and recompute is RecomputeLayers.FULL
        recomputed = forward if full else 0.0
        if layer and recompute is RecomputeLayers.SELECTIVE:
            recomputed = max(s.selective for s in slowest)
        # 2. Tensor-parallel all-reduces: in the forward, the backward and a recomputed forward.
        sums = (work.sums + work.forward_sums * full) * self._factor(layout)
        # 3. Memory: recomputation saves activations but makes them part of the item's transient memory.
        lost = self.workload.fragmentation if recompute is RecomputeLayers.FULL else 0.0
        kept = work.kept_bytes
        if full:
            kept = min(work.input_bytes, work.kept_bytes)
        elif recompute is RecomputeLayers.SELECTIVE:
            kept -= work.score_bytes
        around, attention = self.workload.ring_attention, min(s.attention for s in slowest)
        context = exchange_seconds(
            hardware.context, work.cache_bytes, attention, forwards=1 + full, around=around
        )
        exchanged = exchanged_bytes(layout.cp, work.cache_bytes, around=around)
        # To the experts and back, in the forward, the backward and a recomputed forward.
        routing = 2 * (2 + full) * hardware.experts.seconds(work.routed_bytes) if work.routed_bytes else 0.0
        degrees = layout.degrees
        shape = self.padded(degrees.tp)
        parameters = shape.parameters(item, degrees.tp, layout.ep)
        undivided = parameters + (layout.ep - 1) * shape.expert_parameters(item, degrees.tp, layout.ep)
        summing = self.rates.sum_wait(layout.degrees.tp) + hardware.tensor.reduce_seconds(work.summed_bytes)
        return ItemPrices(
            compute=slices * (forward + backward),
            recompute=slices * recomputed,
            backward=slices * backward,
            tensor=slices
            * _exposed_seconds(sums * summing, forward + backward, self.workload.tensor_overlap),
            context=context,
            experts=slices * routing,
            shards=self._shards(
                layout,
                hardware,
                float(_seconds_of_byte(layout, hardware, np.array(parameters), np.array(undivided))),
                float(_copied_seconds(layout, hardware, np.array(self.workload.reduce_bytes * parameters))),
                slices * forward,
                slices * (backward + recomputed),
            ),
            parameters=parameters,
            undivided=undivided,
            kept=_held(slices * kept + _cache_bytes(work, slices), lost),
            working=_held(work.working_bytes + (work.kept_bytes - kept) + exchanged, lost),
        )

    def _work_on(self, item: Item, layout: ParallelLayout, hardware: SlotHardware) -> LayerWork:
        """Work of an item with the activations measured on the slot's devices, or else traced.

        With several kinds of devices, the largest bytes count (and the smallest saving by recomputation).
        """
        work, case = self.work(item, layout), self._case(item, layout)
        if not self._profiles and not self.traced:
            return work
        found = []
        for gpu in hardware.gpus:
            profile = self._profiles.get(gpu.name)
            known = self.traced if profile is None else profile.layers
            found.append(with_measured_bytes(work, known, case, self._work_of))
        return replace(
            work,
            kept_bytes=max(each.kept_bytes for each in found),
            score_bytes=min(each.score_bytes for each in found),
            working_bytes=max(each.working_bytes for each in found),
        )

    def _layer_seconds(self, item: Item, layout: ParallelLayout, gpu: Gpu) -> LayerSeconds:
        """Seconds of one token slice on one kind of device: measured if known, otherwise modelled."""
        parts = SequenceParts(layout.token_slices, layout.cp)
        key = (self._case(item, layout), parts, layout.ep, gpu)
        if key not in self._seconds:
            with_kernel = gpu
            if self.workload.cudnn_attention and gpu.cudnn_attention_share:
                with_kernel = replace(gpu, attention_share=gpu.cudnn_attention_share)
            modelled = layer_seconds(self.work(item, layout), with_kernel, self.rates) * self._factor(layout)
            self._seconds[key] = self._measured_seconds(item, layout, gpu) or modelled
        return self._seconds[key]

    def _measured_seconds(self, item: Item, layout: ParallelLayout, gpu: Gpu) -> LayerSeconds | None:
        """Seconds from the profile of a device; ``None`` if it has none of the item."""
        if gpu.name not in self._profiles:
            return None

        def modelled(case: LayerCase) -> LayerSeconds:
            return layer_seconds(self._work_of(case), gpu, self.rates)

        case = self._case(item, layout)
        whole = measured_seconds(self._profiles[gpu.name], case, modelled)
        if whole is None or layout.token_slices == layout.cp == 1:
            return whole
        # Profiles measure whole sequences: scale to a part by the modelled ratio.
        of_part = layer_seconds(self.work(item, layout), gpu, self.rates)
        return whole.scale(of_part, modelled(case))

    def spread(self, layout: ParallelLayout) -> Spread:
        """How far measurements may lie from what is predicted for a layout."""
        rates, shape = self.rates, self.workload.shape
        if not rates.error_quantile:
            return PUBLISHED_SPREAD
        key = (layout.samples, layout.degrees.tp)
        if key not in self._spreads:
            size = LayerSize(shape.hidden, shape.heads, shape.sequence, layout.degrees.tp, layout.samples)
            deviation = deviation_at(rates.corrections, size)
            self._spreads[key] = fitted_spread(rates.error_quantile * deviation)
        return self._spreads[key]

    def _factor(self, layout: ParallelLayout) -> float:
        """Correction factor of the modelled seconds, interpolated from measured layers."""
        shape, key = self.workload.shape, (layout.samples, layout.degrees.tp)
        if key not in self._factors:
            size = LayerSize(shape.hidden, shape.heads, shape.sequence, layout.degrees.tp, layout.samples)
            self._factors[key] = correction_factor(self.rates.corrections, size)
        return self._factors[key]

    def _shards(
        self,
        layout: ParallelLayout,
        hardware: SlotHardware,
        of_byte: float,
        copied: float,
        forward: float,
        backward: float,
    ) -> float:
        """Exposed seconds of the collectives that ZeRO 2 and 3 run in every microbatch.

        ``of_byte`` and ``copied`` are what :func:`_seconds_of_byte` and :func:`_copied_seconds` give for an
        item.
        """
        load, fixed = self.workload, hardware.data.scatter_seconds(0.0)
        zero = self._shards_while_running(layout.strategy, layout)
        if zero < 2 or layout.replicas == 1 or not of_byte:
            return 0.0
        gather = fixed + load.weight_bytes * of_byte
        scatters = 2 if zero == 2 and load.whole_reductions else 1
        scatter = scatters * (fixed + load.reduce_bytes * of_byte) + copied
        before_forward = gather if zero == 3 or load.gathers_each_microbatch else 0.0
        before_backward = gather if zero == 3 else 0.0
        overlap = load.overlap_under(zero)
        return _exposed_seconds(before_forward, forward, overlap) + _exposed_seconds(
            before_backward + scatter, backward, overlap
        )

    def working_bytes(self, layout: ParallelLayout, item: ItemPrices) -> float:
        """Transient bytes of one item, including its unsharded gradients (ZeRO 2) and weights (ZeRO 3).

        Of gradients there are those of this item, and of the item before while they are reduced
        (osdp.cost.sharding.simulate).
        """
        load, zero = self.workload, self._shards_while_running(layout.strategy, layout)
        if layout.replicas == 1:
            return item.working
        # Gradients that are reduced are copied into buckets, where there are some.
        moved = self._gathered_numbers(layout, item)
        buckets = load.bucket_bytes if zero and layout.degrees.pp == 1 else 0
        whole = load.reduce_bytes * moved + max(buckets, load.reduce_bytes * moved) if zero >= 2 else buckets
        # This item's weights, and those of the next item while they are prefetched.
        gathered = 0
        if zero == 3:
            gathered = 2 * load.weight_bytes * moved
            if load.gathered_bytes > gathered:
                gathered = max(
                    gathered, min(load.gathered_bytes, load.weight_bytes * self._all_numbers(layout))
                )
        return item.working + whole + gathered

    def _gathered_numbers(self, layout: ParallelLayout, item: ItemPrices) -> int:
        """Parameters of an item that are gathered, and whose gradients are reduced, over several ranks."""
        if layout.replicas == layout.ep > 1:  # experts are on one rank each
            return item.parameters - (item.undivided - item.parameters) // (layout.ep - 1)
        return item.parameters

    def _all_numbers(self, layout: ParallelLayout) -> int:
        """Parameters of all items on one tensor-parallel rank."""
        shape, tp = self.workload.shape, layout.degrees.tp
        return sum(self.items.count(kind) * shape.parameters(kind, tp, layout.ep) for kind in self.kinds)

    def end_seconds(
        self,
        layout: ParallelLayout,
        hardware: SlotHardware,
        parameters: Floats,
        undivided: Floats,
        backward: Floats | float,
    ) -> Floats:
        """Seconds after the last microbatch: gradient collectives and the optimizer step."""
        exchanged = self.gradient_seconds(layout, hardware, parameters, undivided, backward)
        exchanged += self.update_seconds(layout, hardware, parameters, undivided)
        return exchanged


def _seconds_of_byte(
    layout: ParallelLayout, hardware: SlotHardware, parameters: Floats, undivided: Floats
) -> Floats:
    """Seconds of a reduce-scatter or an all-gather of one byte for each parameter, without its latency.

    Experts are reduced over the ranks that hold the same ones, everything else over all replicas.
    """
    if layout.ep == 1:
        return parameters * hardware.data.seconds_of_byte
    experts = (undivided - parameters) / (layout.ep - 1)
    of_byte = hardware.data.seconds_of_byte, hardware.expert_data.seconds_of_byte
    seconds: Floats = (parameters - experts) * of_byte[0] + experts * of_byte[1]
    return seconds


def _copied_seconds(layout: ParallelLayout, hardware: SlotHardware, nbytes: Floats) -> Floats:
    """Seconds of the all-reduce of shards of gradients of ``nbytes`` with the groups that have copies."""
    ring = hardware.copies
    if ring.size == 1:
        return np.zeros_like(nbytes, dtype=float)
    seconds: Floats = ring.reduce_seconds(0.0) + nbytes / layout.shards * 2 * ring.seconds_of_byte
    return seconds


def _held(nbytes: int, lost: float) -> int:
    """Bytes that the allocator holds for tensors of ``nbytes``, a share of which is lost between them."""
    return math.ceil(nbytes / (1 - lost))


def _cache_bytes(work: LayerWork, slices: int) -> int:
    """Bytes kept in addition to activations with token slices: all keys and values, and their gradients."""
    return 0 if slices == 1 else 2 * slices * work.cache_bytes


def _exposed_seconds(communication: float, compute: float, overlap: float) -> float:
    """Seconds of communication that compute does not hide."""
    return communication - overlap * min(communication, compute)


def _count(items: Sequence[Item], kind: Item) -> Floats:
    """Number of items of a kind in ``start .. stop - 1``, indexed ``[start, stop]``; ``(I + 1, I + 1)``."""
    prefix = np.concatenate([[0.0], np.cumsum(np.array([item is kind for item in items], dtype=float))])
    count: Floats = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
    return count
