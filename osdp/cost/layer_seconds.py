"""Seconds of one item of a transformer on one kind of accelerator: a roofline with a floor of launches.

A product of matrices takes its operations at :data:`MATRIX_SHARE` of the specified speed and
:data:`RAMP_SECONDS` to fill and drain the device; all else moves its bytes at :data:`MEMORY_SHARE` of the
specified bandwidth. No pass takes less than launching its kernels, one after the other.
"""

from dataclasses import dataclass

from osdp.cluster import Gpu
from osdp.cost.layer_work import LayerWork

#: Calculon (Isaev et al., SC 2023, its A100 system file) takes 0.95 of the peak above 128 GFLOP, 0.9 at 16
#: and 0.6 at 1: with an A100's 312 TFLOP/s that is this share, and so many seconds for each product.
MATRIX_SHARE, RAMP_SECONDS = 0.95, 2.5e-6

#: Share of the specified memory bandwidth that streaming kernels reach: between 0.87 and 0.92 for copies on
#: V100 and A100 (Jia et al., arXiv:1804.06826; NVIDIA, "A100 whitepaper", 2020).
MEMORY_SHARE = 0.9

#: Seconds between two launches from eager PyTorch on a fast host, as in :mod:`osdp.profiler.estimate`.
LAUNCH_SECONDS = 1e-5


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


def layer_seconds(work: LayerWork, gpu: Gpu) -> LayerSeconds:
    """The compute of one item."""
    products = sum(_gemm(gemm.flops, gpu) for gemm in work.gemms)
    moving = work.moved_bytes / (gpu.memory_bandwidth * MEMORY_SHARE)
    launching = work.kernels * LAUNCH_SECONDS
    return LayerSeconds(
        forward=max(products + moving, launching),
        backward=max(2 * (products + moving), 2 * launching),
        attention=sum(_gemm(gemm.flops, gpu) for gemm in work.attention),
    )


def _gemm(flops: float, gpu: Gpu) -> float:
    return flops / (gpu.flops * MATRIX_SHARE) + RAMP_SECONDS
