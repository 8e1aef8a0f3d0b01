"""Operation: a dispatched operation with its FLOPs, the bytes it moves and a token that identifies it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from osdp.nn.fake_tensors import grouped_product_flops, is_grouped_product
from osdp.tracing.tensors import flatten, storage_key, tensors_in

#: torch's registry of FLOP formulas lacks the CPU kernels; their operands are those of the CUDA kernels.
_ATTENTION_NAMES = [
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
_ATTENTION = {getattr(torch.ops.aten, name) for name in _ATTENTION_NAMES}
_ATTENTION_BACKWARD = {getattr(torch.ops.aten, f"{name}_backward") for name in _ATTENTION_NAMES}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as it was dispatched.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        output: Its output.
        leaves: All arguments, flattened.
        inputs: The tensors among them.
        outputs: The tensors in its output.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    leaves: list[Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> "Operation":
        """The operation ``func(*args, **kwargs)`` that returned ``output``."""
        leaves, _ = flatten((args, dict(kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(func, args, kwargs, output, leaves, inputs, tensors_in(output))

    @property
    def token(self) -> str:
        """String that is equal for operations that run the same kernel on the same shapes.

        Of floating-point arguments only whether they are zero is part of it: a dropout or drop-path rate that
        differs from layer to layer does not make a different kernel.
        """
        return f"{self.func}({','.join(_leaf_token(leaf) for leaf in self.leaves)})"

    @property
    def flops(self) -> int:
        """Floating-point operations, by the formulas of ``torch.utils.flop_counter``."""
        packet = getattr(self.func, "_overloadpacket", self.func)
        if packet in _ATTENTION:
            return int(sdpa_flop_count(*_with_all_heads(self.inputs[:3])))
        if packet in _ATTENTION_BACKWARD:
            return int(sdpa_backward_flop_count(*_with_all_heads(self.inputs[:4])))
        if is_grouped_product(self.func):
            return grouped_product_flops(*self.inputs[:2])
        if packet is torch.ops.aten.convolution_backward:
            return _convolution_backward_flops(*self.args)
        formula = flop_registry.get(packet)
        return int(formula(*self.args, **self.kwargs, out_val=self.output)) if formula is not None else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of all operands and results; 0 for views."""
        known = {storage_key(tensor) for tensor in self.inputs}
        if not self.func._schema.is_mutable and all(storage_key(tensor) in known for tensor in self.outputs):
            return 0
        return _nbytes(self.inputs) + _nbytes(self.outputs)


def _convolution_backward_flops(
    grad_output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *more: Any
) -> int:
    """As many for each gradient as forward takes; torch's formula takes any groups for one (2.13).

    Tensors are of shape (samples, channels, ...), the weight of (channels, channels in a group, ...).
    """
    *_, transposed, _, _, wanted = more
    gradients: int = sum(wanted[:2])
    passed = inputs if transposed else grad_output
    return gradients * 2 * passed.numel() * math.prod(weight.shape[1:])


def _with_all_heads(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Shapes (batch, heads, ...), with the keys and values of grouped queries expanded to all heads.

    That is how they are computed; torch's formulas support groups only from 2.12 on.
    """
    heads = max(tensor.shape[1] for tensor in tensors)
    return [torch.Size((t.shape[0], heads, *t.shape[2:])) for t in tensors]


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _leaf_token(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)}{leaf.dtype}"
    if isinstance(leaf, float):
        return "0." if leaf == 0 else "float"
    if isinstance(leaf, (torch.device, torch.Generator)):
        return type(leaf).__name__
    return repr(leaf)
