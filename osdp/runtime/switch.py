"""Going on under another plan: a running model and its optimizers, without going to disk.

The plan is undone until the model is plain, with its parameters on ``meta``; the new plan is applied to that
as to any model on ``meta``, and takes over what was stored, one tensor after another::

    stored as before  ->  whole, for one tensor at a time  ->  stored as planned now

A tensor that both plans store alike is not copied.
"""

import gc
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from osdp.errors import PlanMismatchError
from osdp.plan.plan import Plan
from osdp.runtime.computation import Computation
from osdp.runtime.mesh import mesh_with_tensor_parallel
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.module.parameter_owners import ParameterSites, owned_parameters
from osdp.runtime.module.plain_states import part_for
from osdp.runtime.module.replaced import PlainParameters, Replaced
from osdp.runtime.ranks.agreement import check_together
from osdp.runtime.ranks.control import Control
from osdp.runtime.sharding.apply import apply_sharding
from osdp.runtime.sharding.backward_pass import Backwards
from osdp.runtime.sharding.sharded_model import ShardedModel
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import NUMBERS

logger = logging.getLogger(__name__)

#: Parameters that something still refers to, of which so many are named.
_NAMED = 8


def check_switch(
    applied: ShardedModel,
    plan: Plan,
    optimizers: Sequence[Optimizer],
    stepped: Sequence[Optimizer],
    *,
    in_step: bool = False,
) -> None:
    """Raise on all ranks unless ``applied`` can go on under ``plan``; nothing is changed.

    Args:
        applied: The model.
        plan: The next plan.
        optimizers: The optimizers to take along.
        stepped: Those that are known to train the model.
        in_step: Whether one of them is in a step.

    Raises:
        TypeError: What is given is no plan, or no optimizer.
        ValueError: The plan cuts the model or offloads, an optimizer is left out, or it keeps states that are
            not laid out as its parameters; or modules came into the model, or went, since it was wrapped.
        PlanMismatchError: The plan was made for another model or number of ranks.
        RuntimeError: The model is not between two steps, or ranks have gradients or optimizer states of
            different parameters.
    """
    control = Control.over(applied.mesh)
    check_together(
        control, lambda: _check(applied, plan, optimizers, stepped, in_step), "model.switch() of all ranks"
    )
    if control is not None and not control.agree(sorted(applied.gathering), "the ranks to switch"):
        raise RuntimeError(
            "ranks have gradients of different parameters that no optimizer has stepped by: call "
            "zero_grad() before switch"
        )
    if control is not None and not control.agree(
        _laid_out_states(applied, optimizers), "the ranks to switch"
    ):
        raise RuntimeError(
            "ranks keep states of other parameters, or other states, in the optimizers that go along: pass "
            "the same optimizers on all of them, and let go of those that no longer step"
        )


def _laid_out_states(applied: ShardedModel, optimizers: Sequence[Optimizer]) -> list[tuple[str, str]]:
    """What all ranks lay out anew together: names of parameters and of their states, in order."""
    names = {id(parameter.stored): parameter.name for parameter in applied.parameters}
    # By identity: a wrapper shows the states of the optimizer inside.
    states = {
        id(state): (parameter, state)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
    return sorted(
        (names[id(parameter)], str(key))
        for parameter, state in states.values()
        for key, value in state.items()
        if key not in NUMBERS
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.shape == parameter.shape
    )


def _check(
    applied: ShardedModel,
    plan: Plan,
    optimizers: Sequence[Optimizer],
    stepped: Sequence[Optimizer],
    in_step: bool,
) -> None:
    # 1. What was given.
    if not isinstance(plan, Plan):
        raise TypeError(f"switch takes a Plan, not a {type(plan).__name__}; Plan.load reads one from a file")
    strange = [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]
    if strange:
        raise TypeError(f"switch takes optimizers of torch.optim, not {', '.join(strange)}")
    if not plan.is_whole:
        raise ValueError(
            f"a running model cannot be cut into pp={plan.dims.pp} stages, or shared by tp={plan.dims.tp} "
            "ranks: save a checkpoint, and load it into a model under that plan"
        )
    differences = []
    if plan.model != applied.plan.model:
        differences.append(
            f"made for a model with fingerprint {plan.model}, this one has {applied.plan.model}"
        )
    if plan.dp != applied.mesh.size():
        differences.append(
            f"it is for {plan.dp} ranks, there are {applied.mesh.size()}: save a checkpoint, start {plan.dp} "
            "processes, and load it into a model under that plan"
        )
    if differences:
        raise PlanMismatchError(differences)
    if mesh_with_tensor_parallel(applied.model, applied.mesh) is not applied.mesh:
        raise ValueError("a model that was parallelized by hand cannot switch to another plan")
    if any(unit.offloaded for each in (applied.plan, plan) for unit in each.stages[0].sharding.units):
        raise ValueError(
            "a plan that offloads cannot be switched to or from: save a checkpoint, and load it into a model "
            "under the other plan"
        )
    # 2. The state of the training.
    waiting_for = "an optimizer is in its step, which calls a closure" if in_step else applied.waiting_for
    if waiting_for is not None:
        raise RuntimeError(
            f"a plan is switched between two steps, but {waiting_for}: call switch after optimizer.step()"
        )
    applied.parameters.check_registered()
    here = {entry.name for entry in owned_parameters(applied.model).values()}
    known = {parameter.name for parameter in applied.parameters}
    if here != known:
        changed = sorted(here ^ known)
        raise ValueError(
            f"{len(here - known)} parameters came into the model after it was wrapped, and "
            f"{len(known - here)} are gone, such as {changed[0]!r}: no other plan has a place "
            "for them. Keep other models outside of it, or wrap the model with them"
        )
    names = {id(parameter.stored): parameter.name for parameter in applied.parameters}
    left_out = [type(each).__name__ for each in stepped if all(each is not given for given in optimizers)]
    if left_out:
        raise ValueError(
            f"an optimizer that has trained this model was left out ({', '.join(left_out)}): pass all of "
            "them, model.switch(plan, [first, second]), so that their states go along"
        )
    faults = [fault for optimizer in optimizers for fault in _state_faults(optimizer, names)]
    if faults:
        raise ValueError("these optimizer states are not laid out as their parameters: " + "; ".join(faults))


def _state_faults(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:  # what an optimizer keeps beside, by a name, has a layout of its own
            continue
        if not isinstance(state, dict):
            yield f"what is kept of {name!r} is a {type(state).__name__}, and no dict"
            continue
        for key, value in state.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape != parameter.shape:
                    yield f"{key} of {name!r} has shape {tuple(leaf.shape)}"


class TakenApart:
    """A model whose plan was undone, and what its parameters and optimizers hold, by name.

    Args:
        applied: The model, which :func:`check_switch` has passed; it can no longer be used.
        optimizers: The optimizers to take along, which have no parameters until the next plan is applied.
        replaced: The parameters that the model's have replaced.

    Attributes:
        before: The parameters that the model had.
    """

    def __init__(self, applied: ShardedModel, optimizers: Sequence[Optimizer], replaced: Replaced) -> None:
        self._gradients, self._ever_stepped = applied.gathering, applied.ever_stepped
        self._trainable_at_first = applied.trainable_at_first
        applied.close()
        replaced.let_go()
        self._model, self._mesh, self._plan = applied.model, applied.mesh, applied.plan
        self._group = applied.own_group
        self.before = PlainParameters(applied.model, replaced)
        self._left = {p.name: weakref.ref(p.stored) for p in applied.parameters}
        self._values = {parameter.name: parameter.stored for parameter in applied.parameters}
        self._paths = {parameter.name: parameter.path for parameter in applied.parameters}
        names = {id(stored): name for name, stored in self._values.items()}
        self._optimizers = [_Detached(optimizer, names) for optimizer in optimizers]
        for detached in self._optimizers:
            detached.let_go()
        for entry in owned_parameters(self._model).values():
            entry.register(_on_meta(entry.parameter))

    def go_on(
        self, plan: Plan, backwards: Backwards, computation: Computation
    ) -> tuple[ShardedModel, ValueError | None]:
        """The model under ``plan``; or under the one that it had, and why it cannot run under ``plan``.

        Args:
            plan: The plan.
            backwards: What backwards may do.
            computation: How it computes beside the plan.
        """
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._go_on(plan, backwards, computation)
        except BaseException as error:
            error.add_note(
                "This was in the midst of a switch: the model has no plan any more, here or on other ranks. "
                "Start the processes again from the last checkpoint."
            )
            raise

    def _go_on(
        self, plan: Plan, backwards: Backwards, computation: Computation
    ) -> tuple[ShardedModel, ValueError | None]:
        try:
            return self._apply(plan, backwards, computation), None
        except ValueError as error:  # raised on all ranks before anything is changed
            return self._apply(self._plan, backwards, computation), error

    def tell_left(self) -> None:
        """Warn of parameters of the last plan that something still refers to (an average of weights)."""
        gc.collect()
        left = [name for name, reference in self._left.items() if reference() is not None]
        if left and dist.get_rank() == 0:
            logger.warning(
                "%d parameters of the last plan are still referred to from outside (%s): their "
                "gradients are those of the parameters in their places, their values are refused, so that "
                "an average of weights has to be made again from model.parameters(); a loss that is kept "
                "refers to weights that run in slices",
                len(left),
                ", ".join([*left[:_NAMED], *["..."] * (len(left) > _NAMED)]),
            )

    def _apply(self, plan: Plan, backwards: Backwards, computation: Computation) -> ShardedModel:
        # What was made for the last plan refers to itself in circles, and would hold its values until then.
        gc.collect()
        applied = apply_sharding(
            self._model,
            plan,
            self._mesh,
            backwards=backwards,
            computation=computation,
            fill=self._fill,
            own_group=self._group,
        )
        for parameter in applied.parameters:
            before = self._paths[parameter.name]
            parameter.path.syncs = before.syncs
            parameter.path.divide_factor = before.divide_factor
            parameter.path.all_reduce_hook = before.all_reduce_hook
        applied.follow_settings()
        stored = {parameter.name: parameter.stored for parameter in applied.parameters}
        for optimizer in self._optimizers:
            optimizer.regroup(stored)
        # In the model's order: ranks may have a list of parameters, or of optimizers, in another one each.
        for name, laid_out in stored.items():
            for optimizer in self._optimizers:
                optimizer.lay_out(name, laid_out)
            if name in self._gradients:
                laid_out.grad = _laid_out(self._gradients.pop(name), laid_out)
                compute_as_whole(laid_out.grad)
        applied.remember_stepped(self._ever_stepped)
        applied.remember_trainable(self._trainable_at_first)
        return applied

    def _fill(self, owned: Mapping[str, ParameterSites]) -> None:
        for name, entry in owned.items():
            empty = entry.parameter
            value = _laid_out(self._values.pop(name), empty)
            entry.register(nn.Parameter(value, requires_grad=empty.requires_grad))


class _Detached:
    """An optimizer that is to have no parameters for a while, and its states by name."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        #: For each group the names of the model's parameters, and parameters of others.
        self._groups: list[list[str | torch.Tensor]] = []
        self._states: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            self._groups.append([names.get(id(parameter), parameter) for parameter in parameters])
        # Also of those that were taken out of its groups for a while.
        for parameter in [each for each in optimizer.state if id(each) in names]:
            self._states[names[id(parameter)]] = optimizer.state.pop(parameter)

    def let_go(self) -> None:
        """Leave it without parameters; called when all optimizers were looked at, which may share groups."""
        for group in self._optimizer.param_groups:
            group["params"].clear()

    def regroup(self, stored: Mapping[str, nn.Parameter]) -> None:
        """Give it the parameters ``stored``, by name."""
        for group, members in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = [stored[each] if isinstance(each, str) else each for each in members]

    def lay_out(self, name: str, parameter: nn.Parameter) -> None:
        """Give it the states of ``parameter``, if it has any, in its layout; all ranks call it."""
        if name not in self._states:
            return
        state = self._states.pop(name)

        def laid_out(value: torch.Tensor) -> torch.Tensor:
            return _laid_out(value, parameter) if value.shape == parameter.shape else value

        def of_key(key: str, value: Any) -> Any:
            # Also in tuples and dicts, as optimizers that keep several of a kind have them.
            return value if key in NUMBERS else tree_map_only(torch.Tensor, laid_out, value)

        self._optimizer.state[parameter] = {key: of_key(key, state.pop(key)) for key in list(state)}


def with_inner(given: Any) -> Iterator[Any]:
    """``given``, and the optimizers inside of it, as wrappers have (Accelerate's, Lightning's, Lookahead).

    Args:
        given: An optimizer, a wrapper that is none itself, which is left out, or anything else.
    """
    inner = getattr(given, "optimizer", None)
    has_inner = isinstance(inner, Optimizer)
    if isinstance(given, Optimizer) or not has_inner:
        yield given
    if has_inner:
        yield from with_inner(inner)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``value`` in the layout of ``like``, in memory that nothing else uses; all ranks call it.

    Args:
        value: A plain tensor that is the same on all ranks, or a DTensor.
        like: A plain tensor or a DTensor of the same shape, possibly on ``meta``.
    """
    value = value.detach()
    if not isinstance(like, DTensor):
        return _in_own_memory(value.full_tensor() if isinstance(value, DTensor) else value)
    if not isinstance(value, DTensor):
        local = part_for(like, value)
    elif (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
        local = value.to_local()
    else:
        local = part_for(like, value.full_tensor())
    return wrap_like(_in_own_memory(local.contiguous()), like)


def _in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy if ``tensor`` is a part of a larger one, which would otherwise stay."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
