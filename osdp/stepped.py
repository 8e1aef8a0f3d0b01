"""What a wrapped model does in whole steps, whatever the layout: train, evaluate, predict, generate."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from osdp.pipeline_plan import PipelinePlan
from osdp.plan import Plan
from osdp.runtime.steps import Steps

if TYPE_CHECKING:
    from osdp.integrations.token_step import Slicer
    from osdp.token_slices import TokenSlices


class Stepped:
    """A model that runs under a plan, whole or in stages, in steps of one batch.

    Attributes:
        module: The model.
        plan: The plan it runs under.
    """

    module: nn.Module
    plan: Plan | PipelinePlan
    _steps: Steps

    def train_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        token_slices: "int | Sequence[int] | TokenSlices | None" = None,
    ) -> torch.Tensor:
        """Forward and backward of one batch, whatever the layout; the mean loss over all ranks.

        The gradients left are those of the sum of all losses over all data-parallel ranks and microbatches,
        divided by the sum of their counts; an optimizer step and ``zero_grad`` follow.

        Args:
            inputs: What the model's forward takes for all samples of this data-parallel rank: a tensor, a
                tuple (positional) or a mapping (keywords), split along dim 0. All ranks of a pipeline, and
                all that compute a layer together, pass the same.
            targets: Passed to ``loss_fn`` beside the output, split alike; ``None``: only the output is.
            loss_fn: Returns (sum, count), or one number that is the mean over samples. Without it the loss is
                the output's own ``loss``, which counts as a mean over samples.
            num_microbatches: Parts of the batch, as planned if ``None``.
            schedule: Another schedule than the plan's, of as many stages for each rank.
            token_slices: How many slices each sequence is cut into, or their lengths; as planned if ``None``.
                For causal decoders of transformers, with ``"gpipe"`` or ``"1f1b"`` and a loss that is a pair
                of sums over positions; :func:`osdp.integrations.huggingface.causal_lm_loss` shifts before.

        Returns:
            The loss, a scalar, on every rank.

        Raises:
            RuntimeError: There are gradients of an earlier step.
            ValueError: The batch is smaller than ``num_microbatches``, differs between ranks that share it,
                or the schedule cannot run; or sequences cannot be cut so.
        """
        slicing = None
        if token_slices is None and isinstance(self.plan, PipelinePlan):
            token_slices = self.plan.token_slices
        if token_slices is not None:
            inputs = self._slicer.named(inputs)
            slicing = self._slicer.slicing(inputs, token_slices)
            loss_fn, targets = self._slicer.loss(loss_fn, targets, slicing.slices.sequence_length)
        return self._steps.train_step(
            inputs, targets, loss_fn, num_microbatches=num_microbatches, schedule=schedule, slicing=slicing
        )

    @cached_property
    def _slicer(self) -> "Slicer":
        # Needs transformers, which nothing else here does.
        from osdp.integrations.token_step import Slicer

        tensor = self.plan.tensor if isinstance(self.plan, PipelinePlan) else None
        shared = self.plan.tp if tensor is not None and tensor.sequence is not None else 1  # type: ignore[union-attr]
        return Slicer(self.module, shared)

    def eval_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_microbatches: int | None = None,
    ) -> torch.Tensor:
        """The mean loss of a batch over all ranks, on every rank, without gradients; as :meth:`train_step`.

        Modules stay in the mode they are in: call ``model.eval()`` before.
        """
        return self._steps.eval_step(inputs, targets, loss_fn, num_microbatches=num_microbatches)

    def predict(self, inputs: Any, *, num_microbatches: int | None = None) -> Any:
        """The model's outputs for ``inputs``, forward only, on all ranks that were given them.

        What is not there on the last stage, such as hidden states of earlier ones, is ``None``. Of several
        microbatches single numbers are averaged over the samples, and what cannot be joined, such as a cache,
        is ``None``.
        """
        return self._steps.predict(inputs, num_microbatches=num_microbatches)

    def generate(
        self,
        prompt: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        num_microbatches: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        **sampling: Any,
    ) -> torch.Tensor:
        """Prompts and what the model says after them, whatever the layout; greedy as transformers has it.

        Prompts go through the stages in groups, so that all stages work. Modules stay in the mode they are
        in: call ``model.eval()`` before.

        Args:
            prompt: Tokens of shape ``(samples, length)``, those of this data-parallel rank; all ranks of a
                pipeline pass the same. Data-parallel ranks have as many samples, and ask for as many tokens.
            max_new_tokens: How many tokens to add at most.
            attention_mask: 0 where the prompt is padding, which comes first; of the shape of ``prompt``.
            num_microbatches: Groups of prompts; one for each stage if ``None``.
            eos_token_id: What ends a sequence, as the model is configured if ``None``; ``()``: nothing does.
            pad_token_id: What comes after that, likewise.
            sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and ``generator`` of
                :class:`osdp.runtime.generation.Choice`.

        Returns:
            Tokens of shape ``(samples, length + at most max_new_tokens)``, until all sequences have ended.

        Raises:
            ValueError: The model has no cache, padding comes last, or the model has too few positions.
        """
        request = self._slicer.request(prompt, max_new_tokens, attention_mask)
        choice = self._slicer.choice(eos_token_id, pad_token_id, sampling)
        return self._steps.generate(choice=choice, num_groups=num_microbatches, **request)
