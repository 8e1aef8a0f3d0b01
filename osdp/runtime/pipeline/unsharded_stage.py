"""A stage without data parallelism: parameters are unsharded, and gradients are not reduced."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from osdp.comm.groups import device_of
from osdp.plan.plan import Plan
from osdp.runtime.meta_init import is_on_meta, materialise
from osdp.runtime.module.parameter_owners import owned_parameters
from osdp.runtime.recompute import recompute
from osdp.runtime.sharding.sliced import exchange_modules
from osdp.runtime.sharding.validate import check_plan


class UnshardedStage:
    """A stage's model on one data-parallel rank; with more ranks it is a ``ShardedModel``.

    Attributes:
        model: The stage's model.
    """

    computes = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """No effect: nothing is reduced."""

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself."""
        return parameter

    def computing(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Empty: modules compute with the stored parameters themselves."""
        return {}

    def stored_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return list(self.model.parameters())


def stands_alone(plan: Plan) -> bool:
    """Whether a stage under ``plan`` needs neither reductions nor mixed precision."""
    return plan.world_size == 1 and plan.training.param_dtype is None and plan.training.reduce_dtype is None


def apply_alone(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> UnshardedStage:
    """Run ``model`` under ``plan`` on one data-parallel rank.

    Raises:
        PlanMismatchError: The plan is for another model.
    """
    check_plan(model, plan, 1)
    device = device_of(mesh)
    exchange_modules(model, plan, MixedPrecisionPolicy())
    recompute(model, plan, device)
    if is_on_meta(model):
        materialise(model, owned_parameters(model), mesh, device)
    else:
        for owned in owned_parameters(model).values():
            parameter = owned.parameter
            if parameter.device != device:
                with torch.no_grad():
                    owned.register(nn.Parameter(parameter.to(device), parameter.requires_grad))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    return UnshardedStage(model)
