"""Files of safetensors that all ranks write in place, read by the library itself."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from osdp.runtime.checkpoint.safetensors_files import INDEX, WholeTensor, create_files, lay_out, write_parts
from tests.helpers.distributed import run


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "flags": torch.tensor([True, False, True]),
        "rows": torch.randn(7, 3, generator=generator),
        "columns": torch.randn(4, 5, 2, generator=generator),
        "middle": torch.randn(3, 4, 2, generator=generator, dtype=torch.float64),
        "half": torch.randn(5, 6, generator=generator).bfloat16(),
        "one": torch.tensor(3, dtype=torch.int64),
        "none": torch.zeros(0, 4),
    }


def written(folder: str) -> None:
    whole = whole_tensors()
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    state: dict[str, torch.Tensor] = dict(whole)
    state["rows"] = distribute_tensor(whole["rows"], flat, [Shard(0)])  # the last rank has one row
    state["columns"] = distribute_tensor(whole["columns"], square, [Shard(2), Shard(1)])
    state["middle"] = distribute_tensor(whole["middle"], square, [Replicate(), Shard(1)])
    state["half"] = distribute_tensor(whole["half"], square, [Shard(0), Shard(0)])
    assert isinstance(state["rows"], DTensor) and state["rows"].to_local().shape[0] < 3
    files = lay_out({n: WholeTensor(v.dtype, tuple(v.shape)) for n, v in whole.items()}, most=200)
    if dist.get_rank() == 0:
        create_files(Path(folder), files)
    dist.barrier()
    write_parts(Path(folder), files, state)
    dist.barrier()


def test_shards_lie_where_they_belong(tmp_path: Path) -> None:
    run(4, written, str(tmp_path))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    read = {name: value for file in files for name, value in load_file(file).items()}
    whole = whole_tensors()
    assert read.keys() == whole.keys()
    for name, value in whole.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot have torch\.complex128: convert"):
        lay_out({"odd": WholeTensor(torch.complex128, (2,))}, most=100)
