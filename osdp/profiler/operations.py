"""What one dispatched operation is and costs: a token that names it, its FLOPs, the bytes it moves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from osdp.profiler.tensors import flatten, storage_key, tensors_in


def operation_token(func: Any, args: Any, kwargs: Any) -> str:
    """Text that is equal for operations that run the same kernel on the same shapes.

    Of floating-point arguments only whether they are zero counts: a dropout or drop-path rate that differs
    from layer to layer does not make another kernel.
    """
    leaves, _ = flatten((args, kwargs))
    return f"{func}({','.join(_leaf_token(leaf) for leaf in leaves)})"


def operation_flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Floating-point operations, by the formulas of ``torch.utils.flop_counter``."""
    packet = getattr(func, "_overloadpacket", func)
    formula = flop_registry.get(packet)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=output))
    # The registry lacks the CPU's attention kernel; its operands are those of the CUDA ones.
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    return 0


def moved_bytes(args: Any, kwargs: Any, output: Any, *, mutates: bool) -> int:
    """Bytes of all operands and results; a view moves nothing."""
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
    known = {storage_key(tensor) for tensor in inputs}
    if not mutates and all(storage_key(tensor) in known for tensor in outputs):
        return 0
    return _nbytes(inputs) + _nbytes(outputs)


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
