"""Rates of devices: shares of the specification, tiles and waves of matrix products, host time per call.

A device computes the result of a matrix product in tiles, each on one of its multiprocessors. A partial tile
at an edge costs as much as a whole one (tile quantisation), and while the last tiles are computed the other
multiprocessors are idle (wave quantisation; NVIDIA, Matrix Multiplication Background User's Guide,
DU-09799-001, sections 2.1 and 3). The tile size is the guide's most efficient one; libraries also use smaller
tiles where those waste less, at a lower rate.

:class:`Efficiencies` are the coefficients of the time model; :mod:`osdp.cluster.calibration.calibrate` fits
them to measured steps. Without measurements they are :data:`PUBLISHED`, taken from published measurements.

    seconds of a pass = (device^p + host^p)^(1/p)

The host calls operators while the device runs earlier ones, so that the slower of the two sets the time. The
exponent p is how well they overlap: for infinity the slower one alone counts (a roofline with a floor), for 1
they run one after the other. ``blend`` is 1/p.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from osdp.cluster.cost.corrections import Correction

#: Rows and columns of a tile, used in either orientation.
_TILE = (256, 128)

#: 16-bit elements in the widest load of a multiprocessor (16 bytes); rows of other lengths need narrower
#: loads.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class DeviceEfficiencies:
    """What is fitted for one kind of GPU, and its host, where measured steps ran on several kinds.

    Attributes:
        gpu: Name of the GPU.
        matrix_share: As in :class:`Efficiencies`, and so are the others.
        unaligned_share: Likewise.
        memory_share: Likewise.
        call_seconds: Likewise.
        blend: Likewise.
    """

    gpu: str
    matrix_share: float
    unaligned_share: float
    memory_share: float
    call_seconds: float
    blend: float


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Coefficients of the time model of a step.

    Attributes:
        matrix_share: Share of the specified FLOP/s of an A100 reached by matrix products that fill it; other
            devices by the ratio of their :attr:`osdp.cluster.hardware.Gpu.best_share`.
        unaligned_share: Share of that reached by products whose rows do not allow the widest loads.
        memory_share: Share of the specified memory bandwidth reached by everything else.
        call_seconds: Host seconds per operator call of a forward; its backward takes as long again.
        blend: 1/p as above, from 0 to 1.
        sum_seconds: Seconds of each tensor-parallel all-reduce of two ranks in addition to the latency of the
            link: its launch, and the rank that waits for the other one.
        step_seconds: Fixed seconds per step: data loading, training loop, gradient scaler.
        devices: Kinds of GPUs with coefficients of their own.
        corrections: Residuals of measured layers.
        error_quantile: 90 % quantile of the errors of steps that were held out, in standard deviations
            (:func:`osdp.cluster.cost.corrections.deviation_at`); 0 if nothing was fitted.
    """

    matrix_share: float
    unaligned_share: float
    memory_share: float
    call_seconds: float
    blend: float = 0.0
    sum_seconds: float = 0.0
    step_seconds: float = 0.0
    devices: tuple[DeviceEfficiencies, ...] = ()
    corrections: tuple[Correction, ...] = ()
    error_quantile: float = 0.0

    def __post_init__(self) -> None:
        shares = ("matrix_share", "unaligned_share", "memory_share")
        wrong = [name for name in shares if not getattr(self, name) > 0]
        wrong += [n for n in ("call_seconds", "sum_seconds", "step_seconds") if not getattr(self, n) >= 0]
        wrong += [] if 0 <= self.blend <= 1 else ["blend"]
        if wrong:
            raise ValueError(
                f"shares must be positive, seconds 0 or more and blend in 0..1; wrong: {', '.join(wrong)} "
                f"of {self}"
            )

    def on(self, gpu: str) -> "Efficiencies | DeviceEfficiencies":
        """The coefficients of a kind of GPU and its host."""
        return next((own for own in self.devices if own.gpu == gpu), self)

    def sum_wait(self, ranks: int) -> float:
        """Seconds of each all-reduce of so many ranks in addition to the link's latency.

        Of ``n`` ranks whose delays are independent and exponential the slowest comes ``1/2 + ... + 1/n`` of a
        mean delay after the mean (Renyi, "On the theory of order statistics", 1953).
        """
        return self.sum_seconds * 2 * sum(1 / number for number in range(2, ranks + 1))


def together(device: float, host: float, blend: float) -> float:
    """Seconds of a pass whose kernels take ``device`` seconds and whose calls take ``host`` seconds."""
    longer, shorter = max(device, host), min(device, host)
    if blend == 0 or shorter <= 0:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** (1.0 / blend)) ** blend)


#: Share of kernels' best rates that remains in sustained training: with it, the four steps with one stage of
#: table 1 in Narayanan et al. (SC 2021; 32 to 256 A100, 1.7 to 18.4 billion parameters) are predicted right
#: on average, at the best microbatch for each. ``tests/cluster/cost/test_published_steps.py`` checks all ten.
_SUSTAINED = 0.923

#: - Matrices: an A100-SXM's best shape of thousands was 267.9 of 312 TFLOP/s (mag-/gpu_benchmark on GitHub,
#:   2024, which lists 792 of 989 for H100-SXM).
#: - Unaligned: GPT-2 124M on A100 trained about 25 % faster with a vocabulary of 50,304 instead of 50,257
#:   (A. Karpathy on nanoGPT, 3 February 2023); 31 % of its operations are logits: 0.31 / (0.31 + 0.25).
#: - Memory: 0.75 at 10 MB, between 0.6 at 1 MB and 0.9 from 100 MB, the range of a layer's tensors (calculon,
#:   systems/a100_80g.json, SC 2023).
#: - Calls and blend: a layer's forward of GPT-2 XL (16 heads) with one sample took 1.639, 1.598 and 1.453 ms
#:   on one, two and four A100 in Megatron-LM (FASOP's profile, HPDC 2024). Its 18 operators take 0.73, 0.41
#:   and 0.29 ms of the devices by the shares here; with p = 2 and 82 us a call the three are met within
#:   4.2 %, and by no other p much better.
#: - All-reduces: what 1 to 16 MiB on two, four and eight A100 took beside their steps and bytes (NCCL times
#:   published with vTrain, MICRO 2024). 1 MiB on two took 44.2 us; NCCL's own estimate of 8.4 us (baseLat in
#:   src/graph/tuning.cc) would make it 25.
PUBLISHED = Efficiencies(
    matrix_share=_SUSTAINED * 267.9 / 312,
    unaligned_share=0.31 / (0.31 + 0.25),
    memory_share=_SUSTAINED * 0.75,
    call_seconds=82e-6,
    blend=0.5,
    sum_seconds=32e-6,
)


@lru_cache(maxsize=4096)
def occupied_flops(rows: int, columns: int, inner: int, count: int = 1, multiprocessors: int = 0) -> float:
    """FLOPs that a device could execute in the time that a matrix product occupies it.

    Args:
        rows: Rows of the first factor and of the result.
        columns: Columns of the second factor and of the result.
        inner: The dimension that is summed over.
        count: Number of such products in one batched call.
        multiprocessors: Multiprocessors of the device; 0 if unknown.

    >>> occupied_flops(256 * 9, 128 * 12, 64, 1, 108) == 2 * 256 * 9 * 128 * 12 * 64
    True
    >>> occupied_flops(256 * 9, 128 * 13, 64, 1, 108) == 2 * occupied_flops(256 * 9, 128 * 12, 64, 1, 108)
    True
    """
    high, wide = _TILE
    tiles = min(
        math.ceil(rows / high) * math.ceil(columns / wide), math.ceil(rows / wide) * math.ceil(columns / high)
    )
    each = max(multiprocessors, 1)
    return math.ceil(tiles * count / each) * each * (2.0 * high * wide * inner)


def is_aligned(*sizes: int) -> bool:
    """Whether rows of 16-bit elements of all these lengths allow the widest loads."""
    return not any(size % _ALIGNMENT for size in sizes)
