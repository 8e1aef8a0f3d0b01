"""A model that runs under a plan: what happens around its forward, its backward and an exception."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from osdp.plan import Plan
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.mesh import device_of
from osdp.runtime.outputs import tensors_with_grad
from osdp.runtime.reducer import GradientReducer
from osdp.runtime.replicated import ReplicatedParameter, ReplicatedParameters
from osdp.runtime.reports import reporter
from osdp.runtime.sharded import ShardedParameter, ShardedParameters
from osdp.runtime.sliced import SlicedParameter, SlicedParameters
from osdp.runtime.torch_private import (
    backward_is_unfinished,
    in_backward,
    queue_backward_callback,
    reset_sharded,
)
from osdp.runtime.unused import unused_error, unused_everywhere
from osdp.runtime.validate import fsdp_units

logger = logging.getLogger(__name__)


class AppliedPlan:
    """A model under a plan; made by :func:`osdp.runtime.apply.apply`.

    Attributes:
        model: The model, changed in place.
        plan: The plan.
        mesh: The mesh of all data-parallel ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        *,
        replicated: ReplicatedParameters,
        reducer: GradientReducer,
        sharded: Sequence[ShardedParameter],
        in_slices: Sequence[SlicedParameter],
        find_unused_parameters: bool,
        norm_group: dist.ProcessGroup,
    ) -> None:
        self.model = model
        self.plan = plan
        self.mesh = mesh
        self._replicated = replicated
        self._reducer = reducer
        self._find_unused = find_unused_parameters
        self._norm_group = norm_group
        self._syncs = True
        self._backward_runs = False
        self._pending = False
        self._used: set[str] = set()
        self._order: list[str] = []
        self._had_gradient: set[str] = set()
        self._sharded = ShardedParameters(model, fsdp_units(plan), sharded, self._on_sharded_gradient)
        self._in_slices = SlicedParameters(in_slices, self._on_sliced_gradient)
        self._in_slices.watch()
        if find_unused_parameters:
            self._sharded.log_order(self._order)
        self._trainable = self._trainable_names()
        self._watched: set[int] = set()
        self._watch_replicated()
        self._register_hooks()

    # What a user calls

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backwards reduce gradients, or keep them for one that does."""
        self._syncs = requires_gradient_sync
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(requires_gradient_sync)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.model(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients; the first one outside reduces them all."""
        before = self._syncs
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; the norm before."""
        return clip_grad_norm_(
            self.stored_parameters(),
            max_norm,
            norm_type,
            group=self._norm_group,
            device=device_of(self.mesh),
        )

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer sees of ``parameter``, which may be what a forward computes with."""
        for candidate in self._parameters:
            if candidate.compute is parameter:
                return candidate.stored
        return parameter

    def train(self, mode: bool) -> None:
        """Set the model's training mode."""
        self.model.train(mode)

    def stored_parameters(self) -> list[nn.Parameter]:
        """What the optimizer sees."""
        return [parameter.stored for parameter in self._parameters]

    @property
    def computes(self) -> bool:
        """Whether modules may hold what forward and backward compute with, rather than what is stored."""
        return self._replicated.swapped_in or any(
            parameter.owned.parameter is not parameter.stored for parameter in self._sharded.parameters
        )

    def recover(self, *, drop_gradients: bool) -> None:
        """Get ready for the next forward after an exception; called without being asked.

        Args:
            drop_gradients: Whether a backward failed, so that gradients are of no use any more.
        """
        reset_sharded(self.model, drop_gradients=drop_gradients)
        if drop_gradients:
            self._reducer.reset()
            for parameter in self._parameters:
                parameter.stored.grad = None
                if parameter.compute is not None:
                    parameter.compute.grad = None
            self._used.clear()
        self._order.clear()
        self._backward_runs = False
        self._replicated.swap_out()

    # What happens around a forward

    def _register_hooks(self) -> None:
        model = self.model
        # First of all pre-hooks: FSDP2 must not start on the remains of a failed step.
        model.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
        # Last of all hooks: FSDP2's own final callback is queued before ours then.
        model.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True)
        for module in {id(m): m for p in self._replicated for m, _ in p.owned.places}.values():
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    def _before_forward(self, _module: nn.Module, _args: object) -> None:
        if in_backward():
            return
        if self._backward_runs or backward_is_unfinished(self.model):
            logger.warning("the last backward did not end; its gradients are dropped")
            self.recover(drop_gradients=True)
        trainable = self._trainable_names()
        if trainable != self._trainable:
            if self._reducer.holds_gradients:
                raise RuntimeError(
                    "parameters were frozen or unfrozen between the microbatches of an accumulation; do that "
                    "between steps"
                )
            self._trainable = trainable
            self._reducer.rebuild()
            self._sharded.watch()
            self._in_slices.watch()
        self._replicated.swap_in()
        self._watch_replicated()

    def _after_forward(self, _module: nn.Module, _args: object, output: Any) -> None:
        if in_backward():
            return
        if output is None and sys.exc_info()[0] is not None:  # torch calls it so when the forward raised
            self.recover(drop_gradients=False)
        elif not torch.is_grad_enabled():
            if not self._pending:
                self._replicated.swap_out()
                # What stayed whole would be out of date after an optimizer step.
                for module in self.model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
        else:
            self._pending = True
            for tensor in tensors_with_grad(output):
                tensor.register_hook(self._begin_backward)

    def _before_state_dict(self, *_: object) -> None:
        self._replicated.swap_out()

    # What happens in a backward

    def _begin_backward(self, _grad: torch.Tensor | None = None) -> None:
        if self._backward_runs:
            return
        self._backward_runs = True
        self._replicated.swap_in()
        if self._find_unused:
            self._had_gradient = {p.name for p in self._parameters if p.stored.grad is not None}
        queue_backward_callback(self._end_backward)

    def _watch_replicated(self) -> None:
        for parameter in self._replicated:
            if parameter.compute.requires_grad and id(parameter) not in self._watched:
                parameter.compute.register_post_accumulate_grad_hook(
                    reporter(self, parameter, AppliedPlan._on_replicated_gradient)
                )
                self._watched.add(id(parameter))

    def _on_replicated_gradient(self, parameter: ReplicatedParameter) -> None:
        self._begin_backward()
        self._used.add(parameter.name)
        self._reducer.receive(parameter, reduces=self._syncs)

    def _on_sharded_gradient(self, parameter: ShardedParameter) -> None:
        self._begin_backward()
        self._used.add(parameter.name)
        if self._find_unused:
            entry = f"backward of unit {parameter.unit}"
            if entry not in self._order:
                self._order.append(entry)

    def _on_sliced_gradient(self, parameter: SlicedParameter) -> None:
        self._begin_backward()
        self._used.add(parameter.name)

    def _end_backward(self) -> None:
        if not self._syncs:
            self._reducer.end_backward()
            self._idle()
            return
        if not self._used and not self._find_unused:
            self._idle()  # torch.autograd.grad: nothing was accumulated
            return
        self._reducer.start_rest()
        # FSDP2 may have queued its callback after ours; what comes next needs its gradients.
        queue_backward_callback(self._hand_out_gradients)

    def _hand_out_gradients(self) -> None:
        missing = [name for name in self._trainable if name not in self._used]
        without = self._agree(missing) if self._find_unused else set()
        self._reducer.finish(without)
        for parameter in self._sharded.parameters:
            if parameter.name in without and parameter.name not in self._had_gradient:
                parameter.stored.grad = None
        self._used.clear()
        self._order.clear()
        self._idle()
        if missing and not self._find_unused:
            raise unused_error(missing)

    def _agree(self, missing: Sequence[str]) -> set[str]:
        lacks = set(missing)
        used = [name not in lacks for name in self._trainable]
        nowhere = unused_everywhere(used, self._order, self.mesh.get_group(), device_of(self.mesh))
        return {name for name, unused in zip(self._trainable, nowhere, strict=True) if unused}

    def _idle(self) -> None:
        self._backward_runs = False
        self._pending = False
        self._replicated.swap_out()

    # What is asked of all parameters

    @property
    def _parameters(self) -> list[ReplicatedParameter | ShardedParameter | SlicedParameter]:
        return [*self._replicated, *self._sharded.parameters, *self._in_slices.parameters]

    def _trainable_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self._parameters if p.stored.requires_grad)


def gradient_group(mesh: DeviceMesh, *, beside_shards: bool) -> dist.ProcessGroup:
    """The group replicated gradients are reduced in.

    Beside sharded units it is one of its own: the two kinds of collectives come in no common order.
    """
    group: dist.ProcessGroup = mesh.get_group()
    if not beside_shards or mesh.size() == 1:
        return group
    ranks = dist.get_process_group_ranks(group)
    own: dist.ProcessGroup = dist.new_group(
        ranks, backend=dist.get_backend(group), use_local_synchronization=True
    )
    return own
