"""A stage without data parallelism: parameters are unsharded, and gradients are not reduced."""

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from osdp.comm.groups import device_of
from osdp.plan.plan import Plan
from osdp.runtime.meta_init import is_on_meta, materialise, refuse_blank
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
    is_plain = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """No effect: nothing is reduced."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: FSDP2 shards nothing here."""

    def abandon(self, fault: BaseException | None, *, drop_gradients: bool) -> None:
        """Drop the gradients of a step that is given up; no data-parallel rank waits for this one."""
        del fault
        for parameter in self.model.parameters() if drop_gradients else ():
            parameter.grad = None

    def free_copies(self) -> None:
        """No effect: modules compute with the stored parameters themselves."""

    def after_step(self, stepped: Collection[int]) -> None:
        """No effect: nothing is sharded."""

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
    """Whether the stages of ``plan`` need neither reductions nor mixed precision, nor are parallelized."""
    training = plan.training
    return plan.dp == plan.tp == 1 and training.param_dtype is None and training.reduce_dtype is None


def apply_unsharded(model: nn.Module, plan: Plan, stage: int, mesh: DeviceMesh) -> UnshardedStage:
    """Run the model of one stage of ``plan`` on one data-parallel rank.

    Raises:
        PlanMismatchError: The plan is for another model.
    """
    sharding = plan.stages[stage].sharding
    check_plan(model, plan, stage, 1)
    device = device_of(mesh)
    exchange_modules(model, sharding, MixedPrecisionPolicy())
    recompute(model, sharding.recomputed, device)
    if is_on_meta(model):
        refuse_blank(materialise(model, owned_parameters(model), mesh, device), given=False)
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
