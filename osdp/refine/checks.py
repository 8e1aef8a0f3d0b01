"""Checks that a model, its plan and its optimizers can be refined, on all ranks alike."""

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from osdp.comm.groups import device_of
from osdp.explain.rebuild import basis_of
from osdp.plan.plan import Plan
from osdp.runtime.optimizer.check import OptimizerCheck
from osdp.runtime.ranks.agreement import check_together
from osdp.runtime.ranks.control import Control
from osdp.runtime.running import RunningModel
from osdp.tracing.sample_batch import BatchMix

_CUT = "plans with stages or tensor parallelism cannot be refined while they train"


class Refinable(Protocol):
    """A wrapped model, as much of it as is needed here.

    Attributes:
        plan: The plan it runs under.
    """

    plan: Plan
    _applied: RunningModel
    _optimizer_check: OptimizerCheck

    def switch(self, plan: Plan, optimizer: Sequence[Optimizer]) -> None:
        """Go on under another plan."""


def check_can_refine(device: str, described: object, plan: Plan | None, *, is_cut: bool) -> None:
    """Raise where refining cannot be, before a model is measured and wrapped.

    Args:
        device: The type of device that it runs on.
        described: What it is described with.
        plan: A finished plan for it, if there is one.
        is_cut: Whether it is cut into stages, or its layers are shared by tensor-parallel ranks.

    Raises:
        ValueError: Steps on such devices are not timed, or such a plan is not searched again.
    """
    if is_cut:
        raise ValueError(f"{_CUT}: pass refine=False (start='estimated' turns it on)")
    _check_timed(device)
    if isinstance(described, BatchMix):
        raise ValueError(
            "refining compares steps of one shape, and a BatchMix has several: pass refine=False, or the "
            "largest batch"
        )
    if plan is not None:
        basis_of(plan)


def check_all_refine(mesh: DeviceMesh, *, refines: bool) -> None:
    """Raise on all ranks unless all of them refine the plan, or none.

    Raises:
        ValueError: Some do.
    """
    control = Control.over(mesh)
    if control is not None and not control.agree(refines, "whether the other ranks refine the plan"):
        raise ValueError("ranks differ in refine=: pass the same on all of them")


def _check_timed(device: str) -> None:
    if device != "cpu":
        raise ValueError(
            "refine times collectives that the host waits for, as gloo's are; on accelerators pass "
            "refine=False (start='estimated' turns it on), and call model.switch(plan, optimizer) with one "
            "of osdp.what_if"
        )


def check_refinable(model: Refinable) -> None:
    """Raise unless plans like the one of ``model`` can be refined.

    Raises:
        ValueError: Nothing can be timed, or the plan cannot be searched again.
    """
    _check_timed(device_of(model._applied.mesh).type)
    basis_of(model.plan)


def check_refine(
    model: Refinable, optimizers: Sequence[object], stepped: Sequence[Optimizer], steps: int | None
) -> None:
    """Raise on all ranks unless ``model`` can be refined.

    Raises:
        TypeError: What is given is no optimizer of torch.
        ValueError: The plan cannot be searched again, or an optimizer is missing.
        RuntimeError: The model is cut, or not between two steps.
    """
    if not model.plan.is_whole:  # on all ranks
        raise RuntimeError(f"{_CUT}: save a checkpoint, and load it into the model under another plan")

    def check() -> None:
        applied = model._applied
        strange = [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]
        if strange or not optimizers:
            raise TypeError(
                "refine times the steps of optimizers of torch.optim and takes their states along: pass the "
                f"model's, not {', '.join(strange) or 'none'}"
            )
        mine = {id(parameter) for parameter in applied.stored_parameters()}
        given = [each for each in optimizers if isinstance(each, Optimizer)]
        idle = [
            each for each in given if not any(id(p) in mine for g in each.param_groups for p in g["params"])
        ]
        if idle:
            raise ValueError(
                f"{type(idle[0]).__name__} has no parameter of this model: pass the optimizer that was made "
                "from model.parameters()"
            )
        if any(all(each is not other for other in given) for each in stepped):
            raise ValueError("an optimizer that has trained this model was left out: pass all of them")
        check_refinable(model)
        if steps is not None and steps < 1:
            raise ValueError(f"steps are those that are left to train, at least 1, not {steps}")
        waiting = applied.sharded.waiting_for
        if waiting is not None:
            raise RuntimeError(f"refine is called between two steps, but {waiting}")

    control = Control.over(model._applied.mesh)
    check_together(control, check, "model.refine() of all ranks")
    if control is not None and not control.agree(steps, "the ranks to begin to refine the plan"):
        raise ValueError("ranks that refine together need the same number of steps left")
