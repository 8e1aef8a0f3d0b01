"""What a save in the background copies before training goes on."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from osdp.runtime import checkpoint
from osdp.runtime.checkpoint.background import start_copy
from tests.helpers.distributed import run
from tests.runtime.checkpoint.test_folder import trained


def shards_of(state: dict[str, Any]) -> dict[str, DTensor]:
    named = {f"{part}.{name}": value for part, mine in state.items() for name, value in mine.items()}
    return {name: value for name, value in named.items() if isinstance(value, DTensor)}


def copied_shards() -> None:
    model, optimizer = trained(1)
    state = checkpoint.train_state(model, optimizer)
    held, copies = shards_of(state), shards_of(start_copy(model, state)())
    assert held and held.keys() == copies.keys()
    before = {name: value.to_local().clone() for name, value in held.items()}
    for value in held.values():  # of tied parameters more than once
        with torch.no_grad():
            value.to_local().add_(1)
    for name, value in held.items():
        copy = copies[name]
        assert copy.placements == value.placements and copy.device_mesh == value.device_mesh
        assert (copy.shape, copy.stride(), copy.dtype) == (value.shape, value.stride(), value.dtype)
        assert torch.equal(copy.to_local(), before[name])
        assert not value.to_local().numel() or not torch.equal(value.to_local(), before[name])


def test_copies_of_shards_are_laid_out_alike_and_keep_their_values() -> None:
    # Sharded and replicated parameters, odd sizes, and the states of the optimizer.
    run(2, copied_shards)
