"""A model that runs under a plan: the work around its forwards, its backwards and exceptions."""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle

from osdp.comm.groups import device_of
from osdp.plan.plan import Plan
from osdp.plan.schedule import Schedule, default_stages_per_rank, make_schedule
from osdp.plan.schedules import ONE_STAGE
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.module.gradient_hooks import gradient_hook
from osdp.runtime.module.group_dtensor import compute_with_other_meshes
from osdp.runtime.module.outputs import free_of_views, tensors_with_grad
from osdp.runtime.module.plain_states import load_into
from osdp.runtime.module.unused import unused_error
from osdp.runtime.ranks.lockstep import Lockstep
from osdp.runtime.recompute import Recomputed
from osdp.runtime.sharding.accumulation import Accumulation
from osdp.runtime.sharding.entries import Arguments, Entries
from osdp.runtime.sharding.fsdp_units import ShardedParameter, wrapped_around
from osdp.runtime.sharding.planned_parameters import Parameter, PlannedParameters
from osdp.runtime.sharding.reducer import GradientReducer
from osdp.runtime.sharding.registered import check_registered
from osdp.runtime.sharding.replicated import ReplicatedParameter
from osdp.runtime.sharding.sliced import SlicedParameter
from osdp.runtime.stages import RunningStage, StageLinks, WholeModel
from osdp.torch_private.autograd import in_backward, is_asked_for, node_of, queue_backward_callback
from osdp.torch_private.fsdp import (
    after_forward,
    backward_is_unfinished,
    before_forward,
    complete_units,
    expect_end_of_backward,
    reset_sharded,
    sharding_state,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backwards:
    """What backwards may do, the same on all ranks.

    Attributes:
        find_unused_parameters: Whether they may leave parameters without a gradient.
        double_backward: Whether they may be differentiated themselves.
    """

    find_unused_parameters: bool
    double_backward: bool


class ShardedModel:
    """A model under a plan, or a stage of one; made by :func:`osdp.runtime.sharding.apply.apply_sharding`.

    It is a :class:`~osdp.runtime.running.RunningModel` and a :class:`~osdp.runtime.stages.StageRuntime`.

    Attributes:
        model: The model, changed in place.
        plan: The plan.
        mesh: The mesh of all data-parallel ranks.
        data_group: These ranks.
        links: Empty links, since the model is not cut into stages.
        root_state: FSDP2's state of the model's root.
        parameters: Its parameters, of all modes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        *,
        parameters: PlannedParameters,
        reducer: GradientReducer,
        backwards: Backwards,
        norm_group: dist.ProcessGroup,
        lockstep: Lockstep,
        recomputed: Sequence[Recomputed],
        inputs_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.mesh = mesh
        self.data_group: dist.ProcessGroup = mesh.get_group()
        self.links = StageLinks()
        self._reducer = reducer
        self._find_unused = backwards.find_unused_parameters
        self._double_backward = backwards.double_backward
        self._norm_group = norm_group
        self._lockstep = lockstep
        self._recomputed = recomputed
        # 1. State of a step.
        lockstep.on_backward = self._begin_backward
        self._backward_runs = False
        self._pending = False
        #: Whether forwards since the last optimizer step may have backwards to come.
        self._has_graphs = False
        #: Names of parameters with a gradient that has not been delivered yet.
        self._used: set[str] = set()
        self._accumulation = Accumulation(self._give_up)
        # 2. Parameters by mode.
        self.root_state = sharding_state(model)
        self.parameters = parameters
        self._replicated, self._sharded = parameters.replicated, parameters.sharded
        self._in_slices = parameters.in_slices
        parameters.report_to(self._on_gradient)
        # 3. Hooks on parameters, calls and state dicts, and FSDP2's interface on all modules.
        self._names = {inner: name for name, inner in model.named_modules()}
        self._trainable = self.parameters.trainable
        self._trainable_at_first = frozenset(self._trainable)
        self._watched: set[int] = set()
        self._watch_replicated()
        self._watch_stored()
        self._entries = Entries(
            model,
            self._before_forward,
            self._after_forward,
            around=wrapped_around(model, self._sharded.units),
            param_dtype=inputs_dtype,
        )
        swapped = (*self._replicated, *self._in_slices.parameters)
        modules = {id(module): module for parameter in swapped for module, _ in parameter.owned.places}
        for module in modules.values():
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    # What a user calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        was_idle = self._entries.is_idle
        try:
            return self.model(*args, **kwargs)
        except BaseException:
            # Hooks of modules are told of an Exception, not of a KeyboardInterrupt.
            if was_idle and not self._entries.is_idle:
                self._after_forward(None, raised=True)
            raise

    @property
    def stages(self) -> Mapping[int, RunningStage]:
        """Itself as the only stage."""
        return {0: RunningStage(WholeModel(self.model), self)}

    @property
    def is_plain(self) -> bool:
        """Never: other ranks have parts or copies."""
        return False

    def make_schedule(self, num_microbatches: int | None, name: str | None, num_slices: int) -> Schedule:
        """The schedule of one stage, the same under every known name; raises for unknown names."""
        default_stages_per_rank(name or ONE_STAGE)  # only to raise for unknown names
        planned = self.plan.training.microbatches
        return make_schedule(ONE_STAGE, 1, num_microbatches or planned, num_slices=num_slices)

    @property
    def sharded(self) -> "ShardedModel":
        """Itself, to which FSDP2's methods apply."""
        return self

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether FSDP2 may end its bookkeeping with the next backward."""
        self.root_state._state_ctx.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether the next backwards reduce gradients, or keep them for one that does."""
        if all(parameter.path.syncs is requires_gradient_sync for parameter in self.parameters):
            return
        for parameter in self.parameters:
            parameter.path.syncs = requires_gradient_sync
        self.follow_settings()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reductions: backwards inside keep their gradients for the first one outside."""
        before = [parameter.path.syncs for parameter in self.parameters]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for parameter, syncs in zip(self.parameters, before, strict=True):
                parameter.path.syncs = syncs
            self.follow_settings()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before."""
        return clip_grad_norm_(
            self.stored_parameters(),
            max_norm,
            norm_type,
            group=self._norm_group,
            device=device_of(self.mesh),
            error_if_nonfinite=error_if_nonfinite,
        )

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter (which the optimizer sees) of ``parameter``, stored or computed with."""
        return self.parameters.stored(parameter)

    def computing(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Name and stored parameter of each compute parameter, by the id of the compute parameter."""
        return {
            id(parameter.compute): (parameter.name, parameter.stored)
            for parameter in self.parameters
            if parameter.compute is not None and parameter.compute is not parameter.stored
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load a state dict: whole tensors, equal on all ranks, or what ``model.state_dict()`` returned."""
        return load_into(self.model, state_dict, strict)

    def train(self, mode: bool) -> None:
        """Set the model's training mode."""
        self.model.train(mode)

    def stored_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [parameter.stored for parameter in self.parameters]

    @property
    def computes(self) -> bool:
        """Whether modules may register compute parameters at present, rather than the stored ones."""
        return self.parameters.computes

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward ran with gradients, and no backward has reached the model since."""
        return self._pending

    def settle(self) -> None:
        """Register the stored parameters, for in-place changes after a forward that gets no backward."""
        if self._pending and not self._backward_runs and self._entries.is_idle:
            for unit in self._sharded.units:
                unit.reshard()
            self._before_state_dict()

    def free_copies(self) -> None:
        """Free the copies that parameters were computed in, which backwards no longer need."""
        self._replicated.free_copies()
        self._has_graphs = False

    def after_step(self, stepped: Collection[int]) -> None:
        """Take over what an optimizer has made of parameters; a collective call.

        Args:
            stepped: Identities of the stored parameters that it had gradients of.
        """
        self._replicated.after_step(stepped)

    def recover(self, *, drop_gradients: bool) -> None:
        """Reset to the state between steps after an exception; also called automatically.

        Args:
            drop_gradients: Whether to drop all gradients, because a backward failed.
        """
        reset_sharded(self.model, drop_gradients=drop_gradients)
        self._entries.reset()
        if drop_gradients:
            self._reducer.reset()
            self._sharded.reset()
            for parameter in self.parameters:
                parameter.path.drop(parameter.stored)
                parameter.stored.grad = None
                if parameter.compute is not None:
                    parameter.compute.grad = None
            self._used.clear()
            self._accumulation.reset()
        for module in self._recomputed:
            module.abandon()
        self._backward_runs = False
        self._pending = False
        self._replicated.swap_out()

    # Called by modules under a plan (osdp.runtime.sharding.module_api)

    def follow_settings(self) -> None:
        """Apply the gradient settings of all parameters, from the next backward on."""
        self._lockstep.syncs = any(parameter.path.syncs for parameter in self.parameters)
        self._reducer.follow_settings()
        self._in_slices.follow_settings()
        for unit in self._sharded.units:
            unit.follow_settings()

    def unshard(self, module: nn.Module, *, async_op: bool) -> UnshardHandle | None:
        """Gather the parameters of ``module``; for the root only those of the root's own unit."""
        return self.parameters.unshard(module, async_op=async_op)

    def reshard(self, module: nn.Module) -> None:
        """Free the gathered parameters of ``module``."""
        self.parameters.reshard(module)
        if not self._pending:
            self._replicated.swap_out()

    def before_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType | None
    ) -> Arguments:
        """Prepare a call of a method of ``module`` that counts as a forward; ``caller`` is its frame."""
        if torch.is_grad_enabled() and self._entries.is_idle and not in_backward():
            # The method may run a backward itself, whose gradients must be reported. Inside a forward these
            # gathers would become part of the order on which ranks agree.
            self._sharded.make()
            self._sharded.find()
        args, kwargs = self._entries.begin(module, args, kwargs, caller)
        return before_forward(module, module, args, kwargs)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Finish such a call; returns the output for its caller."""
        output = after_forward(module, module, args, free_of_views(output))
        return self._entries.end(module, args, output)

    # Around a forward

    def _before_forward(self, module: nn.Module) -> None:
        if self._backward_runs or backward_is_unfinished(self.model):
            logger.warning("the last backward did not end; its gradients are dropped")
            self.recover(drop_gradients=True)
        check_registered(self.parameters, self._sharded.units)
        for parameter in self.parameters:
            parameter.path.follow_freezing(parameter.stored, parameter.compute)
        self._follow_trainable()
        self._sharded.prepare_for_inference_mode()
        self._sharded.reshard_stale()
        self._lockstep.enter(self._names[module])
        self._replicated.gather_changed()
        self._replicated.swap_in()
        self._in_slices.reshard()
        self._watch_replicated()

    def _follow_trainable(self) -> None:
        trainable = self.parameters.trainable
        if trainable == self._trainable:
            return
        self._used.difference_update(self._accumulation.begin_backward())
        if self._used:
            raise RuntimeError(
                "parameters were frozen or unfrozen between the microbatches of an accumulation; do that "
                "between steps"
            )
        self._refuse_mixed_dtypes(set(trainable))
        self._trainable = trainable
        self._reducer.rebuild()
        self._sharded.follow_trainable()
        self._in_slices.watch()
        self.follow_settings()

    def _refuse_mixed_dtypes(self, trainable: set[str]) -> None:
        """Raise if parameters were unfrozen that would be reduced together with ones of another dtype.

        When the model is wrapped, the trainable parameters of a unit have one dtype. Which frozen parameters
        join them depends on the plan, so this check compares all parameters rather than those of a unit.
        """
        if trainable <= self._trainable_at_first:
            return
        dtypes: dict[torch.dtype, str] = {}
        for parameter in self.parameters:
            if parameter.name in trainable:
                dtypes.setdefault(parameter.stored.dtype, parameter.name)
        if len(dtypes) > 1:
            mixed = " and ".join(f"{name!r} of {dtype}" for dtype, name in dtypes.items())
            raise RuntimeError(
                f"parameters were unfrozen so that dtypes mix: {mixed} are trainable now. Only parameters "
                "that are trainable when the model is wrapped are kept apart by dtype: unfreeze them before "
                "OSDP(...), and freeze them again after it, or convert them to one dtype"
            )

    def _after_forward(self, output: Any, raised: bool) -> Any:
        if raised:
            self._lockstep.fail(sys.exc_info()[1], "a forward")
            self.recover(drop_gradients=False)
            return output
        self._lockstep.leave()
        output = complete_units(self.model, output)
        if torch.is_grad_enabled():
            self._pending = self._has_graphs = True
            self._sharded.find()
            self._sharded.note_versions()
            for tensor in tensors_with_grad(output):
                tensor.register_hook(self._begin_backward)
        elif not self._pending:
            self._replicated.swap_out()
            if not self._has_graphs:
                self._replicated.free_copies()
            # Units that stay gathered would be stale after an optimizer step.
            for unit in self._sharded.units:
                unit.reshard()
        return output

    def _before_state_dict(self, *_: object) -> None:
        self._replicated.swap_out()
        self._in_slices.reshard()

    # In a backward

    def _begin_backward(self, _grad: torch.Tensor | None = None) -> None:
        # Checked at every call: the first, from a collective of the backward, may run with gradients off.
        if torch.is_grad_enabled() and not self._double_backward:
            raise RuntimeError(
                "create_graph=True differentiates a backward, which the plan does not support: pass "
                "OSDP(..., double_backward=True), which replicates everything and recomputes nothing"
            )
        if self._backward_runs:
            return
        if self._entries.is_in_forward:
            raise RuntimeError(
                "a backward inside the model's forward uses its parameters, while the rest of that forward "
                "still needs them: return the losses, and call backward() after the forward"
            )
        self._backward_runs = True
        self._follow_trainable()
        self._lockstep.begin_backward()
        self._replicated.swap_in()
        self._used.difference_update(self._accumulation.begin_backward())
        for parameter in self.parameters:
            parameter.path.begin(parameter.stored)
        expect_end_of_backward(self.model)
        queue_backward_callback(self._end_backward)

    def _give_up(self, parameter: Parameter) -> None:
        """Drop the gradient that an accumulation has kept for a parameter."""
        parameter.path.give_up()
        if isinstance(parameter, ReplicatedParameter):
            self._reducer.give_up(parameter)
        elif isinstance(parameter, ShardedParameter):
            self._sharded.give_up(parameter)

    def _watch_replicated(self) -> None:
        for parameter in self._replicated:
            if parameter.compute.requires_grad and id(parameter) not in self._watched:
                parameter.compute.register_post_accumulate_grad_hook(
                    gradient_hook(self, parameter, ShardedModel._on_replicated_gradient)
                )
                self._watched.add(id(parameter))

    def _watch_stored(self) -> None:
        """Register hooks for gradients that do not come through a forward, such as a penalty on weights."""
        for parameter in self.parameters:
            if not parameter.stored.requires_grad:
                continue
            handle = parameter.stored.register_hook(gradient_hook(self, parameter, ShardedModel._on_stored))
            parameter.path.own_hooks.add(handle.id)

    def _on_replicated_gradient(self, parameter: ReplicatedParameter) -> None:
        self._on_gradient(parameter)
        self._reducer.receive(parameter)

    def _on_stored(self, parameter: Parameter) -> None:
        if isinstance(parameter, SlicedParameter) and is_asked_for(node_of(parameter.stored)):
            return  # torch.autograd.grad gives it out; nothing accumulates
        self._on_gradient(parameter)

    def _on_gradient(self, parameter: Parameter) -> None:
        grad = None if parameter.compute is None else parameter.compute.grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} is sparse, which cannot be reduced over ranks: create "
                "the embedding with sparse=False, and use an optimizer for dense gradients"
            )
        if not self._backward_runs or torch.is_grad_enabled():
            self._begin_backward()
        self._used.add(parameter.name)

    def _end_backward(self) -> None:
        # Queued again to run last: FSDP2 may have queued its callback after this one, and collectives that
        # only other ranks have run are joined after that.
        queue_backward_callback(self._reduce_rest)

    def _reduce_rest(self) -> None:
        if not self._entries.is_idle:
            # A registered method ran this backward: what it calls from here on are forwards of their own.
            self._entries.reset()
            self._lockstep.leave()
        # While the last all-reduces are under way.
        self._replicated.swap_out()
        due = [p.name for p in self.parameters if p.path.syncs and p.stored.requires_grad]
        if not due:
            self._deliver(())
            return
        missing = [name for name in due if name not in self._used]
        if self._find_unused and self._reducer.can_find_unused(due):
            absent = self._reducer.start_rest_and_find_unused(self._used)
        else:
            absent = set(self._used_nowhere(due)) if self._find_unused else set()
            if not self._find_unused and len(missing) == len(due):
                absent = set(due)  # torch.autograd.grad: nothing was accumulated
                missing = []
            self._reducer.start_rest(absent)
        self._used.difference_update(due)
        self._deliver(absent)
        if missing and not self._find_unused:
            raise unused_error(missing)

    def _deliver(self, absent: Collection[str]) -> None:
        """Hand out gradients and call users' hooks, in the same order on all ranks; ends the backward."""
        self._sharded.end_backward()
        self._backward_runs = False
        self._pending = False
        self._entries.open_in_backward = True
        try:
            self._hand_out(absent)
        except BaseException:
            # A hook raised: this counts as a backward that did not end, whose gradients are dropped.
            self._backward_runs = True
            raise
        finally:
            self._entries.open_in_backward = False
        if self._used:
            self._accumulation.end_backward([p for p in self.parameters if p.name in self._used])

    def _hand_out(self, absent: Collection[str]) -> None:
        self._reducer.finish(absent)
        for parameter in self.parameters:
            path, stored = parameter.path, parameter.stored
            compute_with_other_meshes(stored.grad)
            is_absent = parameter.name in absent
            if path.is_held:
                path.deliver(stored, None if is_absent else stored.grad)
            elif is_absent and not path.had_gradient and not isinstance(parameter, ReplicatedParameter):
                stored.grad = None  # FSDP2 counted it as zero

    def _used_nowhere(self, due: Sequence[str]) -> Iterator[str]:
        """The names in ``due`` that no rank used."""
        used = self._lockstep.used_anywhere([name in self._used for name in due])
        return (name for name, is_used in zip(due, used, strict=True) if not is_used)
