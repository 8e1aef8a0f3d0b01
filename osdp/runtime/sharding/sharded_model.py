"""A model that runs under a plan: what a user calls, and the work around forwards and exceptions."""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.tensor import DTensor

from osdp.comm.groups import device_of
from osdp.plan.plan import Plan
from osdp.plan.schedule import Schedule, default_stages_per_rank, make_schedule
from osdp.plan.schedules import ONE_STAGE
from osdp.runtime.clip import clip_grad_norm_
from osdp.runtime.module.outputs import free_of_views, tensors_with_grad
from osdp.runtime.module.plain_modules import PlainModules
from osdp.runtime.module.plain_states import load_into
from osdp.runtime.ranks.lockstep import Lockstep
from osdp.runtime.ranks.participants import CollectiveObserver
from osdp.runtime.recompute import Recomputed
from osdp.runtime.sharding.backward_pass import BackwardPass, Backwards
from osdp.runtime.sharding.entries import Arguments, Entries
from osdp.runtime.sharding.fsdp_units import wrapped_around
from osdp.runtime.sharding.planned_parameters import PlannedParameters
from osdp.runtime.sharding.reducer import GradientReducer
from osdp.runtime.stages import RunningStage, StageLinks, WholeModel
from osdp.torch_private.autograd import has_hooks, in_backward
from osdp.torch_private.fsdp import (
    after_forward,
    backward_is_unfinished,
    before_forward,
    complete_units,
    drop_parameters,
    forget_sharding,
    reset_sharded,
    sharding_state,
)

logger = logging.getLogger(__name__)


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
        plain_modules: What its modules were before.
        own_group: The process group that was made for replicated gradients, if one was.
    """

    plain_modules: PlainModules
    own_group: dist.ProcessGroup | None

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
        self._norm_group = norm_group
        self._lockstep = lockstep
        self._recomputed = recomputed
        self._observer: StepObserver | None = None
        self._modules_are_checked = False
        #: Whether forwards since the last optimizer step may have backwards to come.
        self._has_graphs = False
        #: Identities of the stored parameters that an optimizer has stepped.
        self._ever_stepped: set[int] = set()
        # 1. Parameters by mode.
        self.root_state = sharding_state(model)
        self.parameters = parameters
        self._replicated, self._sharded = parameters.replicated, parameters.sharded
        self._in_slices = parameters.in_slices
        # 2. Hooks on calls, parameters and state dicts.
        self._names = {inner: name for name, inner in model.named_modules()}
        self._entries = Entries(
            model,
            self._before_forward,
            self._after_forward,
            around=wrapped_around(model, self._sharded.units),
            param_dtype=inputs_dtype,
        )
        self._backward = BackwardPass(
            model,
            parameters,
            reducer=reducer,
            lockstep=lockstep,
            entries=self._entries,
            settings=backwards,
        )
        self._begin = _Begin(self._backward)
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
        before = self.syncs
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_syncs(before)

    @property
    def syncs(self) -> dict[str, bool]:
        """Whether the next backwards reduce the gradient of each parameter, by its name."""
        return {parameter.name: parameter.path.syncs for parameter in self.parameters}

    def set_syncs(self, syncs: Mapping[str, bool]) -> None:
        """Set :attr:`syncs`."""
        for parameter in self.parameters:
            parameter.path.syncs = syncs[parameter.name]
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
        return self._backward.is_awaited

    @property
    def is_new_step(self) -> bool:
        """Whether an optimizer has stepped since the last backward."""
        return self._backward.is_stepped

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced."""
        return self._backward.keeps_gradients

    @property
    def kept(self) -> set[int]:
        """Identities of the stored parameters whose gradients wait to be reduced."""
        return self._backward.kept

    @property
    def waiting_for(self) -> str | None:
        """What has to come before the model is between two steps; ``None`` if it is.

        After a backward that failed it is, without gradients.
        """
        if not in_backward():
            self._recover_unfinished()
        if not self._entries.is_idle or self._backward.runs or self._backward.is_awaited:
            return (
                "a forward has had no backward yet (after an exception in between, or a forward that gets "
                "none, call model.reset_iter_state())"
            )
        if self._backward.keeps_gradients:
            return "an accumulation has kept gradients, which its last backward is to reduce"
        waiting = {id(parameter.stored) for parameter in self.parameters if parameter.stored.grad is not None}
        # Of several optimizers one may step less often than others.
        if waiting and (
            not self._backward.is_stepped or (waiting & self._ever_stepped) - self._backward.stepped
        ):
            return "there are gradients that no optimizer has stepped by, nor zero_grad() has dropped"
        return None

    @property
    def gathering(self) -> dict[str, torch.Tensor]:
        """Gradients by name that an optimizer which steps less often than others has not stepped by."""
        return {
            parameter.name: parameter.stored.grad
            for parameter in self.parameters
            if parameter.stored.grad is not None and id(parameter.stored) not in self._backward.stepped
        }

    @property
    def ever_stepped(self) -> frozenset[str]:
        """Names of the parameters that an optimizer has stepped, under this plan or an earlier one."""
        return frozenset(p.name for p in self.parameters if id(p.stored) in self._ever_stepped)

    def remember_stepped(self, names: Collection[str]) -> None:
        """Note parameters that were stepped under an earlier plan."""
        self._ever_stepped.update(id(p.stored) for p in self.parameters if p.name in names)

    @property
    def trainable_at_first(self) -> frozenset[str]:
        """Names of the parameters that were trainable when the model was wrapped."""
        return self._backward.trainable_at_first

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of replicated parameters may be on their way to other ranks."""
        return self._backward.is_reducing

    @property
    def trains_others(self) -> bool:
        """Whether other parameters are trainable at present than when the model was wrapped."""
        return set(self.parameters.trainable) != self.trainable_at_first

    def remember_trainable(self, names: Collection[str]) -> None:
        """Note parameters that were trainable when the model was wrapped, under an earlier plan."""
        self._backward.trainable_at_first |= frozenset(names)

    def close(self) -> None:
        """Undo the plan: modules are plain again, and register what is stored; no gradients are left."""
        for unit in self._sharded.units:
            unit.reshard()
        self._before_state_dict()
        self.free_copies()
        for parameter in self.parameters:
            parameter.stored.grad = None
        # A loop keeps its last loss, whose graph is not to keep what was stored.
        self._begin.backward = None
        for unit in self._sharded.units:
            drop_parameters(unit.group)
        for parameter in self._replicated:
            parameter.compute.data = parameter.compute.data.new_empty(0)
        for recomputed in self._recomputed:
            recomputed.close()
        self._entries.close()
        self._backward.close()
        self.plain_modules.restore()
        for module in self.model.modules():
            forget_sharding(module)

    def settle(self) -> None:
        """Register the stored parameters, for in-place changes after a forward that gets no backward."""
        if self._backward.is_awaited and not self._backward.runs and self._entries.is_idle:
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
        self._backward.is_stepped = True
        self._backward.stepped.update(stepped)
        self._ever_stepped.update(stepped)
        observer = self._observer
        begin = None if observer is None else observer.begin()
        self._replicated.after_step(stepped)
        if observer is not None:
            observer.gathered(begin)

    def recover(self, *, drop_gradients: bool) -> None:
        """Reset to the state between steps after an exception; also called automatically.

        Args:
            drop_gradients: Whether to drop all gradients, because a backward failed.
        """
        reset_sharded(self.model, drop_gradients=drop_gradients)
        self._entries.reset()
        self._backward.reset(drop_gradients=drop_gradients)
        for module in self._recomputed:
            module.abandon()
        self._replicated.swap_out()

    def abandon(self, fault: BaseException | None, *, drop_gradients: bool) -> None:
        """Drop what a step has left that is given up; see :class:`~osdp.runtime.stages.StageRuntime`."""
        if fault is not None:
            self._lockstep.fail(fault, "a step")
        self.recover(drop_gradients=drop_gradients)

    def meet(self, label: str) -> None:
        """Wait for the other ranks between two passes, and join evaluations that they run before."""
        self._lockstep.meet(label)

    @property
    def has_users_hooks(self) -> bool:
        """Whether stored parameters have hooks that no plan has set."""
        return any(has_hooks(each.stored, each.path.own_hooks) for each in self.parameters)

    @property
    def has_zeroed_gradients(self) -> bool:
        """Whether there are gradients, all of which have been zeroed in place."""
        gradients = [each.stored.grad for each in self.parameters if each.stored.grad is not None]
        with torch.no_grad():
            parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
            return bool(gradients) and not any(bool(part.any()) for part in parts)

    def observe(self, observer: "StepObserver | None") -> None:
        """Tell ``observer`` of collectives and of the ends of backwards; nobody any more if ``None``."""
        self._observer = self._lockstep.observer = observer
        self._backward.on_reduced = (lambda: None) if observer is None else observer.end_reductions

    # Called by modules under a plan (osdp.runtime.sharding.module_api)

    def follow_settings(self) -> None:
        """Apply the gradient settings of all parameters, from the next backward on."""
        self._backward.follow_settings()

    def unshard(self, module: nn.Module, *, async_op: bool) -> UnshardHandle | None:
        """Gather the parameters of ``module``; for the root only those of the root's own unit."""
        return self.parameters.unshard(module, async_op=async_op)

    def reshard(self, module: nn.Module) -> None:
        """Free the gathered parameters of ``module``."""
        self.parameters.reshard(module)
        if not self._backward.is_awaited:
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
        if sharding_state(module) is None:
            return args, kwargs  # it is no unit's module
        return before_forward(module, module, args, kwargs)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Finish such a call; returns the output for its caller."""
        output = free_of_views(output)
        if sharding_state(module) is not None:
            output = after_forward(module, module, args, output)
        return self._entries.end(module, args, output)

    # Around a forward

    def _before_forward(self, module: nn.Module) -> None:
        self._recover_unfinished()
        # Before anything is gathered, which registers parameters again over whatever was put in their place.
        self.parameters.check_registered()
        if not self._modules_are_checked:
            self._modules_are_checked = True
            self.parameters.check_modules()
        for parameter in self.parameters:
            parameter.path.follow_freezing(parameter.stored, parameter.compute)
        self._backward.follow_trainable()
        self._sharded.prepare_for_inference_mode()
        self._sharded.reshard_stale()
        self._lockstep.enter(self._names[module])
        # In this order: copies in another dtype are made from values that are up to date on all ranks.
        self._replicated.gather_changed()
        self._replicated.swap_in()
        self._in_slices.reshard()
        self._backward.watch_replicated()

    def _recover_unfinished(self) -> None:
        if self._backward.runs or backward_is_unfinished(self.model):
            logger.warning("the last backward did not end; its gradients are dropped")
            self.recover(drop_gradients=True)

    def _after_forward(self, output: Any, raised: bool) -> Any:
        if raised:
            self._lockstep.fail(sys.exc_info()[1], "a forward")
            self.recover(drop_gradients=False)
            return output
        self._lockstep.leave()
        output = complete_units(self.model, output)
        if torch.is_grad_enabled():
            self._backward.is_awaited = self._has_graphs = True
            self._sharded.find()
            self._sharded.note_versions()
            for tensor in tensors_with_grad(output):
                tensor.register_hook(self._begin.on_gradient)
        # Without gradients, but not between a forward and its backward, which needs what that left in place.
        elif not self._backward.is_awaited:
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


class StepObserver(CollectiveObserver, Protocol):
    """Is told of collectives, in backwards and after steps."""

    def end_reductions(self) -> None:
        """A backward has reduced its gradients."""

    def gathered(self, begin: Any) -> None:
        """What an optimizer has made of parameters has been gathered."""


class _Begin:
    """Begins a backward at the gradient of an output.

    Attributes:
        backward: The backwards of the model; ``None`` once its plan was undone.
    """

    def __init__(self, backward: BackwardPass) -> None:
        self.backward: BackwardPass | None = backward

    def on_gradient(self, grad: torch.Tensor) -> None:
        """Hook on outputs.

        Raises:
            RuntimeError: The plan was undone.
        """
        if self.backward is None:
            raise RuntimeError(
                "this is a backward of a forward from before the model was switched to another plan, whose "
                "parameters are gone: run the forward again"
            )
        self.backward.begin(grad)
