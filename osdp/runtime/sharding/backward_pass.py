"""A backward of a model under a plan, from its first gradient until all are handed out.

Autograd says when a gradient is there, not that a backward begins or ends. So the first hook that is called
begins it: that of an output, of a parameter, or a collective of the backward. Its end is a callback that
autograd runs when nothing else is left::

    begin          stored gradients and hooks are taken aside (GradientPath)
    _on_gradient   a parameter is used; replicated gradients fill buckets, and full buckets start
    _reduce_rest   all that is left starts; ranks find out what none of them used
    _hand_out      gradients to stored parameters, in one order, then users' hooks
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.runtime.module.gradient_hooks import gradient_hook
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.module.unused import unused_error
from osdp.runtime.ranks.lockstep import Lockstep
from osdp.runtime.sharding.accumulation import Accumulation
from osdp.runtime.sharding.entries import Entries
from osdp.runtime.sharding.fsdp_units import ShardedParameter
from osdp.runtime.sharding.planned_parameters import Parameter, PlannedParameters
from osdp.runtime.sharding.reducer import GradientReducer
from osdp.runtime.sharding.replicated import ReplicatedParameter
from osdp.runtime.sharding.sliced import SlicedParameter
from osdp.torch_private.autograd import (
    has_hooks,
    is_asked_for,
    node_of,
    queue_backward_callback,
    remove_hooks,
)
from osdp.torch_private.dispatch_modes import unseen_by_checkpoints
from osdp.torch_private.fsdp import expect_end_of_backward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backwards:
    """What backwards may do, the same on all ranks.

    Attributes:
        find_unused_parameters: Whether they may leave parameters without a gradient.
        double_backward: Whether they may be differentiated themselves.
    """

    find_unused_parameters: bool = True
    double_backward: bool = False


class BackwardPass:
    """The backwards of a model under a plan, one at a time, and what they keep for each other.

    Args:
        model: The model.
        parameters: Its parameters.
        reducer: The buckets of the replicated ones.
        lockstep: The order of collectives.
        entries: The calls into the model.
        settings: What backwards may do.

    Attributes:
        runs: Whether a backward runs, or one did not end.
        is_awaited: Whether a forward ran with gradients, and no backward has reached the model since.
        is_stepped: Whether an optimizer has stepped since the last backward.
        stepped: Identities of the stored parameters that have been stepped since their last gradient.
        on_reduced: Called when a backward has reduced its gradients, before users' hooks are.
        trainable_at_first: Names of the parameters that were trainable when the model was wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: PlannedParameters,
        *,
        reducer: GradientReducer,
        lockstep: Lockstep,
        entries: Entries,
        settings: Backwards,
    ) -> None:
        self._model, self._parameters = model, parameters
        self._replicated, self._sharded = parameters.replicated, parameters.sharded
        self._in_slices = parameters.in_slices
        self._reducer, self._lockstep, self._entries = reducer, lockstep, entries
        self._settings = settings
        self.runs = False
        self.is_awaited = False
        self.is_stepped = True
        self.stepped: set[int] = set()
        self.on_reduced: Callable[[], object] = lambda: None
        #: Names of parameters with a gradient that has not been delivered yet.
        self._used: set[str] = set()
        self._accumulation = Accumulation(self._give_up)
        self._trainable = parameters.trainable
        self.trainable_at_first = frozenset(self._trainable)
        #: Names of the parameters whose gradients are to be reduced, until settings change.
        self._due: tuple[str, ...] | None = None
        self._watched: set[int] = set()
        self._watched_for: tuple[str, ...] | None = None
        #: How many backwards have reduced gradients, and whether copies on the ranks were found to differ.
        self._num_reduced, self._is_apart = 0, False
        lockstep.on_backward = self.begin
        entries.on_recompute = self._on_recompute
        parameters.report_to(self._on_gradient)
        self.watch_replicated()
        self._watch_stored()

    def begin(self, _grad: torch.Tensor | None = None) -> None:
        """Begin the backward; called by whatever comes first in it, and again by all that follows."""
        # Checked at every call: the first, from a collective of the backward, may run with gradients off.
        if torch.is_grad_enabled() and not self._settings.double_backward:
            raise RuntimeError(
                "create_graph=True differentiates a backward, which the plan does not support: pass "
                "OSDP(..., double_backward=True), which replicates everything and recomputes nothing"
            )
        if self.runs:
            return
        if self._entries.is_in_forward:
            raise RuntimeError(
                "a backward inside the model's forward uses its parameters, while the rest of that forward "
                "still needs them: return the losses, and call backward() after the forward"
            )
        self.runs = True
        self.is_stepped = False
        self.follow_trainable()
        self._lockstep.begin_backward()
        self._replicated.swap_in()
        self._used.difference_update(self._accumulation.begin_backward())
        for parameter in self._parameters:
            parameter.path.begin(parameter.stored)
        self._sharded.begin_backward()
        expect_end_of_backward(self._model)
        queue_backward_callback(self._end)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of earlier backwards are kept for one that reduces them."""
        return bool(self._used)

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of replicated parameters may be on their way to other ranks."""
        return any(bucket.started for bucket in self._reducer.buckets)

    @property
    def kept(self) -> set[int]:
        """Identities of the stored parameters whose gradients are kept."""
        return {id(p.stored) for p in self._parameters if p.name in self._used} if self._used else set()

    def close(self) -> None:
        """Remove the hooks on stored parameters, and let the graphs of earlier forwards keep none of them."""
        self._lockstep.on_backward = self._entries.on_recompute = lambda: None
        for parameter in self._parameters:
            remove_hooks(parameter.stored, parameter.path.own_hooks)

    def watch_replicated(self) -> None:
        """Register gradient hooks on the replicated parameters that are trainable at present."""
        if self._watched_for is self._trainable:
            return
        self._watched_for = self._trainable
        for parameter in self._replicated:
            if parameter.compute.requires_grad and id(parameter) not in self._watched:
                parameter.compute.register_post_accumulate_grad_hook(
                    gradient_hook(self, parameter, BackwardPass._on_replicated_gradient)
                )
                self._watched.add(id(parameter))

    def follow_settings(self) -> None:
        """Apply the gradient settings of all parameters, from the next backward on."""
        self._due = None
        self._lockstep.syncs = any(parameter.path.syncs for parameter in self._parameters)
        self._reducer.follow_settings()
        self._in_slices.follow_settings()
        for unit in self._sharded.units:
            unit.follow_settings()

    def follow_trainable(self) -> None:
        """Take over which parameters are frozen at present, if that has changed since the last pass."""
        trainable = self._parameters.trainable
        if trainable == self._trainable:
            return
        self._used.difference_update(self._accumulation.begin_backward())
        if self._used:
            raise RuntimeError(
                "parameters were frozen or unfrozen between the microbatches of an accumulation; do that "
                "between steps"
            )
        self._refuse_mixed_dtypes(set(trainable))
        for parameter in self._parameters:
            # Between a forward and its backward: what is frozen then gets no gradient any more.
            parameter.path.follow_freezing(parameter.stored, parameter.compute)
        # What was built from the trainable parameters: buckets, FSDP2's dtypes, hooks, and settings of units.
        self._trainable = trainable
        self._reducer.rebuild()
        self._sharded.follow_trainable()
        self._in_slices.watch()
        self._watch_stored()
        self.follow_settings()

    def _refuse_mixed_dtypes(self, trainable: set[str]) -> None:
        """Raise if parameters were unfrozen that would be reduced together with ones of another dtype.

        When the model is wrapped, the trainable parameters of a unit have one dtype. Which frozen parameters
        join them depends on the plan, so this check compares all parameters rather than those of a unit.
        """
        if trainable <= self.trainable_at_first:
            return
        dtypes: dict[torch.dtype, str] = {}
        for parameter in self._parameters:
            if parameter.name in trainable:
                dtypes.setdefault(parameter.stored.dtype, parameter.name)
        if len(dtypes) > 1:
            mixed = " and ".join(f"{name!r} of {dtype}" for dtype, name in dtypes.items())
            raise RuntimeError(
                f"parameters were unfrozen so that dtypes mix: {mixed} are trainable now. Only parameters "
                "that are trainable when the model is wrapped are kept apart by dtype: unfreeze them before "
                "OSDP(...), and freeze them again after it, or convert them to one dtype"
            )

    def reset(self, *, drop_gradients: bool) -> None:
        """End a backward that has failed; with ``drop_gradients`` none is left of it or of earlier ones."""
        if drop_gradients:
            self._reducer.reset()
            self._sharded.reset()
            for parameter in self._parameters:
                parameter.path.drop(parameter.stored)
                parameter.stored.grad = None
                if parameter.compute is not None:
                    parameter.compute.grad = None
            self._used.clear()
            self._accumulation.reset()
        self.runs = False
        self.is_awaited = False

    def _give_up(self, parameter: Parameter) -> None:
        """Drop the gradient that an accumulation has kept for a parameter."""
        parameter.path.give_up()
        if isinstance(parameter, ReplicatedParameter):
            self._reducer.give_up(parameter)
        elif isinstance(parameter, ShardedParameter):
            self._sharded.give_up(parameter)

    def _watch_stored(self) -> None:
        """Register hooks for gradients that do not come through a forward, such as a penalty on weights."""
        for parameter in self._parameters:
            if parameter.path.own_hooks or not parameter.stored.requires_grad:
                continue
            handle = parameter.stored.register_hook(gradient_hook(self, parameter, BackwardPass._on_stored))
            parameter.path.own_hooks.add(handle.id)

    def _on_recompute(self) -> None:
        """Begin the backward, if the first sign of it is a checkpoint that computes again."""
        if self.runs:
            return
        # Gradients are enabled for what is computed again, which says nothing of the backward itself.
        with torch.no_grad(), unseen_by_checkpoints():
            self.begin()

    def _on_replicated_gradient(self, parameter: ReplicatedParameter) -> None:
        self._on_gradient(parameter)
        if parameter.compute.requires_grad:
            self._reducer.receive(parameter)

    def _on_stored(self, parameter: Parameter) -> None:
        if isinstance(parameter, SlicedParameter) and is_asked_for(node_of(parameter.stored)):
            return  # torch.autograd.grad gives it out; nothing accumulates
        if not self.runs and has_hooks(parameter.stored, parameter.path.own_hooks):
            # Users' hooks are about to be called with this part of the gradient, and at the end of a backward
            # that begins here they would be once more. One that begins later finds what they leave.
            return
        self._on_gradient(parameter)

    def _on_gradient(self, parameter: Parameter) -> None:
        if parameter.compute is not None and not parameter.compute.requires_grad:
            return  # frozen since its forward: autograd calls the hook, but has accumulated nothing
        grad = None if parameter.compute is None else parameter.compute.grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} is sparse, which cannot be reduced over ranks: create "
                "the embedding with sparse=False, and use an optimizer for dense gradients"
            )
        # Also in one that runs already, if it is differentiated itself: that may have to be refused.
        if not self.runs or torch.is_grad_enabled():
            self.begin()
        self._used.add(parameter.name)

    def _end(self) -> None:
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
        if self._due is None:
            self._due = tuple(p.name for p in self._parameters if p.path.syncs and p.stored.requires_grad)
        due = self._due
        if not due:
            # None is reduced (no_sync): sharded and replicated units keep what they have.
            self._deliver((), reduces=False)
            return
        # A parameter that this rank has not used may have a gradient on another. The answer comes with the
        # last bucket where that can carry flags, else by an exchange of its own.
        missing = [name for name in due if name not in self._used]
        if self._settings.find_unused_parameters and self._reducer.can_find_unused(due):
            absent = self._reducer.start_rest_and_find_unused(self._used)
        else:
            absent = set(self._used_nowhere(due)) if self._settings.find_unused_parameters else set()
            if not self._settings.find_unused_parameters and len(missing) == len(due):
                absent = set(due)  # torch.autograd.grad: nothing was accumulated
                missing = []
            self._reducer.start_rest(absent)
        self._used.difference_update(due)
        self._deliver(absent, reduces=len(absent) < len(due))
        if missing and not self._settings.find_unused_parameters:
            raise unused_error(missing)

    def _deliver(self, absent: Collection[str], *, reduces: bool) -> None:
        """Hand out gradients and call users' hooks, in the same order on all ranks; ends the backward.

        Args:
            absent: Names of the parameters that are to be reduced and that no rank has used.
            reduces: Whether some gradients are reduced.
        """
        # Before users' hooks run, which may begin another pass.
        self._sharded.end_backward()
        self.runs = False
        self.is_awaited = False
        self._entries.open_in_backward = True
        try:
            self._hand_out(absent, reduces)
        except BaseException:
            # A hook raised: this counts as a backward that did not end, whose gradients are dropped.
            self.runs = True
            raise
        finally:
            self._entries.open_in_backward = False
        if self._used:
            self._accumulation.end_backward([p for p in self._parameters if p.name in self._used])

    def _hand_out(self, absent: Collection[str], reduces: bool) -> None:
        self._reducer.finish(absent)
        self.on_reduced()
        if reduces:
            self._compare_copies()
        for parameter in self._parameters:
            path, stored = parameter.path, parameter.stored
            if isinstance(stored, DTensor):
                compute_as_whole(stored.grad)
            is_absent = parameter.name in absent
            if is_absent:
                path.give_up()  # zeros, which ranks that joined its reductions have kept
            else:
                # On all ranks, also on those that have not used it.
                self.stepped.discard(id(stored))
            if path.is_held:
                path.deliver(stored, None if is_absent else stored.grad)
            elif is_absent and not path.had_gradient and not isinstance(parameter, ReplicatedParameter):
                stored.grad = None  # FSDP2 counted it as zero

    def _compare_copies(self) -> None:
        """Warn once if ranks no longer have the same values of what each of them steps by itself.

        Called where a backward has reduced gradients, since all ranks come there, and equally often. An
        optimizer may step on one of them alone.
        """
        self._num_reduced += 1
        if self._is_apart or self._num_reduced & (self._num_reduced - 1):
            return  # only in the first of them, the second, the fourth, the eighth and so on
        apart = self._lockstep.differing(self._replicated.checksums)
        self._is_apart = bool(apart)
        if apart and self._lockstep.is_first:
            logger.warning(
                "%d replicated parameters, such as %r, do not have the same values on all ranks: if that "
                "lasts, each rank trains a model of its own. Optimizers and loaded weights must be the same "
                "on all ranks. Random numbers that are added to weights or gradients (torch.randn_like), or "
                "drawn for weights (nn.init), are not: draw them with a torch.Generator that has one seed on "
                'all ranks, or plan with strategy="FULL_SHARD"',
                len(apart),
                apart[0],
            )

    def _used_nowhere(self, due: Sequence[str]) -> Iterator[str]:
        """The names in ``due`` that no rank used."""
        used = self._lockstep.used_anywhere([name in self._used for name in due])
        return (name for name, is_used in zip(due, used, strict=True) if not is_used)
