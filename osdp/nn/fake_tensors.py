"""Fake tensors, on which operations run without computing, with the fake kernels that torch gets wrong.

torch's own fake kernel of a grouped matrix product (experts in transformers 5) accepts bfloat16 only, while
the real kernels also accept float32 and float16: it predates them. Its output shapes are computed here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

#: Rows of the result of a grouped product start at multiples of this number of bytes.
_ALIGNMENT = 16
#: Dtypes that the real kernels accept.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FakeTensors(FakeTensorMode):
    """A ``FakeTensorMode`` that replaces fake kernels that are stricter than the real ones.

    Constants of a model that are neither parameters nor buffers may be real tensors.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on fake tensors."""
        if func is _grouped_product():
            with self:
                return _grouped(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def grouped_product_flops(mat_a: torch.Tensor, mat_b: torch.Tensor) -> int:
    """Floating-point operations of a grouped matrix product; each row or column is in one group.

    Args:
        mat_a: Left operands, 2-D if all groups follow each other in one dimension, else 3-D.
        mat_b: Right operands, likewise.
    """
    groups = mat_a.shape[0] if mat_a.dim() == 3 and mat_b.dim() == 2 else 1
    return 2 * mat_a.numel() * mat_b.shape[-1] // groups


def is_grouped_product(func: Any) -> bool:
    """Whether ``func`` is the dispatched operation of ``torch.nn.functional.grouped_mm``."""
    return func is _grouped_product()


def _grouped_product() -> Any:
    found = getattr(torch.ops.aten, "_grouped_mm", None)
    return getattr(found, "default", None)


def _grouped(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An empty result of a grouped product, with the shape and strides of the real one.

    Raises:
        RuntimeError: The real kernels would not accept the operands.
    """
    if mat_a.dtype not in _DTYPES or mat_a.dtype != mat_b.dtype:
        raise RuntimeError(
            "grouped_mm takes two operands of float32, bfloat16 or float16, not "
            f"{mat_a.dtype} and {mat_b.dtype}"
        )
    if mat_a.shape[-1] != mat_b.shape[-2]:
        raise RuntimeError(
            f"grouped_mm contracts dimensions of equal size, not {mat_a.shape[-1]} and {mat_b.shape[-2]}"
        )
    ragged = mat_a.dim() == 2 or mat_b.dim() == 2
    if (offs is not None) is not ragged:
        raise RuntimeError("grouped_mm takes offs if, and only if, an operand has two dimensions")
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    groups = offs.shape[0] if offs is not None else mat_a.shape[0]
    shape = [rows, columns] if mat_a.dim() != mat_b.dim() else [groups, rows, columns]
    # The real kernels pad each row up to the alignment: the padding shows in the strides only.
    per_row = _ALIGNMENT // mat_a.element_size()
    width = -(-columns // per_row) * per_row
    strides = [rows * width, width, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=out_dtype or mat_a.dtype, device=mat_a.device)
