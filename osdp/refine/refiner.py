"""Refining a plan while it trains: steps are recorded, the plan is searched again, and the model switches.

::

    2 steps to settle | 4 recorded | ranks compare, rank 0 searches | switch or end | 2 steps to settle | ...

Steps between which the batch has changed are recorded once more. All ranks do the same at the same step. A
plan that turns out slower than the one before is left again, for good if that one is still the faster one: a
machine may have become slower meanwhile.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch.optim import Optimizer

from osdp.comm.objects import is_first, on_first_rank
from osdp.errors import InfeasibleError
from osdp.explain.rebuild import basis_of
from osdp.explain.scaling import profile_at_batch
from osdp.model.training import Training
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.refine.checks import Refinable
from osdp.refine.combined import combined, step_seconds
from osdp.refine.corrections import leaves_activations_alone
from osdp.refine.link_times import LinkKey
from osdp.refine.measurement import StepMeasurement
from osdp.refine.next_plan import LEAST_GAIN, NextPlan, next_plan
from osdp.refine.refinement import Refinement
from osdp.refine.segment_profiles import with_measured_memory
from osdp.refine.stretches import stretches_of
from osdp.runtime.microbatch import shape_of_sample
from osdp.runtime.ranks.control import Control, LockstepError
from osdp.runtime.step_recorder import RecordedStep, StepRecorder
from osdp.text import format_seconds
from osdp.torch_private.compiling import not_compiled

logger = logging.getLogger(__name__)

#: Steps of a plan that make what is made once, and those after them that are recorded.
SETTLING, RECORDED = 2, 4
#: Times that steps are recorded at most, but for once more where a plan was left again or the batch changed;
#: after the last the plan is left only for one that was faster, or if it does not fit.
ROUNDS = 4
#: Steps that a faster plan has to earn its switch in, where nobody says how many there are.
HORIZON = 1000
#: Forwards after which an optimizer should have stepped, where a step has a single one; and steps of another
#: after which the one that marked the steps has stopped: a GAN's critic makes several for one generator step.
_PATIENCE = 50

_IN_STEP = "forwards run inside of optimizer.step(closure)"


class Refiner:
    """Refines the plan of a model, step by step.

    Args:
        model: The model.
        optimizers: All that step on it, the first of which marks the steps; if empty, or where others step in
            its place, those that do.
        steps: Steps that are left to train; ``None`` if nobody has said.
        keeps: Whether to keep the plan, and only tell what another would win.

    Attributes:
        result: What was found, once it is.
    """

    def __init__(
        self, model: Refinable, optimizers: Sequence[Optimizer], steps: int | None, *, keeps: bool
    ) -> None:
        self.result: Refinement | None = None
        self._model, self._steps_left, self._keeps = model, steps, keeps
        #: Those that are followed, the first of which marks the steps.
        self._followed: list[weakref.ref[Optimizer]] = []
        #: How often others have stepped since that one, the last one last.
        self._others: dict[weakref.ref[Optimizer], int] = {}
        #: The plan that it knows the model to run under.
        self._plan = self._first_plan = model.plan
        self._thought = basis_of(model.plan)
        self._basis, self._known = self._thought, frozenset[LinkKey]()
        self._recorder: StepRecorder | None = None
        self._steps = self._steps_at_start = self._switches = self._round = 0
        #: Plans that fit, and the seconds of their steps, of one batch.
        self._measured: list[tuple[Plan, float]] = []
        #: The plan that turned out slower, and its seconds, until the one before it is measured again.
        self._left_again: tuple[Plan, float] | None = None
        self._batch = (0, 0)
        #: Why the model may not switch by itself; empty if it may.
        self._why_not_switch = ""
        #: Samples of the largest microbatch that was planned for or seen.
        self._most = model.plan.local_batch
        self._seconds_before = 0.0
        #: Forwards that have waited for the next step, and the most that have for an earlier one.
        self._forwards = self._usual_forwards = 0
        self._has_told = False
        #: Forwards at which the plan was not refined, by the reason.
        self._held_up: Counter[str] = Counter()
        #: Whether steps are recorded once more, since the batch changed between them.
        self._again = False
        self._follows_plan = False
        if hooked := _with_hooks(optimizers):
            # Wrappers, too, go along when the plan is switched: some keep states of their own.
            followed = [*hooked, *(each for each in optimizers if each not in hooked)]
            self._followed = [weakref.ref(each) for each in followed]

    @property
    def _optimizers(self) -> list[Optimizer]:
        """Those of the followed that are not gone, which may be others on each rank."""
        return [each for reference in self._followed if (each := reference()) is not None]

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step over the model.

        Which optimizer marks them is decided by steps, which all ranks make alike: one that has stopped may
        live on on some of them alone, such as in a logger.
        """
        if self.result is not None:
            return
        if self._followed and self._followed[0]() is optimizer:
            self._steps += 1
            self._usual_forwards = max(self._usual_forwards, self._forwards)
            self._forwards = 0
            self._others.clear()
        else:
            reference = weakref.ref(optimizer)
            self._others[reference] = self._others.pop(reference, 0) + 1

    @not_compiled
    def before_forward(self, scheduled: int = 0, *, follows_plan: bool = False) -> None:
        """Go on at the beginning of a step; called before every forward.

        Args:
            scheduled: Microbatches that ``train_step`` is about to run; 0 in a loop of one's own.
            follows_plan: Whether that loop reduces gradients when the plan says.
        """
        self._follows_plan |= follows_plan
        if self.result is not None or not torch.is_grad_enabled():
            return
        if self._recorder is not None:
            self._recorder.scheduled = scheduled
        if self._model.plan is not self._plan:
            self._begin_again()
            if self.result is not None:
                return
        self._follow_others()
        if not self._followed:
            self._wait_for_step()
            return
        if self._model._applied.sharded.trains_others:
            # What a step takes while a part is frozen says nothing of those that the plan is for.
            self.pause()
            self._steps_at_start = self._steps
            self._tell_of("other parameters are trained than when the model was wrapped")
            return
        settled = self._steps - self._steps_at_start >= SETTLING
        if self._recorder is None:
            goes_on = self._followed[0]() is not None
        else:
            goes_on = len(self._recorder.steps) >= RECORDED
        if not settled or not goes_on:
            self._wait_for_step()
            return
        if (waiting_for := self._waiting_for()) is not None:
            self._tell_of(waiting_for)
        elif self._recorder is None:
            desc, optimizers = self._basis.model_desc, _with_hooks(self._optimizers)
            ends = [each.module for each in stretches_of(desc) if each.module]
            opaque = [each.name for each in desc.opaque]
            estimated = not all(profile.measured for profile in self._basis.profiles)
            counts = estimated and leaves_activations_alone(self._plan, desc)
            self._recorder = StepRecorder(
                self._model._applied.sharded, ends, optimizers, opaque, counts=counts
            )
            self._recorder.scheduled = scheduled
        else:
            self._recorder.close()
            recorded, self._recorder = self._recorder.steps[-RECORDED:], None
            self._decide(recorded)

    @property
    def _left(self) -> int:
        """Steps in which a faster plan is to earn its switch."""
        return HORIZON if self._steps_left is None else max(self._steps_left - self._steps, 0)

    def _waiting_for(self) -> str | None:
        """What has to come before the model is between two steps; ``None`` if it is."""
        if self._model._optimizer_check.is_in_step:
            return _IN_STEP
        sharded = self._model._applied.sharded
        if sharded.gathering.keys() - sharded.ever_stepped:
            # It is not known, and what it has kept since it was made would stay with the plan before.
            return "gradients are gathered for an optimizer that has not stepped yet"
        return sharded.waiting_for

    def _tell_of(self, waiting_for: str) -> None:
        """Say once what plans are not refined for."""
        self._held_up[waiting_for] += 1
        if self._held_up[waiting_for] == _PATIENCE and is_first():
            logger.warning(
                "the plan has not been refined for %d forwards, because %s%s",
                _PATIENCE,
                waiting_for,
                ": call model.begin_step() before each step" if waiting_for == _IN_STEP else "",
            )

    def pause(self) -> None:
        """Record no more of the plan that runs: it is left, or somebody else refines it."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def stop(self) -> None:
        """Do nothing any more, and hold nothing."""
        self.pause()
        self._followed.clear()
        self._others.clear()
        self._measured.clear()

    def _begin_again(self) -> None:
        """Go on from the plan that somebody has switched to by hand, which is kept as one that was given."""
        self._plan, self._keeps, self._steps_at_start, self._round = self._model.plan, True, self._steps, 0
        self._again, self._left_again = False, None
        self._measured.clear()
        try:
            self._basis, self._known = basis_of(self._plan), frozenset()
        except ValueError as error:
            self._end(self._seconds_before, f"the model was switched by hand, and is not timed: {error}")
            return
        # Its batch, and so its segments, may be others.
        self._thought, self._first_plan = self._basis, self._plan
        self._batch, self._seconds_before = (0, 0), 0.0

    def _follow_others(self) -> None:
        """Follow those that step, where none is followed, or the one that marked the steps has stopped."""
        most = max(self._others.values(), default=0)
        if most < (_PATIENCE if self._followed else 1):
            return
        self.pause()
        # First the one that steps most often; of several, the one that steps last.
        self._followed = sorted(reversed(self._others), key=self._others.__getitem__, reverse=True)
        self._others = {}
        self._usual_forwards, self._forwards = max(self._usual_forwards, self._forwards // most), 0
        self._steps += most
        self._steps_at_start = self._steps - 1

    def _wait_for_step(self) -> None:
        """Say once if no optimizer steps."""
        self._forwards += 1
        usual = max(self._usual_forwards, self._plan.training.microbatches)
        if self._has_told or self._forwards < _PATIENCE * usual:
            return
        self._has_told = True
        if is_first():
            logger.warning(
                "the plan is not refined: after %d forwards %s has stepped on this model; call "
                "model.refine(optimizer)",
                self._forwards,
                "neither the optimizer that marked the steps nor another one"
                if self._followed
                else "no optimizer of torch.optim",
            )

    def _decide(self, recorded: list[RecordedStep]) -> None:
        plan, group = self._model.plan, self._model._applied.mesh.get_group()
        # What the optimizer does decides how much memory plans have to leave.
        plan = replace(
            plan,
            training=as_stepped(
                plan.training,
                _with_hooks(self._optimizers),
                [each for each in self._model._applied.stored_parameters() if each.requires_grad],
            ),
        )
        everyone = self._of_all_ranks(recorded)
        if not everyone:
            self._steps_at_start = self._steps
            return
        shapes = {shape for steps in everyone for step in steps for shape in step.shapes}
        if not self._again and (
            len(shapes) > 1 or any(len({step.batch for step in steps}) > 1 for steps in everyone)
        ):
            self._again, self._steps_at_start = True, self._steps - SETTLING
            return
        self._again = False
        if (fault := _shape_fault(shapes, plan)) is not None:
            self._end(median(step_seconds(everyone)), fault, level=logging.WARNING)
            return
        seconds = median(step_seconds(everyone))
        try:
            measured = combined(everyone, plan, follows_plan=self._follows_plan)
            keeps_more = _keeps_more(measured, self._basis)
        except Exception as error:  # on all ranks, of what all have gathered: the training goes on
            fault = f"steps do not compare: {type(error).__name__}: {error}"
            self._end(seconds, fault, level=logging.WARNING)
            return
        self._most = max(self._most, measured.local_batch)
        batch = measured.local_batch, measured.microbatches
        if batch != self._batch:
            # Longer steps do not make a plan the slower one.
            self._measured.clear()
            self._left_again = None
            self._batch, self._seconds_before = batch, 0.0
        self._measured.append((self._model.plan, seconds))
        if self._model.plan is self._first_plan:
            self._seconds_before = self._seconds_before or seconds
        self._round += 1
        margin = 1 + max(LEAST_GAIN, measured.spread)
        if keeps_more:
            # Whether plans fit comes first.
            self._left_again = None
            self._measured = self._measured[-1:]
        if self._left_again is not None:
            self._compare_again(*self._left_again, seconds, margin)
            return
        before, fastest = min(self._measured, key=lambda each: each[1])
        if seconds > margin * fastest:
            self._left_again = self._model.plan, seconds
            self._switch(before, seconds)
            return

        other = on_first_rank(partial(self._search, plan, measured), group)
        if isinstance(other, str):
            self._end(seconds, other, level=logging.WARNING)
        elif other.in_doubt and self._round < ROUNDS:
            # These steps decide nothing, and nothing is corrected by them: others are recorded.
            self._measured.pop()
            self._steps_at_start = self._steps - SETTLING
        else:
            self._take(other, seconds)

    def _search(self, plan: Plan, measured: StepMeasurement) -> NextPlan | str:
        """The next plan, or why there is none."""
        try:
            return next_plan(
                plan,
                self._basis,
                measured,
                steps_left=self._left,
                known_links=self._known,
                most=self._most,
                tries=self._switches == 0 and not self._keeps,
            )
        except InfeasibleError as error:
            return f"under what was measured no plan fits: {error}"
        except Exception as error:  # whatever it is, the training goes on
            return f"plans cannot be searched: {type(error).__name__}: {error}"

    def _compare_again(self, other: Plan, seconds: float, now: float, margin: float) -> None:
        """End: stay, unless the other plan was no slower than this one is now.

        Args:
            other: The plan that was left again.
            seconds: What its steps took.
            now: What steps take under the plan before it.
            margin: By how much steps differ, a factor.
        """
        if seconds > margin * now:
            taken, again = format_seconds(seconds), format_seconds(now)
            self._end(
                now, f"the plan that was tried took {taken}, and the one before, measured again, {again}"
            )
        elif self._switch(other, now):
            taken, again = format_seconds(seconds), format_seconds(now)
            self._end(seconds, f"the plan before, measured again, takes {again}, and this one took {taken}")

    def _of_all_ranks(self, recorded: list[RecordedStep]) -> list[list[RecordedStep]]:
        """What each rank has recorded; nothing if the optimizer that marked the steps is gone on one of them.

        Notes why the model may not switch by itself.

        The model under its plan is kept by no caller: a switch is to free it.
        """
        sharded, what = self._model._applied.sharded, "the refinement of the plan"
        # Where it is gone, another may hold the parameters without having stepped: a switch would not know.
        found = [
            (
                recorded,
                sharded.has_users_hooks,
                sharded.has_zeroed_gradients,
                self._followed[0]() is not None,
            )
        ]
        control = Control.over(sharded.mesh)
        if control is not None:
            sharded.meet(what)
            found = control.gather(found[0], what)
        everyone, hooked, zeroed, goes_on = zip(*found, strict=True)
        self._why_not_switch = ""
        if any(hooked):
            self._why_not_switch = "parameters have hooks of yours, which may know them by identity"
        elif all(zeroed):  # a rank may hold empty shards
            self._why_not_switch = "gradients are zeroed in place, so that a list of yours may refer to them"
        return list(everyone) if all(goes_on) else []

    def _take(self, found: NextPlan, seconds: float) -> None:
        """Go on under what was found, or end."""
        self._basis, self._known = found.basis, found.known_links
        tried = any(found.plan.sharding.decided == other.sharding.decided for other, _ in self._measured)
        is_last = self._round >= ROUNDS
        if found.takes and self._keeps:
            wins = f"another would be {1 - found.then / found.now:.1%} faster" if found.fits else found.reason
            self._end(seconds, f"the plan was given, and is kept: {wins}")
        elif not found.takes:
            self._end(seconds, found.reason)
        elif found.fits and (tried or is_last):
            gain = f"another plan is predicted to be {1 - found.then / found.now:.1%} faster"
            why = "has been tried" if tried else "steps have been recorded often enough"
            self._end(seconds, f"{gain}, but {why}")
        elif found.fits:
            self._switch(found.plan, seconds)
        else:
            self._measured.clear()  # there is no way back
            if self._switch(found.plan, seconds) and is_last:
                self._end(found.then, f"{found.reason}; the seconds of the last plan are predicted")

    def _switch(self, plan: Plan, seconds: float) -> bool:
        """Switch to ``plan``, or end; whether it was done."""
        if self._why_not_switch:
            self._end(
                seconds,
                f"{self._why_not_switch}, and a switch makes others: the plan is kept; "
                "model.switch(plan, optimizers) goes on under another",
                level=logging.WARNING,
            )
            return False
        # Some may not have stepped when the first were found.
        stepped = self._model._optimizer_check.optimizers
        others = [each for each in stepped if all(each is not mine for mine in self._optimizers)]
        try:
            self._model.switch(plan, [*self._optimizers, *others])
        except LockstepError:  # a rank is gone, or has failed
            raise
        except (ValueError, RuntimeError) as error:  # on all ranks
            if "_applied" not in vars(self._model):
                raise
            # Nothing was changed, or the plan before was applied again.
            self._plan = self._model.plan
            self._end(seconds, f"the model could not switch: {error}", level=logging.WARNING)
            return False
        self._plan = self._model.plan
        self._switches += 1
        self._steps_at_start = self._steps
        return True

    def _end(self, seconds: float, reason: str, *, level: int = logging.INFO) -> None:
        self.stop()
        self.result = Refinement(
            before=self._first_plan,
            after=self._model.plan,
            thought=self._thought,
            found=self._basis,
            steps=self._steps,
            switches=self._switches,
            batch=self._batch,
            seconds_before=self._seconds_before,
            seconds_after=seconds,
            reason=reason,
        )
        if is_first():
            logger.log(level, "%s", self.result)


def _with_hooks(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Those whose steps torch tells hooks of: wrappers such as Accelerate's leave that to the one inside."""
    return [each for each in optimizers if getattr(type(each).step, "hooked", False)]


def _keeps_more(measured: StepMeasurement, basis: Basis) -> bool:
    """Whether opaque modules keep more than was thought."""
    if not measured.opaque:
        return False
    desc, near = basis.model_desc, basis.profile_near(measured.local_batch)
    try:
        thought = profile_at_batch(near, desc, measured.local_batch)
    except ValueError:  # which ends the refinement where plans are searched
        return False
    return with_measured_memory(thought, desc, measured.opaque) != thought


def _shape_fault(shapes: Collection[tuple[int, ...]], plan: Plan) -> str | None:
    """Why steps of samples of these shapes say nothing of a plan; ``None`` if they do."""
    planned = {shape_of_sample(shape, plan.local_batch) for shape in plan.batch_shapes}
    if len(shapes) > 1:
        return f"samples of {len(shapes)} shapes were seen, whose times do not compare: plan with a BatchMix"
    if planned and set(shapes) - planned:
        seen, expected = (" and ".join(map(str, sorted(each))) for each in (shapes, planned))
        return f"samples have shape {seen}, and the plan was made for {expected}: plan with such a batch"
    return None


def as_stepped(
    training: Training, optimizers: Sequence[Optimizer], trained: Sequence[torch.Tensor]
) -> Training:
    """``training`` with the only optimizer that steps, as it is; of several, or unknown ones, as planned.

    One that steps on a part of what is trained says nothing of what the rest will need.
    """
    if len(optimizers) != 1 or training.matrix_optimizer is not None:
        return training
    stepped = {id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]}
    if any(id(parameter) not in stepped for parameter in trained):
        return training
    try:
        return Training.from_optimizer(
            optimizers[0],
            param_dtype=training.param_dtype,
            reduce_dtype=training.reduce_dtype,
            local_batch=training.local_batch,
            microbatches=training.microbatches,
        )
    except (TypeError, ValueError):
        return training
