"""Checks before each optimizer step that the optimizer fits the wrapped model and its plan.

The wrapper never receives the optimizer, so a step pre-hook of ``torch.optim`` checks each new one: whether
it was created before the model was wrapped, whether its step is correct on shards, and whether it needs more
memory than was planned; and until gradients have arrived once, whether there are any.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from osdp.errors import NoGradientError, PlanMismatchError
from osdp.model.training import (
    MATRIX_OPTIMIZERS,
    Training,
    is_elementwise,
    is_muon,
    local_bytes,
    unsupported_step,
)
from osdp.plan.plan import Plan
from osdp.plan.shard_math import matrix_step_bytes
from osdp.plan.sharding import MatrixStep
from osdp.runtime.measured_steps import MeasuredSteps
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.module.plain_states import laid_out_like
from osdp.runtime.module.replaced import Replaced
from osdp.runtime.optimizer.closures import with_closure
from osdp.runtime.optimizer.local_steps import LocalSteps
from osdp.runtime.optimizer.whole_matrices import WholeMatrices
from osdp.runtime.ranks.control import Control
from osdp.runtime.running import RunningModel
from osdp.text import format_bytes
from osdp.torch_private.local_step import NUMBERS, leaves_fused_open
from osdp.torch_private.optimizers import is_stepping

logger = logging.getLogger(__name__)

#: Bytes of states that are worth no word.
_SLACK = 2**20

#: The advice after a difference in optimizer memory.
_PLAN_AGAIN = "plan with training=Training.from_optimizer(...) of such an optimizer"


class OptimizerCheck:
    """Checks the optimizers that step on a model.

    Args:
        running: The model under its plan.
        parameters: Its parameters as optimizers see them, by name.
        replaced: The parameters that the model had before it was wrapped.
        measured: Notes the steps.
        note_step: Called with the optimizer after each step over the model.
    """

    def __init__(
        self,
        running: RunningModel,
        parameters: Mapping[str, nn.Parameter],
        replaced: Replaced,
        measured: MeasuredSteps,
        note_step: Callable[[Optimizer], None],
    ) -> None:
        self._running = running
        self._note_step = note_step
        self._measured = measured
        self._replaced = replaced
        # No weak references: torch cannot swap tensors that have one, as ``module.to(...)`` does to DTensors.
        self._parameters = {id(p): p for p in parameters.values()}
        #: How each matrix is to be stepped whole, by id.
        self._matrix_steps = _matrix_steps(running.plan, parameters)
        #: Identities of the parameters that each optimizer had when it was checked.
        self._known: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        #: Those that have stepped on the model, under this plan or an earlier one.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._in_step: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: Identities of the parameters that had a gradient when the step under way began: hooks of the
        #: optimizer itself, which come first, may have dropped it.
        self._with_gradients: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        #: Those whose states have been compared with what was planned.
        self._weighed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._local_steps: weakref.WeakKeyDictionary[Optimizer, LocalSteps] = weakref.WeakKeyDictionary()
        self._had_gradients = False
        self._told_surplus = False
        self._handles: list[RemovableHandle] = [*_hook_up(self)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped on the model, in the order of their first parameters, as on all ranks."""
        places = {key: place for place, key in enumerate(self._parameters)}

        def place(optimizer: Optimizer) -> int:
            return min(places[key] for key in _identities(optimizer) if key in places)

        return sorted((each for each in self._stepped if self._is_over_mine(each)), key=place)

    @property
    def is_in_step(self) -> bool:
        """Whether one of them is in a step, such as one that calls a closure."""
        # One whose step has raised is in none any more.
        return any(is_stepping(optimizer) for optimizer in self._in_step)

    def close(self) -> Replaced:
        """Check no more steps; returns the parameters that were replaced."""
        for handle in self._handles:
            handle.remove()
        for steps in self._local_steps.values():
            steps.close()
        return self._replaced

    def remember(self, stepped: Iterable[Optimizer]) -> None:
        """Note optimizers that have stepped on the model under an earlier plan."""
        self._stepped.update(stepped)

    def exchange_in(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before the model was wrapped train it.

        Raises:
            RuntimeError: It has stepped already.
        """
        self._replaced.exchange_in(optimizer, self._running.computing())

    def before_step(self, optimizer: Optimizer, *, compiled: bool = False) -> None:
        """Check ``optimizer``, which is about to step.

        Args:
            optimizer: The optimizer.
            compiled: Whether Dynamo compiles the step. It is then left to the optimizer: Dynamo would find
                one without parameters, and lets that be capturable, for which all have to be on a GPU.

        Raises:
            RuntimeError: The optimizer cannot train this model, or no gradients have arrived.
            PlanMismatchError: The optimizer needs more memory than was planned.
        """
        if self._known.get(optimizer) != _identities(optimizer):
            self._look_at(optimizer)
            if optimizer not in self._known and self._is_over_mine(optimizer):
                self._handles.append(optimizer.register_load_state_dict_post_hook(_lay_out_states))
                _lay_out_states(optimizer)
            self._known[optimizer] = _identities(optimizer)
            self._stepped.add(optimizer)
            self._step_locally(optimizer)
        if not self._had_gradients:
            self._look_for_gradients(optimizer)
        if self._is_over_mine(optimizer):
            self._running.free_copies()
            self._running.links.factor.look()
            for tied in self._running.links.tied:
                tied.note(optimizer)
            steps = self._local_steps.get(optimizer)
            if compiled and is_muon(optimizer):
                raise RuntimeError(
                    "a compiled step of Muon would see the parts of its matrices that this rank holds: leave "
                    "optimizer.step() uncompiled"
                )
            if steps is not None and not compiled:
                steps.make_next(optimizer)
            self._in_step.add(optimizer)
            self._with_gradients[optimizer] = _with_gradients(optimizer)

    def closure_of(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """``closure``, after which the copies that its forward has made anew are freed, for the update."""

        def compute_and_free(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._running.free_copies()
            self.refuse_kept(optimizer)
            return loss

        return compute_and_free if self._is_over_mine(optimizer) else closure

    def refuse_kept(self, optimizer: Optimizer) -> None:
        """Raise if gradients that ``optimizer`` is to step by are kept for a later reduction.

        Raises:
            RuntimeError: Some are: in their place are marks next to zero, by which nothing would be trained.
        """
        if not self._running.plan.is_whole:
            return
        kept = self._running.sharded.kept
        mine = _with_gradients(optimizer) & self._parameters.keys() if kept else set()
        if mine & kept:
            some = "" if mine <= kept else f"{len(mine & kept)} of "
            raise RuntimeError(
                f"{type(optimizer).__name__} steps, and the gradients of {some}its {len(mine)} parameters "
                "are kept for a later reduction (inside of no_sync(), or after "
                "set_requires_gradient_sync(False)): run the last backward of each step outside, which "
                "reduces them all; or give a part that waits an optimizer of its own. Steps by the gradients "
                "of single ranks, as LocalSGD of Accelerate makes, are not for a model under a plan"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Gather what ``optimizer`` has updated in shards, so that each rank can evaluate by itself."""
        self._in_step.discard(optimizer)
        if self._is_over_mine(optimizer):
            before = self._with_gradients.pop(optimizer, set())
            self._running.after_step(before | _with_gradients(optimizer))
            self._measured.note(optimizer)
            self._note_step(optimizer)
            if optimizer not in self._weighed:
                self._weighed.add(optimizer)
                self._weigh(optimizer)

    def _weigh(self, optimizer: Optimizer) -> None:
        """Say once under a plan if an optimizer keeps more states than it has memory for.

        Those of torch are known before they step; what classes derived from them, and others, keep shows now.
        """
        plan = self._running.plan
        mine = [p for group in optimizer.param_groups for p in group["params"] if self._is_mine(p)]
        kept = sum(
            local_bytes(value)
            for parameter in mine
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        )
        planned = plan.training.state_bytes(sum(map(local_bytes, mine)), len(mine))
        left = plan.memory_limit - plan.predicted.peak_bytes
        if kept > planned + max(left, 0) + _SLACK and dist.get_rank() == 0:
            logger.warning(
                "%s keeps %s of states on this rank; the plan was made for %s and leaves %s beside: the peak "
                "is above the memory limit by the rest. Give a lower limit",
                type(optimizer).__name__,
                format_bytes(kept),
                format_bytes(planned),
                format_bytes(max(left, 0)),
            )

    def _look_at(self, optimizer: Optimizer) -> None:
        self.exchange_in(optimizer)
        self._refuse_added(optimizer)
        if not self._is_over_mine(optimizer):
            return
        reason = unsupported_step(optimizer)
        if reason is not None:
            raise RuntimeError(
                f"a wrapped model cannot be trained by {reason}. That does not depend on the plan; use "
                "another optimizer, such as torch.optim.AdamW"
            )
        plan = self._running.plan
        training = plan.training
        try:
            live = Training.from_optimizer(optimizer)
        except (TypeError, ValueError) as error:
            logger.warning(
                "whether the optimizer fits the plan made for %s is unknown: %s", training.optimizer, error
            )
            return
        spare = plan.memory_limit - plan.predicted.peak_bytes
        differences = training.mismatch(optimizer, spare=spare)
        differences += self._matrix_differences(optimizer, live, spare)
        if differences:
            raise PlanMismatchError([*differences, _PLAN_AGAIN])
        surplus = training.surplus(optimizer)
        if surplus is not None and dist.get_rank() == 0 and not self._told_surplus:
            self._told_surplus = True
            logger.warning("%s: there may be a faster plan; %s", surplus, _PLAN_AGAIN)

    def _matrix_differences(self, optimizer: Optimizer, live: Training, spare: int) -> list[str]:
        """Reasons why what ``optimizer`` does with matrices needs more memory than planned."""
        plan, ranks = self._running.plan, self._running.data_group.size()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if self._is_mine(p)]
        planned = [self._parameters[key] for key in self._matrix_steps]
        if is_muon(optimizer):
            needs, has = (
                matrix_step_bytes([p.numel() for p in each], ranks) for each in (parameters, planned)
            )
            # There are no activations then: beside the temporaries there is what is kept all the time.
            free = plan.memory_limit - plan.predicted.state_bytes
            if needs <= max(has, free):
                return []
            return [
                f"a step of Muon needs {needs} bytes of temporaries for its matrices; beside states and "
                f"gradients the limit leaves {free}"
            ]
        more = live.num_states - MATRIX_OPTIMIZERS["Muon"]
        whole = [p for p in parameters if id(p) in self._matrix_steps]
        extra = more * sum(local_bytes(p) for p in whole)
        if extra <= max(spare, 0):
            return []
        return [
            f"{live.optimizer} steps {len(whole)} matrices that the plan leaves to "
            f"{plan.training.matrix_optimizer}, which keeps {extra} bytes less of them"
        ]

    def _step_locally(self, optimizer: Optimizer) -> None:
        if optimizer in self._local_steps or not self._is_over_mine(optimizer):
            return  # those of other models are none of this one's business
        if is_elementwise(optimizer) and (_has_dtensors(optimizer) or leaves_fused_open(optimizer)):
            self._local_steps[optimizer] = LocalSteps(optimizer)
        elif is_muon(optimizer):
            gathered = {key for key, step in self._matrix_steps.items() if step is MatrixStep.GATHERED}
            mesh, plan = self._running.mesh, self._running.plan
            control = Control.over(mesh if plan.is_whole else mesh["dp"])
            matrices = WholeMatrices(self._running.data_group, self._parameters, gathered, control)
            self._local_steps[optimizer] = LocalSteps(optimizer, matrices.step)

    def _refuse_added(self, optimizer: Optimizer) -> None:
        """Raise for parameters that were added after wrapping: nothing reduces their gradients."""
        others = {id(p) for group in optimizer.param_groups for p in group["params"] if not self._is_mine(p)}
        others -= self._running.computing().keys()
        added = [
            name for name, parameter in self._running.model.named_parameters() if id(parameter) in others
        ]
        if added:
            raise RuntimeError(
                f"{len(added)} parameters came into the model after it was wrapped, the first is "
                f"{added[0]!r}: their gradients are not reduced over the ranks, whose copies would drift "
                "apart. Add layers and adapters to the plain model, and wrap it then"
            )

    def _look_for_gradients(self, optimizer: Optimizer) -> None:
        self._had_gradients = any(p.grad is not None for p in self._parameters.values())
        if self._had_gradients or not self._running.awaits_backward:
            return
        if self._is_over_mine(optimizer):
            raise NoGradientError

    def _is_over_mine(self, optimizer: Optimizer) -> bool:
        return any(self._is_mine(p) for group in optimizer.param_groups for p in group["params"])

    def _is_mine(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._parameters


def _matrix_steps(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> dict[int, MatrixStep]:
    """How the plan has each matrix stepped whole, by the parameter's id."""
    return {
        id(parameters[name]): decision.matrix_step
        for part in plan.stages
        for decision in part.sharding.decisions
        if decision.matrix_step is not None
        for name in decision.parameters
        if name in parameters and parameters[name].ndim == 2
    }


def _with_gradients(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def _identities(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _has_dtensors(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def _lay_out_states(optimizer: Optimizer) -> None:
    """Lay out states of whole parameters, as a plain model's optimizer has them, like the parameters."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not isinstance(state, dict):
            continue
        for key, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_plain and key not in NUMBERS and value.shape == parameter.shape:
                state[key] = laid_out_like(parameter, value)
                compute_as_whole(state[key])


def _hook_up(check: OptimizerCheck) -> tuple[RemovableHandle, RemovableHandle]:
    """Call ``check`` before and after every optimizer step for as long as it exists; returns the handles.

    After that the hooks stay registered and do nothing: a garbage collection may free ``check`` while torch
    is iterating over its hooks.
    """
    reference = weakref.ref(check)

    def check_step(optimizer: Optimizer, compiled: bool) -> None:
        living = reference()
        if living is not None:
            living.before_step(optimizer, compiled=compiled)

    # Dynamo cannot trace it, and need not: it decides nothing about the step.
    uncompiled: Any = torch.compiler.disable(check_step)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        compiles = torch.compiler.is_compiling()
        uncompiled(optimizer, compiles)
        living = reference()
        if living is None or compiles:
            return None
        changed = with_closure(args, kwargs, partial(living.closure_of, optimizer))
        if changed is None:  # else the closure is yet to run the last backward
            living.refuse_kept(optimizer)
        return changed

    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        living = reference()
        if living is not None:
            living.after_step(optimizer)

    return (
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(torch.compiler.disable(after_step)),
    )
