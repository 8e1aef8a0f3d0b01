"""Before the first step: does the optimizer keep what the plan was made for?

An optimizer is made after the model is wrapped, and nobody hands it to the wrapper. So a pre-hook of
``torch.optim`` looks at optimizers as they step, until every parameter of the model has been seen in one.
"""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from osdp.errors import PlanMismatchError
from osdp.training import Training

logger = logging.getLogger(__name__)


class OptimizerCheck:
    """Compares optimizers with the training of a plan, until each parameter was seen in one.

    Args:
        parameters: The parameters an optimizer sees of the model.
        training: What the plan was made for.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], training: Training) -> None:
        self._training = training
        self._unseen = {id(parameter) for parameter in parameters if parameter.requires_grad}
        check = weakref.ref(self)

        def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            alive = check()
            if alive is not None and alive._unseen:
                alive._look_at(optimizer)

        # It stays, and does nothing any more: torch iterates over the hooks it would be removed from.
        register_optimizer_step_pre_hook(before_step)

    def _look_at(self, optimizer: Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if self._unseen.isdisjoint(held):
            return
        if Training.can_read(optimizer):
            differences = self._training.mismatch(optimizer)
            if differences:
                raise PlanMismatchError(
                    [*differences, "pass training=Training.from_optimizer(...) of such an optimizer to OSDP"]
                )
        else:
            logger.warning(
                "%s is not derived from a torch.optim class: whether its states fit the plan made for %s is "
                "not known",
                type(optimizer).__name__,
                self._training.optimizer,
            )
        self._unseen -= held
