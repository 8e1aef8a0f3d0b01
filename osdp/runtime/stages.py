"""Stages as steps see them: what a stage receives, computes and sends, and what stores its parameters.

A model that is not cut is one stage, the :class:`WholeModel`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from osdp.model.dataflow import Transfer
from osdp.runtime.pipeline.channels import Channel
from osdp.runtime.pipeline.gradient_factor import GradientFactor
from osdp.runtime.pipeline.tied_parameters import TiedCopies


@dataclass(frozen=True)
class StageOutput:
    """The output of a stage's forward.

    Attributes:
        sent: The tensors for other stages, one for each outgoing transfer.
        result: The model's output in the last stage; ``None`` in others.
    """

    sent: tuple[torch.Tensor, ...]
    result: Any


class Stage(Protocol):
    """What a stage computes.

    Attributes:
        model: The model, with the modules of other stages removed.
        incoming: Transfers to this stage.
        outgoing: Transfers from this stage.
        is_last: Whether it returns the model's output.
    """

    model: nn.Module
    incoming: tuple[Transfer, ...]
    outgoing: tuple[Transfer, ...]
    is_last: bool

    def forward(
        self, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> StageOutput:
        """Run the stage.

        Args:
            received: One tensor for each incoming transfer.
            args: Positional inputs of the model, the same on every stage.
            kwargs: Keyword inputs.
        """
        ...


class WholeModel:
    """The only stage of a model that is not cut.

    Attributes:
        model: The model, unchanged.
    """

    incoming: tuple[Transfer, ...] = ()
    outgoing: tuple[Transfer, ...] = ()
    is_last = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward(
        self, received: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> StageOutput:
        """Run the model; nothing is received or sent."""
        return StageOutput((), self.model(*args, **kwargs))


class ParameterStore(Protocol):
    """Parameters as the optimizer sees them, and as modules compute with them.

    Attributes:
        model: The model that they belong to.
    """

    model: nn.Module

    @property
    def computes(self) -> bool:
        """Whether modules may register compute parameters at present, rather than the stored ones."""
        ...

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter (which the optimizer sees) of ``parameter``, stored or computed with."""
        ...

    def computing(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Name and stored parameter of each compute parameter, by the id of the compute parameter."""
        ...

    def stored_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates, each once."""
        ...

    def free_copies(self) -> None:
        """Free the copies that parameters were computed in, which backwards no longer need."""
        ...

    def after_step(self, stepped: Collection[int]) -> None:
        """Take over what an optimizer has made of parameters; a collective call.

        Args:
            stepped: Identities of the stored parameters that it had gradients of.
        """
        ...


class StageRuntime(ParameterStore, Protocol):
    """What stores the parameters of a stage and reduces their gradients: sharded or unsharded."""

    @property
    def is_plain(self) -> bool:
        """Whether no other data-parallel or tensor-parallel rank has a part or a copy of its parameters."""
        ...

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether the next backwards reduce gradients, or keep them for one that does."""
        ...

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether FSDP2 may end its bookkeeping with the next backward."""
        ...

    def abandon(self, fault: BaseException | None, *, drop_gradients: bool) -> None:
        """Drop what a step has left that is given up.

        Args:
            fault: What this rank has met, to be told to those that wait for it; ``None`` if it was another
                rank of the pipeline.
            drop_gradients: Whether gradients are dropped as well.
        """
        ...


@dataclass(frozen=True)
class RunningStage:
    """A stage with what stores its parameters."""

    stage: Stage
    runtime: StageRuntime


@dataclass(frozen=True)
class StageLinks:
    """What connects the stages of a model, and the ranks that compute one; nothing if it is not cut.

    Attributes:
        stage_group: The ranks of this pipeline.
        tensor_group: The tensor-parallel ranks; ``None`` if there is one.
        tied: Copies of parameters that other stages hold too.
        channels: Communicators between stages, where a backend needs several.
        factor: What the gradients of this rank's stages are scaled by.
    """

    stage_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    tied: Sequence[TiedCopies] = ()
    channels: Mapping[Channel, dist.ProcessGroup] = field(default_factory=dict)
    factor: GradientFactor = field(default_factory=GradientFactor)

    @property
    def owners(self) -> dict[str, str]:
        """Local names of tied copies that another stage owns, mapped to their names there."""
        return {name: tied.owner for tied in self.tied for name in tied.names if name != tied.owner}
