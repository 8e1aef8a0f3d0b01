"""Files of safetensors, into which all ranks write their shards in place.

A file has eight bytes with the length of its header, little-endian; the header, JSON with dtype, shape and
place of each tensor; and the tensors, row by row (https://github.com/huggingface/safetensors#format).
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from osdp.runtime.checkpoint.folder import sync
from osdp.torch_private.dtensor import offsets_of

#: Which file has which tensor.
INDEX = "model.safetensors.index.json"

#: What the header calls dtypes.
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip

#: Bytes, with the length before it, that a header is filled up to a multiple of: no rank writes to its page.
_PAGE = 4096


@dataclass(frozen=True)
class WholeTensor:
    """Dtype and shape of a tensor of all ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


#: Tensors by name, in the order in which they lie in a file; by the file's name.
Files = Mapping[str, Mapping[str, WholeTensor]]


def lay_out(tensors: Mapping[str, WholeTensor], most: int) -> Files:
    """The files of ``tensors``: none but those of one tensor has more than ``most`` bytes.

    Raises:
        ValueError: There are dtypes that the format does not have.
    """
    if odd := {str(tensor.dtype) for tensor in tensors.values()} - set(map(str, _NAMES)):
        raise ValueError(f"safetensors cannot have {', '.join(sorted(odd))}: convert these tensors first")
    parts: list[dict[str, WholeTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > most:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    return {
        # Larger elements first: each tensor is aligned to its own.
        f"model-{number:05}-of-{len(parts):05}.safetensors": dict(
            sorted(part.items(), key=lambda item: -item[1].dtype.itemsize)
        )
        for number, part in enumerate(parts, 1)
    }


def create_files(folder: Path, files: Files) -> None:
    """Make ``files`` in ``folder``, of their full size and with their headers, and their index; sync them."""
    for name, tensors in files.items():
        header = _header(tensors)
        with open(folder / name, "wb") as file:
            # First: a page of NFS that was written at the end of a file counts as known, zeros and all, and
            # is sent as a whole when a part of it is written, over what other hosts have written there.
            file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
            file.write(header)
        sync(folder / name)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    where = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf8")
    sync(folder / INDEX)


def write_parts(folder: Path, files: Files, state: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors of ``state``, of DTensors this rank's shards, to where they belong, and sync them."""
    for name, tensors in files.items():
        start = len(_header(tensors))
        with closing(_Descriptor(folder / name)) as file:
            for key, tensor in tensors.items():
                if key in state:
                    _write(file, start, tensor, state[key])
                start += tensor.nbytes


class _Descriptor:
    """A file that is written at any place."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_WRONLY)
        self._is_written = False

    def write(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._number, data, at)
            data, at = data[written:], at + written
            self._is_written = True

    def close(self) -> None:
        try:
            if self._is_written:
                os.fsync(self._number)
        finally:
            os.close(self._number)


def _header(tensors: Mapping[str, WholeTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        place = [start, start + tensor.nbytes]
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def _write(file: _Descriptor, start: int, whole: WholeTensor, value: torch.Tensor) -> None:
    """Write this rank's part of ``value``, whose tensor begins at ``start``, in contiguous pieces."""
    offsets: Sequence[int] = [0] * value.dim()
    if isinstance(value, DTensor):
        offsets, value = offsets_of(value), value.to_local()
    if not value.numel():
        return
    part = value.detach().cpu().contiguous()
    data = memoryview(part.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    strides = [prod(whole.shape[axis + 1 :]) for axis in range(part.dim())]
    # Behind the last dimension that is cut, all is in one piece.
    cut = max((axis for axis in range(part.dim()) if part.shape[axis] < whole.shape[axis]), default=0)
    length = prod(part.shape[cut:]) * part.element_size()
    rows = product(*map(range, part.shape[:cut]))
    for number, row in enumerate(rows):
        place = [*row, *[0] * (part.dim() - cut)]
        element = sum(
            (first + at) * stride for first, at, stride in zip(offsets, place, strides, strict=True)
        )
        piece = data[number * length : (number + 1) * length]
        file.write(piece, start + element * part.element_size())
