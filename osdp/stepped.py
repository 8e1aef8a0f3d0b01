"""Step methods of a wrapped model under any plan: train_step, eval_step, predict and generate."""

from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from osdp.plan.plan import Plan
from osdp.runtime.steps import StepRunner

if TYPE_CHECKING:
    from osdp.integrations.huggingface.token_step import Slicer
    from osdp.plan.token_slices import TokenSlices


class Stepped:
    """Mixin of a model that runs under a plan, whole or in pipeline stages, one batch per step.

    Attributes:
        module: The model.
        plan: The plan it runs under.
    """

    module: nn.Module
    plan: Plan
    _steps: StepRunner

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
        """Run forward and backward of one batch under any plan; returns the mean loss over all ranks.

        The resulting gradients are those of the sum of all losses over all data-parallel ranks and
        microbatches, divided by the sum of their counts; call the optimizer's ``step`` and ``zero_grad``
        afterwards.

        Args:
            inputs: Arguments of the model's forward for all samples of this data-parallel rank: a tensor, a
                tuple (positional) or a mapping (keywords), split along dim 0. All ranks of a pipeline, and
                all tensor-parallel ranks, must pass the same.
            targets: Passed to ``loss_fn`` after the output, and split in the same way; with ``None`` only the
                output is passed.
            loss_fn: Returns (sum, count), or one number that is the mean over samples. Without it the loss is
                the output's own ``loss``, which counts as a mean over samples.
            num_microbatches: Number of parts of the batch; as planned if ``None``.
            schedule: Another schedule than the plan's, with the same number of stages per rank.
            token_slices: Number of slices that each sequence is cut into, or their lengths; as planned if
                ``None``. For causal decoders of transformers, with ``"gpipe"`` or ``"1f1b"`` and a loss that
                is a pair of sums over positions. :func:`osdp.integrations.huggingface.causal_lm_loss` works:
                its labels are shifted before sequences are cut.

        Returns:
            The loss, a scalar, on every rank.

        Raises:
            RuntimeError: There are gradients of an earlier step.
            ValueError: The batch is smaller than ``num_microbatches`` or differs between ranks that share it,
                the schedule cannot run, or the sequences cannot be cut in this way.
        """
        self.begin_step(num_microbatches or self.plan.training.microbatches)
        slicing = None
        if token_slices is None:
            token_slices = self.plan.token_slices
        if token_slices is not None:
            inputs = self._slicer.named(inputs)
            slicing = self._slicer.slicing(inputs, token_slices)
            loss_fn, targets = self._slicer.loss(loss_fn, targets, slicing.slices.sequence_length)
        return self._steps.train_step(
            inputs, targets, loss_fn, num_microbatches=num_microbatches, schedule=schedule, slicing=slicing
        )

    def begin_step(self, num_microbatches: int = 0) -> None:
        """Called before a step: where a model may go on under another plan.

        Args:
            num_microbatches: Microbatches that are about to run; 0 for a single forward.
        """

    @cached_property
    def _slicer(self) -> "Slicer":
        # Imported only when used: it needs transformers.
        from osdp.integrations.huggingface.token_step import Slicer

        tensor = self.plan.tensor
        shared_by = self.plan.tp if tensor is not None and tensor.sequence is not None else 1
        return Slicer(self.module, shared_by, self._steps.device)

    def eval_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_microbatches: int | None = None,
    ) -> torch.Tensor:
        """Compute the mean loss of a batch over all ranks without gradients; see :meth:`train_step`.

        Every rank gets the loss. Modules stay in their current mode: call ``model.eval()`` first.
        """
        return self._steps.eval_step(inputs, targets, loss_fn, num_microbatches=num_microbatches)

    def predict(self, inputs: Any, *, num_microbatches: int | None = None) -> Any:
        """Compute the model's outputs for ``inputs``, forward only, on all ranks that share these inputs.

        Outputs that do not exist on the last stage, such as hidden states of earlier stages, are ``None``.
        With several microbatches, scalars are averaged over the samples, and outputs that cannot be
        concatenated, such as a cache, are ``None``.
        """
        return self._steps.predict(inputs, num_microbatches=num_microbatches)

    def generate(
        self,
        prompt: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        num_microbatches: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        **sampling: Any,
    ) -> torch.Tensor:
        """Generate tokens after prompts under any plan; greedy by default, like transformers' ``generate``.

        Prompts go through the stages in groups, so that all stages are busy. Modules stay in their current
        mode: call ``model.eval()`` first. Called as transformers' own (with ``input_ids=`` or a
        ``generation_config=``), it is the model's, if that is not cut into stages.

        Args:
            prompt: Tokens of shape ``(samples, length)`` of this data-parallel rank; all ranks of a pipeline
                must pass the same. All data-parallel ranks need the same number of samples and of new tokens.
            max_new_tokens: Maximum number of tokens to add.
            attention_mask: 0 where the prompt is padding, which must be on the left; of the shape of
                ``prompt``.
            num_microbatches: Number of groups of prompts; one for each stage if ``None``.
            eos_token_id: Token or tokens that end a sequence; as the model is configured if ``None``; with
                ``()`` sequences do not end early.
            pad_token_id: Token after the end of a sequence; as the model is configured if ``None``.
            sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and ``generator`` of
                :class:`osdp.runtime.pipeline.generation.Sampling`; with ``do_sample=True`` a temperature,
                top_k or top_p that is not given is as the model is configured.

        Returns:
            Prompts and new tokens, of shape ``(samples, length + at most max_new_tokens)``, until all
            sequences have ended.

        Raises:
            ValueError: The model has no cache, padding is on the right, or the model has too few positions.
        """
        if prompt is None or max_new_tokens is None or "generation_config" in sampling:
            if num_microbatches is not None:
                raise TypeError("num_microbatches= is for generate(prompt, max_new_tokens)")
            named = {
                "max_new_tokens": max_new_tokens,
                "attention_mask": attention_mask,
                "eos_token_id": eos_token_id,
                "pad_token_id": pad_token_id,
            }
            given = sampling | {name: value for name, value in named.items() if value is not None}
            return self._generate_by_model(*(() if prompt is None else (prompt,)), **given)
        request = self._slicer.request(prompt, max_new_tokens, attention_mask)
        choice = self._slicer.choice(eos_token_id, pad_token_id, sampling)
        return self._steps.generate(choice=choice, num_groups=num_microbatches, **request)

    def _generate_by_model(self, *prompt: torch.Tensor, **options: Any) -> torch.Tensor:
        own = getattr(self.module, "generate", None)
        if own is None or not self.plan.is_whole:
            raise TypeError("generate() of this model takes the tokens of prompts, and max_new_tokens")
        # What is sharded is gathered as long as any rank generates.
        is_synced = self.plan.dp > 1 and "synced_gpus" in signature(own).parameters
        together = {"synced_gpus": True} if is_synced else {}
        found: torch.Tensor = own(*prompt, **(together | options))
        return found
