"""SampleBatch: the arguments of one forward, from whatever form the user gives them in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import nn

from osdp.model.description import ModelDesc, TensorSpec
from osdp.tracing.tensors import map_tensors, tensor_spec, tensors_in


@dataclass(frozen=True)
class SampleBatch:
    """The arguments of one forward.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("the sample batch holds no tensor; pass what the model's forward takes")

    @classmethod
    def of(cls, sample_inputs: Any) -> "SampleBatch":
        """Make a batch from ``sample_inputs``.

        Args:
            sample_inputs: A tensor, a tuple or list of positional arguments, or a mapping (a tokenizer's
                output included) of keyword arguments.

        Raises:
            TypeError: ``sample_inputs`` is of another type.
            ValueError: It contains no tensor.
        """
        if isinstance(sample_inputs, SampleBatch):
            return sample_inputs
        if isinstance(sample_inputs, torch.Tensor):
            return cls((sample_inputs,))
        if isinstance(sample_inputs, (tuple, list)):
            return cls(tuple(sample_inputs))
        if isinstance(sample_inputs, Mapping):
            return cls((), {str(name): value for name, value in sample_inputs.items()})
        raise TypeError(
            f"sample inputs must be a tensor, a tuple (positional) or a mapping (keywords), "
            f"not {type(sample_inputs).__name__}"
        )

    @classmethod
    def from_desc(cls, model_desc: ModelDesc, local_batch: int | None = None) -> "SampleBatch":
        """A batch of zeros like the one ``model_desc`` was traced with.

        Args:
            model_desc: The description.
            local_batch: Number of samples; by default as traced.

        Raises:
            ValueError: The traced batch contained more than plain tensors.
        """
        if not model_desc.sample_names:
            raise ValueError(
                f"the batch that {model_desc.name} was described with is nested and cannot be recreated from "
                "the description: pass the sample batch itself"
            )
        zeros = [
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
            for spec in model_desc.sample
        ]
        pairs = list(zip(model_desc.sample_names, zeros, strict=True))
        batch = cls(
            tuple(zero for name, zero in pairs if not name), {name: zero for name, zero in pairs if name}
        )
        return batch.resized(local_batch or model_desc.local_batch)

    @property
    def names(self) -> tuple[str, ...]:
        """The keyword of each tensor, empty for a positional one; an empty tuple if not all are tensors."""
        values = [*self.args, *self.kwargs.values()]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return ()  # nested containers or other objects cannot be recreated from shapes
        return (*("" for _ in self.args), *self.kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, positional ones first."""
        return tensors_in((self.args, dict(self.kwargs)))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of all tensors."""
        return tuple(tensor_spec(tensor) for tensor in self.tensors)

    @property
    def local_batch(self) -> int:
        """Number of samples: the size of dim 0 of the first tensor that has one."""
        return next((int(tensor.shape[0]) for tensor in self.tensors if tensor.dim()), 1)

    def map(self, function: Callable[[torch.Tensor], Any]) -> "SampleBatch":
        """The batch with ``function`` applied to each tensor."""
        return SampleBatch(map_tensors(function, self.args), map_tensors(function, dict(self.kwargs)))

    def without_values(self) -> "SampleBatch":
        """The batch as empty tensors on the CPU; without memory inside a ``FakeTensorMode``."""
        return self.map(
            lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
        )

    def resized(self, local_batch: int) -> "SampleBatch":
        """The batch with ``local_batch`` samples: its own, repeated in order or cut.

        Tensors whose dim 0 is not the batch are not changed.

        Raises:
            ValueError: ``local_batch`` is not positive.
        """
        if local_batch < 1:
            raise ValueError(f"a batch needs at least 1 sample, got {local_batch}")
        samples = self.local_batch

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != samples:
                return tensor
            rows = torch.arange(local_batch, device=tensor.device) % samples
            return tensor.detach().index_select(0, rows).requires_grad_(tensor.requires_grad)

        return self.map(resize)

    def to(self, device: torch.device | str, float_dtype: torch.dtype | None = None) -> "SampleBatch":
        """The batch on ``device``, floating-point tensors cast to ``float_dtype``.

        Tensors on ``meta``, which have no values, become zeros.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            dtype = float_dtype if float_dtype and tensor.is_floating_point() else tensor.dtype
            moved = (
                torch.zeros(tensor.shape, dtype=dtype, device=device)
                if tensor.is_meta
                else tensor.detach().to(device, dtype)
            )
            return moved.requires_grad_(tensor.requires_grad)

        return self.map(move)

    def run(self, model: nn.Module) -> Any:
        """Run ``model`` on this batch; returns its outputs."""
        return model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class BatchMix:
    """Batches of several shapes that a model trains on, for a plan that fits all and is fastest in the mean.

    Attributes:
        batches: A batch of each shape, as for :meth:`osdp.ModelDesc.from_module`, or a ModelDesc.
        weights: How often each occurs, in any unit; all equally often if empty.
    """

    batches: Sequence[Any]
    weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("a BatchMix needs at least one batch")
        if self.weights and len(self.weights) != len(self.batches):
            raise ValueError(f"{len(self.weights)} weights do not fit {len(self.batches)} batches")
        if wrong := [weight for weight in self.weights if not 0 < weight < inf]:
            raise ValueError(
                f"weights say how often a batch occurs: they must be positive and finite, got {wrong[0]}"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Part of all batches that each shape has."""
        weights = self.weights or [1.0] * len(self.batches)
        return tuple(weight / sum(weights) for weight in weights)
