"""Compute time of one item of a transformer on one kind of accelerator: a roofline with host overhead.

A matrix product, those of attention included, takes the longer of its FLOPs (rounded up to tiles and waves,
:mod:`osdp.cluster.cost.rates`) and of moving its bytes; all other operators are memory-bound. The host calls
the operators concurrently (:mod:`osdp.cluster.cost.rates`).
"""

from dataclasses import dataclass

from osdp.cluster.cost.layer_work import Gemm, LayerWork
from osdp.cluster.cost.rates import DeviceEfficiencies, Efficiencies, is_aligned, occupied_flops, together
from osdp.cluster.hardware import BEST_SHARE, Gpu


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Compute seconds of one item for one microbatch, without communication.

    Attributes:
        forward: Seconds of a forward.
        backward: Seconds of a backward.
        attention: Seconds of the attention products (scores and weighted sum) in a forward.
        selective: Seconds of what selective recomputation repeats: these, and softmax and dropout of scores.
    """

    forward: float
    backward: float
    attention: float
    selective: float

    def __mul__(self, factor: float) -> "LayerSeconds":
        """All times multiplied by a factor."""
        return LayerSeconds(
            self.forward * factor, self.backward * factor, self.attention * factor, self.selective * factor
        )

    def scale(self, to: "LayerSeconds", by: "LayerSeconds") -> "LayerSeconds":
        """All times multiplied by the ratio of ``to`` and ``by``, each by its own."""
        return LayerSeconds(
            self.forward * to.forward / by.forward,
            self.backward * to.backward / by.backward,
            self.attention * to.attention / by.attention if by.attention else 0.0,
            self.selective * to.selective / by.selective if by.selective else 0.0,
        )


def layer_seconds(work: LayerWork, gpu: Gpu, rates: Efficiencies) -> LayerSeconds:
    """Modelled compute seconds of one item.

    Args:
        work: Work of one rank for one microbatch.
        gpu: The device.
        rates: Efficiencies of devices and host.
    """
    # Products and memory-bound operators run one after the other on the device, host calls concurrently.
    own = rates.on(gpu.name)
    bandwidth = gpu.memory_bandwidth * own.memory_share
    calling = work.kernels * own.call_seconds
    forward = sum(_seconds(gemm, gpu, own) for gemm in work.gemms) + work.moved_bytes / bandwidth
    backward = work.backward_bytes / bandwidth
    for gemm in work.gemms:
        backward += sum(_seconds(part, gpu, own) for part in gemm.gradients)
        # FlashAttention recomputes the scores in its backward: one of its two products once more.
        backward += _seconds(gemm, gpu, own) / 2 if gemm.fused else 0.0
    attention = sum(_seconds(gemm, gpu, own) for gemm in work.attention)
    return LayerSeconds(
        forward=together(forward, calling, own.blend),
        backward=together(backward, calling, own.blend),
        attention=attention,
        selective=attention + work.score_moved_bytes / bandwidth,
    )


def _seconds(gemm: Gemm, gpu: Gpu, rates: Efficiencies | DeviceEfficiencies) -> float:
    """Device seconds of one matrix product."""
    rows, columns, inner = gemm.rows, gemm.columns, gemm.inner
    # The rates are those of an A100; other GPUs sustain another part of what is specified.
    reached = gpu.attention_share if gemm.fused else gpu.best_share
    share = reached / BEST_SHARE * rates.matrix_share
    share *= 1.0 if is_aligned(rows, columns, inner) else rates.unaligned_share
    occupied = occupied_flops(rows, columns, inner, gemm.count, gpu.multiprocessors)
    return max(occupied / (gpu.flops * share), gemm.moved_bytes / (gpu.memory_bandwidth * rates.memory_share))
