"""Before the first step: does the optimizer keep what the plan was made for?

An optimizer is made after the model is wrapped, and nobody hands it to the wrapper. So a pre-hook of
``torch.optim`` looks at the optimizers of the first step.
"""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from osdp.errors import PlanMismatchError
from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Plan
from osdp.training import Training

logger = logging.getLogger(__name__)


class OptimizerCheck:
    """Compares the optimizers of the first step with the training of a plan.

    Args:
        parameters: The parameters an optimizer sees of the model.
        plan: What it was planned for.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], plan: Plan | PipelinePlan) -> None:
        self._plan = plan
        # Weak, and compared by identity: the check may outlive its model, whose ids others get then.
        self._parameters = {id(p): weakref.ref(p) for p in parameters if p.requires_grad}
        self._accepted = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def end_if_accepted(self) -> None:
        """Take the hook away after the first step; not during it, while torch goes through its hooks."""
        if self._accepted:
            self._hook.remove()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not any(self._is_mine(p) for group in optimizer.param_groups for p in group["params"]):
            return
        training = self._plan.training
        try:
            Training.from_optimizer(optimizer)
        except (TypeError, ValueError) as error:
            logger.warning(
                "whether the optimizer fits the plan made for %s is unknown: %s", training.optimizer, error
            )
        else:
            spare = self._plan.memory_limit - self._plan.predicted.peak_bytes
            differences = training.mismatch(optimizer, spare=spare)
            if differences:
                raise PlanMismatchError(
                    [*differences, "plan with training=Training.from_optimizer(...) of such an optimizer"]
                )
        self._accepted = True

    def _is_mine(self, parameter: torch.Tensor) -> bool:
        found = self._parameters.get(id(parameter))
        return found is not None and found() is parameter
