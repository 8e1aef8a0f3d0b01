"""Generation through a pipeline: keys and values as of slices, where each one after the prompt is one token.

Prompts go through the stages in several groups. While one group's next token is chosen on the last stage and
on its way to the first, other stages work on other groups.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from osdp.runtime.channels import tokens_channel
from osdp.runtime.losses import LossSum
from osdp.runtime.mail import Address
from osdp.runtime.microbatch import Microbatch
from osdp.runtime.pipeline import Pipeline, Step
from osdp.runtime.prefix import KeyValues
from osdp.runtime.tokens import MASK
from osdp.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen, and which one is the last.

    Attributes:
        do_sample: Whether it is drawn; otherwise it is the likeliest.
        temperature: What logits are divided by before drawing.
        top_k: Draw from so many likeliest tokens only.
        top_p: Draw from the fewest likeliest tokens that have this probability together.
        ends: Tokens that end a sequence.
        pad: What follows them.
        generator: Of the random numbers, which the last stage draws.

    Raises:
        ValueError: The temperature is not positive, or nothing is left to draw from.
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
        ordered, tokens = (logits.float() / self.temperature).sort(-1, descending=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -torch.inf
        if self.top_p is not None:
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            ordered = ordered.masked_fill(before >= self.top_p, -torch.inf)
        drawn = torch.multinomial(ordered.softmax(-1), 1, generator=self.generator)
        return tokens.gather(-1, drawn).squeeze(-1)


class Sequences:
    """Some prompts, and what was generated after them.

    Args:
        tokens: Of shape ``(samples, length)``.
        mask: Which of them are no padding; ``None``: all.
    """

    def __init__(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.tokens, self.mask = tokens, mask
        self.begun = False
        #: The number of the forward whose tokens have not been appended, and on the last stage those tokens.
        self.under_way: int | None = None
        self.chosen: torch.Tensor | None = None
        self._ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        self._length: int | None = None

    @property
    def complete(self) -> bool:
        """Whether all have ended."""
        return self._length is not None

    @property
    def result(self) -> torch.Tensor:
        """Prompts and generated tokens until all had ended."""
        return self.tokens[:, : self._length]

    def inputs(self, takes: Collection[str]) -> dict[str, Any]:
        """What the model needs for the next token: the prompts, or the last one."""
        since = -1 if self.begun else 0
        inputs: dict[str, Any] = {"input_ids": self.tokens[:, since:]}
        if "logits_to_keep" in takes:
            inputs["logits_to_keep"] = 1
        if self.mask is not None:
            inputs[MASK] = self.mask
            if "position_ids" in takes:
                # As transformers' own generation counts: padding has no position.
                positions = (self.mask.long().cumsum(-1) - 1).masked_fill(self.mask == 0, 0)
                inputs["position_ids"] = positions[:, since:]
        return inputs

    def append(self, chosen: torch.Tensor, choice: Choice) -> None:
        """Take the next tokens."""
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
    """What is generated, and where.

    Attributes:
        pipeline: The stages of this rank.
        schedule: Its forwards: as many microbatches as there are groups of prompts, as many slices as tokens.
        choice: How tokens are chosen.
        takes: Names of the model's inputs.
        empty: Makes what a stage holds before the prompt.
        device: This rank's device.
        data_group: Ranks that must run as many forwards, whatever they generate.
        tensor_group: Ranks that compute layers together and must choose the same; ``None``: one alone.
    """

    pipeline: Pipeline
    schedule: Schedule
    choice: Choice
    takes: Collection[str]
    empty: Callable[[], KeyValues]
    device: torch.device
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup | None

    def run(self, groups: Sequence[Sequences]) -> None:
        """Append to each of ``groups`` until all of its sequences have ended, or the schedule has."""
        num_tokens = self.schedule.num_slices
        units: dict[int, Microbatch] = {}
        step = Step(self.schedule, units, None, LossSum(self.device), False, self.empty)
        try:
            with torch.no_grad():
                for at in range(num_tokens):
                    for index, group in enumerate(groups):
                        self._receive(group)
                        if not self._over(group):
                            self._next(step, units, group, index * num_tokens + at)
                for group in groups:
                    self._receive(group)
            self.pipeline.mail.finish()
        except BaseException:
            self.pipeline.mail.reset()
            raise

    def _over(self, group: Sequences) -> bool:
        if self.data_group.size() == 1 or not self.choice.ends:
            return group.complete
        flag = torch.tensor(float(group.complete), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.data_group)
        return bool(flag)

    def _next(self, step: Step, units: dict[int, Microbatch], group: Sequences, unit: int) -> None:
        inputs = group.inputs(self.takes)
        samples, length = inputs["input_ids"].shape
        units[unit] = Microbatch((), inputs, None, samples, length)
        result: Any = None
        for stage in self.schedule.stages_of(self.pipeline.rank):
            action = Action(Kind.FORWARD, stage, unit)
            self.pipeline.expect(step, action)
            _, result = self.pipeline.run_stage(step, action)
        del units[unit]
        group.begun, group.under_way = True, unit
        if self._chooses:
            group.chosen = self._choose(result, unit)
        else:
            address = self._address(unit, samples, self.pipeline.rank)
            self.pipeline.mail.expect(self.schedule.placement[-1], address)

    def _choose(self, output: Any, unit: int) -> torch.Tensor:
        chosen = self.choice(output.logits[:, -1])
        if self.tensor_group is not None:
            dist.broadcast(chosen, group=self.tensor_group, group_src=0)
        for rank in range(self.schedule.num_ranks):
            if rank != self.pipeline.rank:
                self.pipeline.mail.send(chosen, rank, self._address(unit, len(chosen), rank))
        return chosen

    def _receive(self, group: Sequences) -> None:
        """Take the tokens that were chosen in the group's last forward."""
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

    def _address(self, unit: int, samples: int, rank: int) -> Address:
        """Of tokens chosen for ``rank``: after the numbers of all messages between stages."""
        between = 2 * self.schedule.num_units * self.pipeline.num_transfers
        channel = tokens_channel(self.schedule.placement, rank)
        return Address(between + unit, ("tokens", samples, channel), channel)
