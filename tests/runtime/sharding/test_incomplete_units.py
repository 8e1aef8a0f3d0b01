from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from osdp.torch_private.fsdp import (
    _complete_without_feature,
    initialise_root,
    parameter_groups,
    sharding_state,
)
from tests.helpers.distributed import run


def _completed(complete: Any) -> tuple[list[bool], torch.dtype, list[torch.Tensor]]:
    """Which units are sharded again, the dtype of the output, and the gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(output_dtype=torch.float64)
    fully_shard([model[0], model[1]], mesh=mesh, mp_policy=policy)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    initialise_root(model)
    state = sharding_state(model)
    output = complete(state, model[0](torch.ones(3, 4)))
    state._state_ctx.iter_forward_root = None
    sharded = [group.is_sharded for module in model for group in parameter_groups(module)]
    output.sum().backward()
    grads = [p.grad.full_tensor() for p in model[0].parameters()]
    return sharded, output.dtype, grads


def _both() -> tuple[Any, Any]:
    return (
        _completed(lambda state, output: state._force_complete_incomplete_states(output)),
        _completed(_complete_without_feature),
    )


def test_units_that_ran_in_part_are_completed_as_later_versions_of_torch_do() -> None:
    """Torch 2.11 has no such feature: calling a part of a model died in an AttributeError."""
    for theirs, ours in run(2, _both):
        assert ours[:2] == theirs[:2]
        assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2], strict=True))
