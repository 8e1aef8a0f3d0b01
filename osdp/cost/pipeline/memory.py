"""Peak memory of a rank of a pipeline, by a walk over its actions in order.

======================  ==================================================================================
throughout              buffers, the batches of all microbatches, parameters and optimizer states of all
                        stages of the rank
from the first backward the gradients of a stage, accumulated in place
a microbatch            its inputs and activations, from its forward to the end of its backward
a backward in two parts the activations and, of every module with parameters, the gradient of its output, from
                        the first part to the end of the second
the last backward       the casts of a stage's gradients, where they are stored in another dtype; what they
                        leave is there for the rest of the step
messages                receive buffers of the next actions, the gradient that a backward starts from,
                        gradients whose send may not have completed
======================  ==================================================================================

The peak depends on the order alone, not on the duration of anything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from osdp.plan.schedule import AHEAD, Schedule
from osdp.plan.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on the rank that holds it, per microbatch unless stated otherwise.

    Attributes:
        base: Parameters, optimizer states and low-precision copies of parameters.
        gradients: Gradients left by the backwards of earlier microbatches.
        kept: Activations kept from a forward to its backward.
        forward: Peak of a forward beyond ``base``, including its activations.
        first_backward: Peak of the first backward beyond ``base``, including its gradients.
        backward: Peak of a later backward beyond ``base`` and ``gradients``.
        step: Peak of the optimizer step, including ``base`` and gradients.
        cast: Peak beyond ``base`` and ``gradients`` at the end of the last backward, when gradients are cast
            to the dtype that parameters are stored in.
        growth: By how much the last backward leaves more, or less, than ``gradients``.
        received: Inputs that come from other ranks.
        sent: Gradients that come back from other stages.
        returned: Gradients that go back to other ranks.
        captured: Gradients that wait for the second part of a backward, minus the activations that do not.
        input_pass: Peak of the first part of a backward beyond the activations; it frees none of them.
        largest_gradient: Gradient of the largest operator.
        splits: Whether its backward can be in two parts: gradients go to another stage.
        temporaries_add: Whether temporary tensors of the optimizer's step are those of all its parameters.
    """

    base: float
    gradients: float
    kept: float
    forward: float
    first_backward: float
    backward: float
    step: float
    cast: float = 0.0
    growth: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    returned: float = 0.0
    captured: float = 0.0
    input_pass: float = 0.0
    largest_gradient: float = 0.0
    splits: bool = True
    temporaries_add: bool = False

    @property
    def waiting(self) -> float:
        """Bytes that the first part of a backward leaves for the second, in addition to the activations."""
        return self.captured if self.splits else self.sent


@dataclass(frozen=True, slots=True)
class RankPeak:
    """Peak bytes of a rank, and the action at which they occur; ``None`` is the optimizer step."""

    nbytes: float
    action: Action | None


def rank_peak(
    schedule: Schedule, rank: int, stages: Sequence[StageMemory], resident: float, only: int | None = None
) -> RankPeak:
    """Peak memory of one rank.

    Args:
        schedule: The schedule.
        rank: Index of the rank.
        stages: Memory of each stage of the model.
        resident: Bytes that are always alive.
        only: The one stage to count; all of the rank if ``None``.
    """
    mine = schedule.stages_of(rank) if only is None else (only,)
    left = [stages[s].base + stages[s].gradients + max(stages[s].growth, 0.0) for s in mine]
    more = [stages[s].step - own for s, own in zip(mine, left, strict=True)]
    # One optimizer steps them all: what it takes for each parameter at once adds up over the stages.
    adds = any(stages[s].temporaries_add for s in mine)
    step = resident + sum(left) + (sum(max(each, 0.0) for each in more) if adds else max(more))
    # The optimizer step (above) runs after all actions; each action is checked with the buffers posted for
    # later ones.
    walk = _Walk(schedule, stages, resident + sum(stages[s].base for s in mine))
    order = [action for action in schedule.orders[rank] if action.stage in mine]
    last = {action.stage: action for action in order if action.kind.leaves_gradients}
    peaks = [RankPeak(step, None)]
    for at, action in enumerate(order):
        posted = walk.posted(order[at + 1 : at + 1 + AHEAD])
        peaks.append(RankPeak(posted + walk.run(action, is_last=last.get(action.stage) == action), action))
    return max(peaks, key=lambda peak: peak.nbytes)


class _Walk:
    """Bytes held by a rank, updated action by action."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageMemory], held: float) -> None:
        self._schedule = schedule
        self._stages = stages
        self._held = held
        self._forwards: Counter[int] = Counter()
        self._returned: Counter[int] = Counter()
        #: Stages whose gradients exist.
        self._begun: set[int] = set()

    def posted(self, actions: Iterable[Action]) -> float:
        """Receive buffers of the given later actions."""
        return sum(
            self._stages[a.stage].received if a.kind is ActionKind.FORWARD else self._stages[a.stage].sent
            for a in actions
            if a.kind is not ActionKind.BACKWARD_WEIGHT
        )

    def run(self, action: Action, *, is_last: bool) -> float:
        """Peak bytes of ``action``, without the buffers of later ones; updates what is held.

        Args:
            action: The next action.
            is_last: Whether it is the last of its stage that leaves gradients.
        """
        stage = self._stages[action.stage]
        waiting = self._waiting()
        match action.kind:
            case ActionKind.FORWARD:
                peak = self._held + stage.received + stage.forward
                self._held += stage.received + stage.kept
                self._forwards[action.stage] += 1
            case ActionKind.BACKWARD:
                # Its own activations are held already, and part of what it needs.
                peak = self._held + stage.sent + self._needed(action.stage) - stage.kept
                self._held -= stage.kept
                peak = max(peak, self._leave_gradients(action.stage, is_last=is_last))
                self._held -= stage.received
                self._returned[action.stage] += 1
            case ActionKind.BACKWARD_INPUT:
                # Where no gradient goes back, the second part does all the work, from the gradients that
                # came.
                peak = self._held + stage.sent + (stage.input_pass if stage.splits else 0.0)
                self._held += stage.waiting
                self._returned[action.stage] += 1
            case ActionKind.BACKWARD_WEIGHT:
                peak = self._held + self._needed_for_weights(action.stage)
                self._held -= stage.kept + stage.waiting
                peak = max(peak, self._leave_gradients(action.stage, is_last=is_last))
                self._held -= stage.received
        return peak + waiting

    def _needed(self, stage: int) -> float:
        """Bytes that a backward needs beyond what is held, including its own activations."""
        memory = self._stages[stage]
        return memory.backward if stage in self._begun else memory.first_backward

    def _needed_for_weights(self, stage: int) -> float:
        memory = self._stages[stage]
        if not memory.splits:
            return self._needed(stage) - memory.kept
        # Captured gradients are freed as the weights' gradients appear, module by module.
        left = 0.0 if stage in self._begun else max(memory.gradients - memory.captured, 0.0)
        return left + memory.largest_gradient

    def _leave_gradients(self, stage: int, *, is_last: bool) -> float:
        """End the backward of a microbatch; returns the peak of the casts behind the last."""
        memory = self._stages[stage]
        if stage not in self._begun:
            self._begun.add(stage)
            self._held += memory.gradients
        if not is_last:
            return 0.0
        peak = self._held + memory.cast
        self._held += memory.growth
        return peak

    def _waiting(self) -> float:
        """Gradients being sent: the last one, and all that the previous stage may not have received yet.

        The previous stage has begun at least as many forwards as this one, and no more of them wait for a
        gradient than are in flight there; it has posted the receive of one later gradient.
        """
        total = 0.0
        for stage, count in self._returned.items():
            if self._stages[stage].returned:
                asked = self._forwards[stage] - self._schedule.in_flight(stage - 1) + 1
                total += self._stages[stage].returned * max(count - max(asked, 1), 1)
        return total
