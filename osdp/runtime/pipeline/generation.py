"""Autoregressive generation through a pipeline.

It runs as a forward in token slices with cached keys and values: the first slice is the prompt, each later
one a single token. Prompts pass through the stages in several groups. While one group's next token is chosen
on the last stage and sent to the first, other stages work on other groups::

    stage 0   A  B  A' B' .        A, B: forwards of two groups' prompts
    stage 1   .  A  B  A' B'       A', B': of their next tokens; the last stage sends tokens to all ranks
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from osdp.plan.schedule import Action, ActionKind, Schedule
from osdp.runtime.losses import LossSum
from osdp.runtime.microbatch import Microbatch
from osdp.runtime.pipeline.channels import tokens_channel
from osdp.runtime.pipeline.engine import Pipeline, StageStep
from osdp.runtime.pipeline.messenger import MessageKey
from osdp.runtime.token_slices.kv_prefix import KeyValues
from osdp.runtime.token_slices.slicing import MASK


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: how the next token is chosen, and which tokens end a sequence.

    Attributes:
        do_sample: Whether the token is sampled; otherwise it is the most likely one.
        temperature: Divisor of the logits before sampling.
        top_k: Sample from this number of most likely tokens only.
        top_p: Sample from the smallest set of most likely tokens with at least this total probability.
        ends: Tokens that end a sequence.
        pad: The token that fills a sequence after its end.
        generator: Random generator of the last stage, which samples.

    Raises:
        ValueError: The temperature is not positive, or no tokens are left to sample from.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    ends: tuple[int, ...] = ()
    pad: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be positive, got {self.temperature}; for 0 pass do_sample=False"
            )
        if (self.top_k is not None and self.top_k < 1) or (
            self.top_p is not None and not 0 < self.top_p <= 1
        ):
            raise ValueError(
                f"top_k must be at least 1 and top_p in (0, 1], got top_k={self.top_k} and top_p={self.top_p}"
            )

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens of shape ``(samples,)`` for logits of shape ``(samples, vocabulary)``."""
        if not self.do_sample:
            return logits.argmax(-1)
        # Both of shape (samples, vocabulary).
        ordered, tokens = (logits.float() / self.temperature).sort(-1, descending=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -torch.inf
        if self.top_p is not None:
            # Probability of all more likely tokens: the most likely one always stays.
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            ordered = ordered.masked_fill(before >= self.top_p, -torch.inf)
        drawn = torch.multinomial(ordered.softmax(-1), 1, generator=self.generator)
        return tokens.gather(-1, drawn).squeeze(-1)


class Sequences:
    """A group of prompts and their generated tokens.

    Args:
        tokens: Prompts of shape ``(samples, length)``.
        mask: Attention mask of the same shape, 0 at padding; ``None`` if there is no padding.
    """

    def __init__(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.tokens, self.mask = tokens, mask
        self.begun = False
        #: Index of the forward whose tokens have not been appended yet, and on the last stage these tokens.
        self.under_way: int | None = None
        self.chosen: torch.Tensor | None = None
        self._ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        self._length: int | None = None

    @property
    def complete(self) -> bool:
        """Whether all sequences have ended."""
        return self._length is not None

    @property
    def result(self) -> torch.Tensor:
        """Prompts and generated tokens, up to the step at which all sequences had ended."""
        return self.tokens[:, : self._length]

    def inputs(self, takes: Collection[str]) -> dict[str, Any]:
        """Model inputs for the next token: the prompts at first, then the last token of each sequence."""
        since = -1 if self.begun else 0
        inputs: dict[str, Any] = {"input_ids": self.tokens[:, since:]}
        if "logits_to_keep" in takes:
            inputs["logits_to_keep"] = 1
        if self.mask is not None:
            inputs[MASK] = self.mask
            if "position_ids" in takes:
                # As in transformers' own generation, padding has no position.
                positions = (self.mask.long().cumsum(-1) - 1).masked_fill(self.mask == 0, 0)
                inputs["position_ids"] = positions[:, since:]
        return inputs

    def append(self, chosen: torch.Tensor, choice: Sampling) -> None:
        """Append the next tokens, of shape ``(samples,)``; ended sequences get padding."""
        chosen = torch.where(self._ended, choice.pad, chosen)
        self.tokens = torch.cat([self.tokens, chosen[:, None]], dim=1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        for end in choice.ends:
            self._ended |= chosen == end
        if self._length is None and bool(self._ended.all()):
            self._length = self.tokens.shape[1]


@dataclass(frozen=True)
class Generation:
    """The generation loop of one rank of a pipeline.

    Attributes:
        pipeline: The stages of this rank.
        schedule: Its forwards: one microbatch per group of prompts, one slice per token.
        choice: Sampling settings.
        takes: Names of the model's inputs.
        empty: Creates a stage's empty key-value cache.
        device: This rank's device.
        data_group: Data-parallel ranks, which must run the same number of forwards whatever they generate.
        tensor_group: Tensor-parallel ranks, which must choose the same tokens; ``None`` if there is one.
    """

    pipeline: Pipeline
    schedule: Schedule
    choice: Sampling
    takes: Collection[str]
    empty: Callable[[], KeyValues]
    device: torch.device
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup | None

    def run(self, groups: Sequence[Sequences]) -> None:
        """Append tokens to each of ``groups`` until all of its sequences, or the schedule, have ended."""
        num_tokens = self.schedule.num_slices
        units: dict[int, Microbatch] = {}
        step = StageStep(self.schedule, units, None, LossSum(self.device), False, self.empty)
        fault: Exception | None = None
        try:
            with torch.no_grad():
                for at in range(num_tokens):
                    for index, group in enumerate(groups):
                        self._receive(group)
                        if not self._over(group):
                            fault = self._next(step, units, group, index * num_tokens + at, fault)
                for group in groups:
                    self._receive(group)
            self.pipeline.mail.finish()
            self.pipeline.share(step, fault)
        except BaseException:
            self.pipeline.mail.reset()
            raise
        finally:
            fault = None  # its traceback holds this frame

    def _over(self, group: Sequences) -> bool:
        if self.data_group.size() == 1 or not self.choice.ends:
            return group.complete
        flag = torch.tensor(float(group.complete), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.data_group)
        return bool(flag)

    def _next(
        self,
        step: StageStep,
        units: dict[int, Microbatch],
        group: Sequences,
        unit: int,
        fault: Exception | None,
    ) -> Exception | None:
        """Run a group's next forward, unless this rank has failed before; returns what it has met by then."""
        inputs = group.inputs(self.takes)
        samples, length = inputs["input_ids"].shape
        units[unit] = Microbatch((), inputs, None, samples, length)
        stages = self.schedule.stages_of(self.pipeline.rank)
        actions = [Action(ActionKind.FORWARD, stage, unit) for stage in stages]
        # What a rank gives out that has failed: any token, of the dtype of those that are chosen.
        chosen = group.tokens[:, -1].long()
        if fault is None:
            try:
                chosen = self._run(step, actions, chosen)
            except Exception as error:
                if self.data_group.size() > 1:
                    raise
                fault = error
        if fault is not None:
            self.pipeline.pass_over(step, actions, fault)
        del units[unit]
        group.begun, group.under_way = True, unit
        if self._chooses:
            group.chosen = chosen
            for rank in range(self.schedule.num_ranks):
                if rank != self.pipeline.rank:
                    self.pipeline.mail.send(chosen, rank, self._address(unit, len(chosen), rank))
        else:
            address = self._address(unit, samples, self.pipeline.rank)
            self.pipeline.mail.expect(self.schedule.placement[-1], address)
        return fault

    def _run(self, step: StageStep, actions: Sequence[Action], chosen: torch.Tensor) -> torch.Tensor:
        """Run a forward; returns the tokens chosen after it, or ``chosen`` where this rank chooses none."""
        result: Any = None
        for action in actions:
            self.pipeline.expect(step, action)
            _, result = self.pipeline.run_stage(step, action)
        if self._chooses:
            chosen = self.choice(result.logits[:, -1])
            if self.tensor_group is not None:
                dist.broadcast(chosen, group=self.tensor_group, group_src=0)
        return chosen

    def _receive(self, group: Sequences) -> None:
        """Append the tokens that were chosen after the group's last forward."""
        if group.under_way is None:
            return
        chosen = group.chosen
        if chosen is None:
            address = self._address(group.under_way, len(group.tokens), self.pipeline.rank)
            chosen = self.pipeline.mail.take(self.schedule.placement[-1], address)
        group.append(chosen, self.choice)
        group.under_way = group.chosen = None

    @property
    def _chooses(self) -> bool:
        return self.schedule.placement[-1] == self.pipeline.rank

    def _address(self, unit: int, samples: int, rank: int) -> MessageKey:
        """Address of chosen tokens sent to ``rank``, numbered after all messages between stages."""
        between = 2 * self.schedule.num_units * self.pipeline.num_transfers
        channel = tokens_channel(self.schedule.placement, rank)
        return MessageKey(between + unit, ("tokens", samples, channel), channel)
