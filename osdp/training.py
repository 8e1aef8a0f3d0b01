"""Training: what a step is made of besides the model, and what an optimizer keeps and needs."""

from dataclasses import dataclass

from osdp import codec
from osdp.model_desc import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Memory of one ``torch.optim`` class, in units of the local parameter bytes.

    Attributes:
        states: State tensors of a parameter's size.
        foreach_temporaries: Most extra bytes alive during a ``foreach`` step, over all parameters.
        single_temporaries: Most extra bytes alive during a for-loop step, over the largest parameter.
        has_foreach: Whether the class has a foreach implementation.
        has_fused: Whether the class has a fused implementation, which needs no temporaries.
    """

    states: float
    foreach_temporaries: float
    single_temporaries: float
    has_foreach: bool = True
    has_fused: bool = False


#: Measured with :mod:`benchmarks.optimizer_memory` on torch 2.13; ``tests/test_training.py`` measures them again.
OPTIMIZERS = {
    "SGD": OptimizerCost(states=0, foreach_temporaries=0, single_temporaries=0, has_fused=True),
    "Adam": OptimizerCost(states=2, foreach_temporaries=1, single_temporaries=1, has_fused=True),
    "AdamW": OptimizerCost(states=2, foreach_temporaries=1, single_temporaries=1, has_fused=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained.

    Attributes:
        optimizer: Name of a ``torch.optim`` class.
        momentum: Whether SGD or RMSprop keeps momentum.
        amsgrad: Whether Adam or AdamW keeps a maximum.
        foreach: As the optimizer's argument; ``None`` is torch's default for the device.
        fused: As the optimizer's argument; ``None`` is torch's default for the device.
        param_dtype: Dtype parameters are gathered and computed in; ``None`` keeps their own.
        reduce_dtype: Dtype gradients are reduced in; ``None`` is the dtype they are computed in.
        local_batch: Samples per device and microbatch.
        microbatches: Microbatches whose gradients are accumulated before a step.
    """

    optimizer: str = "AdamW"
    momentum: bool = False
    amsgrad: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    local_batch: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        faults = []
        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer {self.optimizer!r} is unknown; there are {', '.join(OPTIMIZERS)}")
        elif self.foreach and not OPTIMIZERS[self.optimizer].has_foreach:
            faults.append(f"{self.optimizer} has no foreach implementation")
        elif self.fused and not OPTIMIZERS[self.optimizer].has_fused:
            faults.append(f"{self.optimizer} has no fused implementation")
        if self.foreach and self.fused:
            faults.append("foreach and fused exclude each other")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                faults.append(f"{name} {dtype!r} is unknown; there are {', '.join(DTYPE_BYTES)}")
        for name in ("local_batch", "microbatches"):
            if getattr(self, name) < 1:
                faults.append(f"{name} must be at least 1, got {getattr(self, name)}")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def fingerprint(self) -> str:
        """Changes when any field does."""
        return codec.fingerprint(self)
