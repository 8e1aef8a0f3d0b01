"""Seconds of one item of a transformer on one kind of accelerator: a roofline with a floor of launches.

Products of matrices take the longer of the operations that they occupy the device for
(:mod:`osdp.cost.matmul`) and of moving their bytes, as those of attention's scores do; all else moves its
bytes. The host calls the operators meanwhile (:mod:`osdp.cost.rates`).
"""

from dataclasses import dataclass

from osdp.cluster import Gpu
from osdp.cost.layer_work import Gemm, LayerWork
from osdp.cost.matmul import aligned, occupied_flops
from osdp.cost.rates import Rates


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Compute of one microbatch, without any communication.

    Attributes:
        forward: Of a forward.
        backward: Of a backward.
        attention: Of the forward of the products of attention alone.
    """

    forward: float
    backward: float
    attention: float

    def __mul__(self, factor: float) -> "LayerSeconds":
        """All of them, longer by a factor."""
        return LayerSeconds(self.forward * factor, self.backward * factor, self.attention * factor)

    def scaled(self, to: "LayerSeconds", by: "LayerSeconds") -> "LayerSeconds":
        """Times ``to`` over ``by``, pass for pass."""
        return LayerSeconds(
            self.forward * to.forward / by.forward,
            self.backward * to.backward / by.backward,
            self.attention * to.attention / by.attention if by.attention else 0.0,
        )


def layer_seconds(work: LayerWork, gpu: Gpu, rates: Rates) -> LayerSeconds:
    """The compute of one item."""
    bandwidth = gpu.memory_bandwidth * rates.memory_share
    calling = work.kernels * rates.call_seconds
    forward = sum(_seconds(gemm, gpu, rates) for gemm in work.gemms) + work.moved_bytes / bandwidth
    backward = work.backward_bytes / bandwidth
    for gemm in work.gemms:
        backward += sum(_seconds(part, gpu, rates) for part in gemm.gradients)
        # Scores that were not kept are one of the two products once more.
        backward += _seconds(gemm, gpu, rates) / 2 if gemm.fused else 0.0
    return LayerSeconds(
        forward=rates.together(forward, calling),
        backward=rates.together(backward, calling),
        attention=sum(_seconds(gemm, gpu, rates) for gemm in work.attention),
    )


def _seconds(gemm: Gemm, gpu: Gpu, rates: Rates) -> float:
    """Of one product."""
    rows, columns, inner = gemm.rows, gemm.columns, gemm.inner
    share = rates.matrix_share * (1.0 if aligned(rows, columns, inner) else rates.unaligned_share)
    occupied = occupied_flops(rows, columns, inner, gemm.count, gpu.multiprocessors)
    return max(occupied / (gpu.flops * share), gemm.moved_bytes / (gpu.memory_bandwidth * rates.memory_share))
