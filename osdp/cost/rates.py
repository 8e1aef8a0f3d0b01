"""Rates: what part of its specification a device reaches, and how long its host takes to call operators.

The coefficients of the time model; :mod:`osdp.search.calibrate` fits them to measured steps. Without any,
they are :data:`PUBLISHED`: what others have measured and written down.

    seconds of a pass = (device^p + host^p)^(1/p)

The host calls operators while the device runs earlier ones, so that the slower of both sets the time; how
well they hide behind each other is p: the slower alone (a roofline with a floor) for infinity, one after the
other for 1. ``blend`` is 1/p.
"""

from dataclasses import dataclass

from osdp.cost.corrections import Correction


@dataclass(frozen=True, slots=True)
class Rates:
    """Coefficients of the time of a step.

    Attributes:
        matrix_share: Of a device's specified operations a second, by products that fill it.
        unaligned_share: Of those, by products whose rows cannot be loaded in the widest pieces.
        memory_share: Of the specified memory bandwidth, by everything else.
        call_seconds: Of the host for an operator of a forward; its backward takes as long again.
        blend: 1/p as above, from 0 to 1.
        sum_seconds: Of each sum over tensor-parallel ranks beside its link's latency: they wait for the
            slowest.
        step_seconds: Of a step, however large: data, loop, scaler.
        corrections: What measured layers took beyond all this.
    """

    matrix_share: float
    unaligned_share: float
    memory_share: float
    call_seconds: float
    blend: float = 0.0
    sum_seconds: float = 0.0
    step_seconds: float = 0.0
    corrections: tuple[Correction, ...] = ()

    def __post_init__(self) -> None:
        shares = ("matrix_share", "unaligned_share", "memory_share")
        wrong = [name for name in shares if not getattr(self, name) > 0]
        wrong += [n for n in ("call_seconds", "sum_seconds", "step_seconds") if not getattr(self, n) >= 0]
        wrong += [] if 0 <= self.blend <= 1 else ["blend"]
        if wrong:
            raise ValueError(
                f"shares must be positive, seconds 0 or more and blend in 0..1; wrong are {', '.join(wrong)} "
                f"of {self}"
            )

    def together(self, device: float, host: float) -> float:
        """Seconds of a pass whose kernels take ``device`` and whose calls take ``host`` seconds."""
        longer, shorter = max(device, host), min(device, host)
        if self.blend == 0 or shorter <= 0:
            return longer
        return float(longer * (1.0 + (shorter / longer) ** (1.0 / self.blend)) ** self.blend)


#: What is left of kernels' best rates in a training that goes on: with it the four steps with one stage of
#: table 1 in Narayanan et al. (SC 2021; 32 to 256 A100, 1.7 to 18.4 billion parameters) come out right on
#: average, at the microbatch that is best for each. ``tests/test_published_steps.py`` holds all ten.
_SUSTAINED = 0.91

#: - Matrices: an A100-SXM's best shape of thousands was 267.9 of 312 TFLOP/s (mag-/gpu_benchmark on GitHub,
#:   2024, which lists 792 of 989 for H100-SXM).
#: - Unaligned: GPT-2 124M on A100 trained about 25 % faster with a vocabulary of 50,304 instead of 50,257
#:   (A. Karpathy on nanoGPT, 3 February 2023); 31 % of its operations are logits: 0.31 / (0.31 + 0.25).
#: - Memory: 0.75 at 10 MB, 0.9 from 100 MB and 0.6 at 1 MB, between which tensors of layers lie (calculon,
#:   systems/a100_80g.json, SC 2023).
#: - Calls: a layer's forward of GPT-2 XL with one sample on four A100, far from filling them, took 1.453 ms
#:   in Megatron-LM (FASOP's profile, HPDC 2024), for 18 operators.
PUBLISHED = Rates(
    matrix_share=_SUSTAINED * 267.9 / 312,
    unaligned_share=0.31 / (0.31 + 0.25),
    memory_share=_SUSTAINED * 0.75,
    call_seconds=1.453e-3 / 18,
)
