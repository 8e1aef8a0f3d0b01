"""Execution of a pipeline schedule: this rank's forwards and backwards in order, with messages overlapped.

A rank that fails goes on through its schedule without computing: it takes what is sent to it, and sends
zeros. So no rank waits for another forever, on any backend, and nothing is in flight when all of them raise,
at the end of the step.

``torch.distributed.pipelining`` has an engine too. Its stages communicate with their neighbours only, in
shapes fixed at the first step; here a value goes to whichever stage needs it, tied weights have copies in
several stages, and batch and sequence length may change from step to step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from osdp.model.dataflow import Transfer
from osdp.plan.plan import Plan
from osdp.plan.schedule import AHEAD, Action, ActionKind, Schedule
from osdp.runtime.losses import LossFn, LossSum, loss_parts
from osdp.runtime.microbatch import Microbatch
from osdp.runtime.pipeline import received_gradients
from osdp.runtime.pipeline.channels import Channel
from osdp.runtime.pipeline.messenger import FailedPeerError, MessageKey, MessageSpecs, Messenger
from osdp.runtime.pipeline.split_backward import WeightPass, backward_inputs
from osdp.runtime.ranks.shared_faults import raise_together
from osdp.runtime.stages import RunningStage, Stage, StageOutput
from osdp.runtime.token_slices.kv_prefix import KeyValues, Prefix


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """Reductions of gradients in addition to the one at the end of a step.

    Attributes:
        microbatches: Whether to reduce after every microbatch.
        slices: Whether to reduce after every token slice, where sequences are sliced.
    """

    microbatches: bool = False
    slices: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "ReductionPolicy":
        """As planned; token slices keep no whole gradients where the plan keeps none."""
        parts = [stage.sharding for stage in plan.stages]
        microbatches = plan.training.microbatches
        each = microbatches > 1 and any(part.reduce_each_microbatch for part in parts)
        sharded = any(unit.mode.sharded for part in parts for unit in part.units)
        return cls(each, slices=sharded and (each or microbatches == 1))


@dataclass(slots=True)
class _InFlight:
    """A microbatch, or a token slice of it, between its forward and its backward on one stage.

    Attributes:
        received: Received tensors, one for each incoming transfer.
        sent: Sent tensors, one for each outgoing transfer.
        keys: The cached keys and values of a token slice.
        loss: The sum of its loss, in the last stage.
        weights: The second part of a split backward, after the first.
    """

    received: list[torch.Tensor]
    sent: tuple[torch.Tensor, ...]
    keys: KeyValues | None = None
    loss: torch.Tensor | None = None
    weights: WeightPass | None = None


@dataclass
class StageStep:
    """The settings and the state of one step.

    Attributes:
        schedule: The order of its actions.
        microbatches: Microbatches or token slices, by their index in actions.
        loss_fn: The loss function.
        losses: The sum of the losses so far.
        trains: Whether there are backwards.
        empty: Creates a stage's empty key-value cache, with token slices.
        outputs: The model's outputs by microbatch, where they are kept.
        flights: Microbatches between forward and backward, by stage and index.
        prefixes: Token slices that share a cache, by stage and microbatch.
    """

    schedule: Schedule
    microbatches: Sequence[Microbatch] | Mapping[int, Microbatch]
    loss_fn: LossFn | None
    losses: LossSum
    trains: bool
    empty: Callable[[], KeyValues] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    flights: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    prefixes: dict[tuple[int, int], Prefix] = field(default_factory=dict)

    def prefix(self, action: Action) -> Prefix | None:
        """The token slices of an action's microbatch on its stage; ``None`` if sequences are not sliced."""
        if self.empty is None:
            return None
        key = (action.stage, action.microbatch // self.schedule.num_slices)
        if key not in self.prefixes:
            self.prefixes[key] = Prefix(self.empty())
        return self.prefixes[key]

    def begins(self, action: Action) -> bool:
        """Whether an action is on the first token slice of sequences, which comes last in backward."""
        return action.microbatch % self.schedule.num_slices == 0


class Pipeline:
    """The stages of this rank.

    Args:
        stages: The stages of this rank, by index.
        transfers: All transfers of the pipeline.
        group: The ranks of this pipeline, in order; ``None`` if there is one.
        device: This rank's device.
        channels: Communicators between stages, where a backend needs several.
        reduces: Reductions of gradients in addition to the one at the end of the step.

    Attributes:
        stages: The stages of this rank, by index.
        mail: Messages to and from other ranks.
        rank: This rank's position in the pipeline.
        num_transfers: Number of transfers, each with two messages per microbatch: a value and its gradient.
    """

    def __init__(
        self,
        stages: Mapping[int, RunningStage],
        transfers: Sequence[Transfer],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        channels: Mapping[Channel, dist.ProcessGroup] | None = None,
        reduces: ReductionPolicy = ReductionPolicy(),
    ) -> None:
        self.stages = dict(stages)
        self._number = {transfer: index for index, transfer in enumerate(transfers)}
        self.num_transfers = len(transfers)
        self.mail = Messenger(group, device, channels)
        self.rank = group.rank() if group is not None else 0
        self._others = group if group is not None and group.size() > 1 else None
        self._device = device
        self._reduces = reduces

    def train(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn | None,
        empty: Callable[[], KeyValues] | None = None,
    ) -> LossSum:
        """Compute gradients of the sum of all losses; returns the losses of this rank's microbatches.

        Args:
            schedule: The order of forwards and backwards.
            microbatches: All microbatches, or all token slices of all microbatches.
            loss_fn: The loss function.
            empty: Creates a stage's empty key-value cache, with token slices.
        """
        step = StageStep(schedule, microbatches, loss_fn, LossSum(self._device), True, empty)
        with torch.enable_grad():
            self._run(step)
        return step.losses

    def evaluate(
        self, schedule: Schedule, microbatches: Sequence[Microbatch], loss_fn: LossFn | None
    ) -> LossSum:
        """The losses of this rank's microbatches, without gradients."""
        step = StageStep(schedule, microbatches, loss_fn, LossSum(self._device), False)
        with torch.no_grad():
            self._run(step)
        return step.losses

    def predict(self, schedule: Schedule, microbatches: Sequence[Microbatch]) -> list[Any]:
        """The outputs of all microbatches on the rank of the last stage; empty on the others."""
        step = StageStep(schedule, microbatches, None, LossSum(self._device), False)
        with torch.no_grad():
            self._run(step, keep=True)
        return [step.outputs[index] for index in sorted(step.outputs)]

    @property
    def message_specs(self) -> MessageSpecs:
        """Shape and dtype of each kind of message so far."""
        return self.mail.specs

    @property
    def _training(self) -> bool:
        return next(iter(self.stages.values())).stage.model.training

    def _run(self, step: StageStep, *, keep: bool = False) -> None:
        order = step.schedule.orders[self.rank]
        perform: dict[ActionKind, Callable[[StageStep, Action], None]] = {
            ActionKind.FORWARD: self._evaluate if not step.trains else self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
        }
        if keep:
            perform[ActionKind.FORWARD] = self._predict
        at = 0
        fault: Exception | None = None
        try:
            try:
                for at, action in enumerate(order):
                    # Receives of the next actions are posted before this one computes.
                    for later in order[at : at + 1 + AHEAD]:
                        self.expect(step, later)
                    perform[action.kind](step, action)
            except Exception as error:
                fault = error
                self._drop(step, error)
                self.pass_over(step, order[at:], error)
            self.mail.finish()
            self.share(step, fault)
        except BaseException:
            self.mail.reset()
            raise
        finally:
            fault = None  # its traceback holds this frame

    # Faults

    def pass_over(self, step: StageStep, actions: Sequence[Action], fault: Exception) -> None:
        """Exchange the messages of ``actions`` without running them, so that no other rank waits for them.

        Raises:
            Exception: ``fault``, for which they are passed over, if the connection to another rank is lost.
        """
        placement = step.schedule.placement
        try:
            for action in actions:
                if action.kind is ActionKind.BACKWARD_WEIGHT:
                    continue
                stage, back = self.stages[action.stage].stage, action.kind is not ActionKind.FORWARD
                taken, given = (stage.outgoing, stage.incoming) if back else (stage.incoming, stage.outgoing)
                for transfers, sends in ((taken, False), (given, True)):
                    for transfer in transfers:
                        if back and not transfer.differentiable:
                            continue
                        peer = placement[transfer.source if sends is back else transfer.target]
                        address = self._address(step, transfer, action.microbatch, back=back)
                        self.mail.pass_over(peer, address, sends=sends)
        except RuntimeError as lost:
            raise fault from lost

    def share(self, step: StageStep, fault: Exception | None) -> None:
        """Raise on all ranks of the pipeline what some have met in a step; a collective call at its end.

        Raises:
            Exception: ``fault``, if there is no other rank.
            RuntimeError: And others, as for :func:`osdp.runtime.ranks.shared_faults.raise_together`.
        """
        if self._others is None:
            if fault is not None:
                raise fault
            return
        failed = torch.tensor(float(fault is not None), device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._others)
        if not failed:
            return
        if fault is None:
            self._drop(step, None)
        # Who has only missed a message leaves it to the others to say why.
        told = None if isinstance(fault, FailedPeerError) else fault
        raise_together(
            told, "a rank of the pipeline failed, so that all of them drop this step", self._others
        )

    def _drop(self, step: StageStep, fault: Exception | None) -> None:
        """Let go of all that is left of a step which a rank of the pipeline has failed in.

        Args:
            step: The step.
            fault: What this rank has met; ``None`` if it was another.
        """
        step.flights.clear()
        step.prefixes.clear()
        step.outputs.clear()
        # An evaluation of a whole model leaves alone what a loop of the user's own has under way.
        if step.trains or self._others is not None:
            for running in self.stages.values():
                running.runtime.abandon(fault, drop_gradients=step.trains)

    # Messages

    def _address(self, step: StageStep, transfer: Transfer, microbatch: int, *, back: bool) -> MessageKey:
        # Autocast is part of the kind, as it changes the dtype of values for the same inputs, and so is the
        # mode, which may change their shapes.
        number = self._number[transfer]
        place = self._device.type
        autocast = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None
        kind = (number, back, step.microbatches[microbatch].signature, autocast, self._training)
        maker, taker = (transfer.target, transfer.source) if back else (transfer.source, transfer.target)
        places = step.schedule.places
        return MessageKey(
            2 * (microbatch * self.num_transfers + number) + back,
            kind,
            (maker, taker),
            places[not back, maker, microbatch],
            places[not back, taker, microbatch],
        )

    def expect(self, step: StageStep, action: Action) -> None:
        """Post the receives of an action."""
        stage = self.stages[action.stage].stage
        placement = step.schedule.placement
        if action.kind is ActionKind.FORWARD:
            for transfer in stage.incoming:
                address = self._address(step, transfer, action.microbatch, back=False)
                self.mail.expect(placement[transfer.source], address)
        elif action.kind is not ActionKind.BACKWARD_WEIGHT:
            for transfer in stage.outgoing:
                if transfer.differentiable:
                    address = self._address(step, transfer, action.microbatch, back=True)
                    self.mail.expect(placement[transfer.target], address)

    # Actions

    def run_stage(self, step: StageStep, action: Action) -> tuple[_InFlight, Any]:
        """Run a forward: receive from other stages, compute, send; the result is set in the last stage."""
        stage, microbatch = self.stages[action.stage].stage, step.microbatches[action.microbatch]
        placement = step.schedule.placement
        received = []
        for transfer in stage.incoming:
            address = self._address(step, transfer, action.microbatch, back=False)
            tensor = self.mail.take(placement[transfer.source], address)
            # A leaf of this stage's graph, whose gradient is what goes back.
            received.append(tensor.detach().requires_grad_(transfer.differentiable and step.trains))
        run = partial(_forward, stage, received, microbatch)
        prefix = step.prefix(action)
        keys, output = prefix.forward(run, microbatch.tokens) if prefix else (None, run({}))
        for transfer, tensor in zip(stage.outgoing, output.sent, strict=True):
            if step.trains and tensor.requires_grad and not transfer.differentiable:
                raise RuntimeError(
                    f"stage {action.stage} sends the input of {transfer.taken.module!r}, into which no "
                    "gradient flowed with the sample batch, so that none comes back: plan again with a batch "
                    "like this one"
                )
            address = self._address(step, transfer, action.microbatch, back=False)
            self.mail.send(tensor, placement[transfer.target], address)
        return _InFlight(received, output.sent, keys), output.result

    def _predict(self, step: StageStep, action: Action) -> None:
        _, result = self.run_stage(step, action)
        if self.stages[action.stage].stage.is_last:
            step.outputs[action.microbatch] = result

    def _evaluate(self, step: StageStep, action: Action) -> None:
        _, result = self.run_stage(step, action)
        if self.stages[action.stage].stage.is_last:
            self._loss(step, action, result)

    def _forward(self, step: StageStep, action: Action) -> None:
        flight, result = self.run_stage(step, action)
        if self.stages[action.stage].stage.is_last:
            flight.loss = self._loss(step, action, result)
        step.flights[action.stage, action.microbatch] = flight

    def _loss(self, step: StageStep, action: Action, result: Any) -> torch.Tensor:
        microbatch = step.microbatches[action.microbatch]
        total, count = loss_parts(result, microbatch.targets, microbatch.samples, step.loss_fn)
        step.losses.add(total, count)
        return total

    def _backward(self, step: StageStep, action: Action) -> None:
        flight = step.flights.pop((action.stage, action.microbatch))
        tensors, gradients = self._roots(step, action, flight)
        prefix = step.prefix(action)
        if prefix and flight.keys is not None:
            more = list(prefix.roots(flight.keys))
            tensors += [root for root, _ in more]
            gradients += [gradient for _, gradient in more]
            # Backward lets go of the gradients when it has used them.
            del more
            prefix.collect(flight.keys)
        with self._reducing(step, action):
            if tensors:
                received_gradients.backward(tensors, gradients)
        if prefix and step.begins(action):
            del step.prefixes[action.stage, action.microbatch // step.schedule.num_slices]
        self._send_back(step, action, [tensor.grad for tensor in flight.received], flight)

    def _backward_input(self, step: StageStep, action: Action) -> None:
        flight = step.flights[action.stage, action.microbatch]
        tensors, gradients = self._roots(step, action, flight)
        model = self.stages[action.stage].stage.model
        inputs = [tensor for tensor in flight.received if tensor.requires_grad]
        roots = list(zip(tensors, gradients, strict=True))
        found, flight.weights = backward_inputs(roots, inputs, list(model.parameters()))
        given = iter(found)
        self._send_back(
            step, action, [next(given) if t.requires_grad else None for t in flight.received], flight
        )
        # The second part begins at recorded gradients: what the first began at may be freed.
        flight.sent, flight.loss = (), None

    def _backward_weight(self, step: StageStep, action: Action) -> None:
        flight = step.flights.pop((action.stage, action.microbatch))
        assert flight.weights is not None
        with self._reducing(step, action):
            flight.weights.run()

    def _roots(
        self, step: StageStep, action: Action, flight: _InFlight
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The roots of a backward (the loss, sent tensors) with the gradients received for them."""
        tensors: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if flight.loss is not None and flight.loss.requires_grad:
            tensors.append(flight.loss)
            gradients.append(None)
        stage = self.stages[action.stage].stage
        for transfer, tensor in zip(stage.outgoing, flight.sent, strict=True):
            if not transfer.differentiable:
                continue
            address = self._address(step, transfer, action.microbatch, back=True)
            gradient = self.mail.take(step.schedule.placement[transfer.target], address)
            # Taken in any case: it was sent. A value may depend on nothing that is trained.
            if tensor.requires_grad:
                tensors.append(tensor)
                gradients.append(gradient)
        return tensors, gradients

    def _send_back(
        self, step: StageStep, action: Action, gradients: Sequence[torch.Tensor | None], flight: _InFlight
    ) -> None:
        stage = self.stages[action.stage].stage
        for transfer, gradient, tensor in zip(stage.incoming, gradients, flight.received, strict=True):
            if transfer.differentiable:
                address = self._address(step, transfer, action.microbatch, back=True)
                # The other side waits for a message, whatever became of the value here.
                given = torch.zeros_like(tensor) if gradient is None else gradient
                self.mail.send(given, step.schedule.placement[transfer.source], address)

    @contextmanager
    def _reducing(self, step: StageStep, action: Action) -> Iterator[None]:
        """Reduce the stage's gradients in the backward inside if it is its last, or if the policy says so."""
        running = self.stages[action.stage]
        last = _last_backward(step.schedule, self.rank, action.stage) == action
        each = self._reduces.slices if step.schedule.num_slices > 1 else self._reduces.microbatches
        running.runtime.set_requires_gradient_sync(last or each)
        # Of a whole model each backward that reduces ends as the last one does, and lets go of buffers.
        whole = step.schedule.num_stages == 1 and step.schedule.num_slices == 1
        running.runtime.set_is_last_backward(last or (each and whole))
        try:
            yield
        finally:
            running.runtime.set_requires_gradient_sync(True)
            # After an exception the next backward is the user's own.
            running.runtime.set_is_last_backward(True)


def _forward(
    stage: Stage, received: Sequence[torch.Tensor], part: Microbatch, more: dict[str, Any]
) -> StageOutput:
    return stage.forward(received, part.args, {**part.kwargs, **more})


def _last_backward(schedule: Schedule, rank: int, stage: int) -> Action:
    return next(
        action
        for action in reversed(schedule.orders[rank])
        if action.stage == stage and action.kind.leaves_gradients
    )
