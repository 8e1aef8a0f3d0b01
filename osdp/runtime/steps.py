"""Training, evaluation, prediction and generation steps, for a whole model and for one in stages."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from osdp.comm.groups import device_of
from osdp.nn.random_states import draw_apart
from osdp.plan.schedule import Schedule, generation_schedule
from osdp.runtime.losses import LossFn
from osdp.runtime.microbatch import Microbatch, arguments, check_same, split
from osdp.runtime.pipeline.engine import Pipeline, ReductionPolicy
from osdp.runtime.pipeline.generation import Generation, Sampling, Sequences
from osdp.runtime.pipeline.gradient_factor import differ
from osdp.runtime.pipeline.messenger import MessageSpecs
from osdp.runtime.running import RunningModel
from osdp.runtime.token_slices.kv_prefix import KeyValues
from osdp.runtime.token_slices.slicing import TokenSlicing


class StepRunner:
    """The steps of a model under a plan.

    Args:
        running: The model.
    """

    def __init__(self, running: RunningModel) -> None:
        self._running = running
        self._device = device_of(running.mesh)
        self._pipeline = Pipeline(
            running.stages,
            running.plan.transfers,
            running.links.stage_group,
            self._device,
            channels=running.links.channels,
            reduces=ReductionPolicy.of(running.plan),
        )
        self._data_group = running.data_group
        self._stage_group = running.links.stage_group
        self._tensor_group = running.links.tensor_group
        self._schedules: dict[tuple[int | None, str | None, int], Schedule] = {}
        self._compared = False

    def train_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: LossFn | None = None,
        *,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        slicing: TokenSlicing | None = None,
    ) -> torch.Tensor:
        """Compute gradients of the mean loss over all ranks' samples; returns that loss on every rank."""
        apart = [told for copies in self._running.links.tied if (told := copies.agree()) is not None]
        if self._has_gradients(apart):
            raise RuntimeError(
                "there are gradients of an earlier step, which this one would scale: call "
                "optimizer.zero_grad() between steps, and let num_microbatches= accumulate within one"
            )
        num_slices = slicing.slices.num_slices if slicing else 1
        if slicing:  # in every step: ranks may pad their batches to other lengths
            self._compare_slices(slicing.slices.lengths)
        plan, parts = self._prepared(inputs, targets, num_microbatches, schedule, num_slices)
        if slicing:
            parts = tuple(part for whole in parts for part in slicing.cut(whole))
        with self._drawing_apart():
            losses = self._pipeline.train(plan, parts, loss_fn, slicing.empty if slicing else None)
        total, count = losses.join(self._data_group, self._stage_group)
        for copies in self._running.links.tied:
            copies.add_gradients()
        # Data-parallel reduction has averaged the sums over ranks: multiplied by the number of ranks and
        # divided by the count they are the mean. With a count of 0 gradients are zero.
        self._scale_gradients(torch.where(count > 0, self._data_group.size() / count, 0.0))
        if self._stage_group is not None and self._stage_group.size() > 1:
            self._running.links.factor.note(self._running.stored_parameters())
        return (total / count).float()

    def _has_gradients(self, apart: Sequence[str]) -> bool:
        """Whether any rank has a gradient that is not zero; those that are zero are dropped.

        Args:
            apart: What this rank knows of copies of tied parameters that have come apart.

        Raises:
            RuntimeError: Stages have scaled their gradients by factors of their own, or copies of tied
                parameters have come apart.
        """
        parameters = [p for p in self._running.stored_parameters() if p.grad is not None]
        stages = self._stage_group
        alone = stages is None or stages.size() == 1
        if not parameters and alone:
            return False
        gradients = (p.grad for p in parameters if p.grad is not None)
        local = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients)
        factor = self._running.links.factor.value
        least, most = (-math.inf, -math.inf) if factor is None else (-factor, factor)
        there = any(bool(grad.any()) for grad in local)
        found = torch.tensor([there, least, most, bool(apart)], dtype=torch.float32, device=self._device)
        # Ranks of one stage have gradients of the same parameters; another one may be frozen and have none.
        groups = (self._data_group, self._tensor_group) if parameters else ()
        for group in (*groups, None if alone else stages):
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        there, least, most, came_apart = found.tolist()
        if came_apart:
            raise RuntimeError(
                "\n".join(apart) or "copies of a tied parameter on other ranks were stepped unlike each other"
            )
        if not alone and most > -math.inf and differ([-least, most]):
            raise RuntimeError(
                f"before the last optimizer step the gradients of stages were multiplied by {-least:.4g} to "
                f"{most:.4g}: torch.nn.utils.clip_grad_norm_ and GradScaler see the stages of one rank "
                "alone. Call model.clip_grad_norm_(max_norm), use ShardedGradScaler of "
                "torch.distributed.fsdp, and go on from a checkpoint of before"
            )
        if there:
            return True
        for parameter in parameters:
            parameter.grad = None
        return False

    def eval_step(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None, *, num_microbatches: int | None
    ) -> torch.Tensor:
        """The mean loss over all ranks' samples, on every rank; no gradients."""
        plan, parts = self._prepared(inputs, targets, num_microbatches)
        with self._drawing_apart():
            losses = self._pipeline.evaluate(plan.forward_only(), parts, loss_fn)
        total, count = losses.join(self._data_group, self._stage_group)
        return (total / count).float()

    def predict(self, inputs: Any, *, num_microbatches: int | None) -> Any:
        """The model's outputs for this data-parallel rank's inputs, on all ranks of its pipeline."""
        plan, parts = self._prepared(inputs, None, num_microbatches)
        with self._drawing_apart():
            found = self._pipeline.predict(plan.forward_only(), parts)
        outputs = joined(found, [part.samples for part in parts])
        if self._stage_group is None or self._stage_group.size() == 1:
            return outputs
        return _to_all(outputs, self._stage_group, plan.placement[-1], self._device)

    def generate(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None,
        num_tokens: int,
        choice: Sampling,
        *,
        num_groups: int | None,
        takes: Collection[str],
        empty: Callable[[], KeyValues],
    ) -> torch.Tensor:
        """Prompts followed by generated tokens, on all ranks of a pipeline.

        Args:
            prompt: Tokens of shape ``(samples, length)``.
            mask: Attention mask of the same shape, 0 at padding; ``None`` if there is no padding.
            num_tokens: Maximum number of tokens to generate.
            choice: Sampling settings.
            num_groups: Number of groups in which prompts go through the stages; one per stage if ``None``.
            takes: Names of the model's inputs.
            empty: Creates a stage's empty key-value cache.

        Raises:
            ValueError: There are fewer prompts than groups.
        """
        one = self._running.make_schedule(1, None, 1)
        count = num_groups if num_groups is not None else min(len(prompt), one.num_stages)
        given = {"tokens": prompt, "mask": mask}
        self._require_same(given)
        parts = split(given, None, count, self._device)
        self._require_equal((count, num_tokens), self._data_group, "groups of prompts and tokens to generate")
        run = Generation(
            self._pipeline,
            generation_schedule(one.placement, count, num_tokens),
            choice,
            takes,
            empty,
            self._device,
            self._data_group,
            self._tensor_group,
        )
        groups = [Sequences(part.kwargs["tokens"], part.kwargs["mask"]) for part in parts]
        with self._drawing_apart():
            run.run(groups)
        longest = max(group.result.shape[1] for group in groups)
        return torch.cat(
            [
                nn.functional.pad(group.result, (0, longest - group.result.shape[1]), value=choice.pad)
                for group in groups
            ]
        )

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def message_specs(self) -> MessageSpecs:
        """Shape and dtype of each kind of message between stages so far."""
        return self._pipeline.message_specs

    def _prepared(
        self,
        inputs: Any,
        targets: Any,
        num_microbatches: int | None,
        name: str | None = None,
        num_slices: int = 1,
    ) -> tuple[Schedule, tuple[Microbatch, ...]]:
        key = (num_microbatches, name, num_slices)
        if key not in self._schedules:
            self._schedules[key] = self._running.make_schedule(*key)
        plan = self._schedules[key]
        # In every step, since loaders may part later, and before one rank alone refuses what it was given.
        self._require_same(arguments(inputs))
        return plan, split(inputs, targets, plan.num_microbatches, self._device)

    def compare_first(self, inputs: Any) -> None:
        """Compare the first inputs of ranks that compute parts of one model and are called by themselves.

        Later ones are on their devices, whose kernels a comparison would wait for.

        Raises:
            ValueError: They differ.
        """
        if not self._compared:
            self._require_same(inputs)
            self._compared = True

    def _require_same(self, inputs: Any) -> None:
        for group in (self._stage_group, self._tensor_group):
            if group is not None and group.size() > 1:
                check_same(inputs, group, self._device)

    def _drawing_apart(self) -> AbstractContextManager[None]:
        """Where stages compute, each of which has dropout of its own and draws as often as it needs."""
        if self._stage_group is None or self._stage_group.size() == 1:
            return nullcontext()
        return draw_apart(self._device, self._stage_group.rank())

    def _compare_slices(self, lengths: Sequence[int]) -> None:
        """Raise if ranks differ in their token slices: each may have searched with its own measured times."""
        for group in (self._stage_group, self._tensor_group):
            if group is not None:
                ends = sum(at * size for at, size in enumerate(lengths, start=1))
                self._require_equal((len(lengths), ends), group, "token slices and where they end")
        self._require_equal((len(lengths),), self._data_group, "token slices")

    def _require_equal(self, numbers: Sequence[int], group: dist.ProcessGroup, what: str) -> None:
        if group.size() == 1:
            return
        # One all-reduce finds both: the minimum is the negated maximum of the negated numbers.
        given = torch.tensor([*numbers, *(-number for number in numbers)], device=self._device)
        dist.all_reduce(given, op=dist.ReduceOp.MAX, group=group)
        most, least = given[: len(numbers)].tolist(), (-given[len(numbers) :]).tolist()
        if most != least:
            raise ValueError(
                f"ranks differ in the number of {what}: {least} to {most}; give all the same, for example "
                "those of the first rank"
            )

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        gradients = [p.grad for p in self._running.stored_parameters() if p.grad is not None]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
        with torch.no_grad():
            for device, dtype in {(grad.device, grad.dtype) for grad in local}:
                here = [grad for grad in local if (grad.device, grad.dtype) == (device, dtype)]
                torch._foreach_mul_(here, factor.to(device, torch.promote_types(dtype, torch.float32)))


def joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """The outputs of all microbatches, joined to those of the batch.

    Tensors with as many rows for each sample are concatenated along dim 0, scalars are averaged over the
    samples. Of other values those that are equal in all microbatches stay, the rest, such as a cache or the
    loads of experts, become ``None``.
    """
    if len(outputs) < 2:
        return outputs[0] if outputs else None
    trees = [tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    return tree_unflatten([_join(column, samples) for column in columns], trees[0][1])


def _join(leaves: Sequence[Any], samples: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        plain = isinstance(first, (str, int, float, bool))
        return first if plain and all(leaf == first for leaf in leaves) else None
    if first.dim():
        # Rows of samples, or several rows of each.
        rows = {len(leaf) / count for leaf, count in zip(leaves, samples, strict=True)}
        if len(rows) == 1 and len(first) % samples[0] == 0 and len(first):
            return torch.cat(list(leaves))
        return first if all(torch.equal(leaf, first) for leaf in leaves) else None
    if not first.is_floating_point():
        return first if all(torch.equal(leaf, first) for leaf in leaves) else None
    return sum(leaf * count for leaf, count in zip(leaves, samples, strict=True)) / sum(samples)


def _to_all(outputs: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """``outputs`` of rank ``source`` of ``group`` on all its ranks."""
    here = group.rank() == source
    # The structure is sent with meta tensors in place of the tensors, then their data one by one.
    box = [tree_map(_without_data, outputs) if here else None]
    dist.broadcast_object_list(box, group=group, group_src=source, device=device)

    def received(own: Any) -> Any:
        if not isinstance(own, torch.Tensor):
            return own
        tensor = own.contiguous() if here else torch.empty(own.shape, dtype=own.dtype, device=device)
        dist.broadcast(tensor, group=group, group_src=source)
        return tensor

    return tree_map(received, outputs if here else box[0])


def _without_data(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
