"""What ``train_step`` needs to cut the sequences of a model of transformers into slices."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from osdp.integrations.slice_cache import SliceCache, check_sliceable, drops_cache
from osdp.integrations.token_loss import by_position, check_by_position, check_targets
from osdp.runtime.generation import Choice
from osdp.runtime.losses import LossFn
from osdp.runtime.tokens import MASK, Slicing
from osdp.token_slices import TokenSlices

_REFUSED = {
    "labels": (
        "the model would shift them inside of each slice; pass them as targets, with "
        "osdp.integrations.huggingface.causal_lm_loss as loss_fn"
    ),
    "past_key_values": "token slices bring their own",
}


#: Settings of a generation that are not supported, with the values that say nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "forced_eos_token_id": (None,),
}


class Slicer:
    """Cuts the sequences of a model.

    Args:
        model: A decoder of transformers, whole or the modules of some stages.
        shared_by: Ranks that share each sequence, which must divide slices.
    """

    def __init__(self, model: nn.Module, shared_by: int = 1) -> None:
        self._model: Any = model
        self._shared_by = shared_by
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._sliceable = False
        self._tried: LossFn | None = None

    @cached_property
    def _empty(self) -> Callable[..., SliceCache]:
        return SliceCache.of(self._model)

    def named(self, inputs: Any) -> dict[str, Any]:
        """Inputs by name, as a model of transformers calls them."""
        if isinstance(inputs, Mapping):
            return {str(name): value for name, value in inputs.items()}
        args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        return dict(zip(self._names, args, strict=False))

    def slicing(self, inputs: Mapping[str, Any], token_slices: int | TokenSlices | Sequence[int]) -> Slicing:
        """The slices of a batch.

        Args:
            inputs: By name.
            token_slices: Their number, their lengths, or they themselves.

        Raises:
            ValueError: They do not add up to the sequences, or an input or the model cannot be cut.
        """
        # Its modules may have been told to checkpoint since the last step.
        if not self._sliceable or drops_cache(self._model):
            check_sliceable(self._model)
            self._sliceable = True
        length = _length(inputs)
        _check(inputs, length)
        if isinstance(token_slices, bool | float | str):
            raise TypeError(
                f"token_slices is a number of slices, their lengths or TokenSlices, got {token_slices!r}"
            )
        if isinstance(token_slices, int):
            slices = TokenSlices.uniform(length, token_slices, self._shared_by)
        else:
            given = (
                token_slices if isinstance(token_slices, TokenSlices) else TokenSlices(tuple(token_slices))
            )
            given.check(length)
            slices = given
        uneven = [size for size in slices.lengths if size % self._shared_by]
        if uneven:
            raise ValueError(
                f"slices of {uneven} tokens cannot be shared by {self._shared_by} tensor-parallel ranks; "
                "with sequence_parallel all slices are multiples of them"
            )
        return Slicing(slices, partial(self._empty, length))

    def loss(self, loss_fn: LossFn | None, targets: Any, length: int) -> tuple[LossFn, Any]:
        """Loss function and targets of slices.

        Raises:
            ValueError: The loss is no sum over positions, or targets are not as long as sequences.
        """
        found, wanted = by_position(loss_fn, targets)
        check_targets(wanted, length)
        if loss_fn is not self._tried:
            vocabulary = self._model.config.get_text_config().vocab_size
            if check_by_position(found, wanted, length, vocabulary):
                self._tried = loss_fn
        return found, wanted

    def request(self, prompt: torch.Tensor, num_tokens: int, mask: torch.Tensor | None) -> dict[str, Any]:
        """What :meth:`osdp.runtime.steps.Steps.generate` wants.

        Raises:
            ValueError: Padding comes last, no token is asked for, the model has too few positions, or its
                ranks share sequences, or it has no cache.
        """
        check_sliceable(self._model, trains=False)
        if not isinstance(prompt, torch.Tensor):
            raise TypeError(
                f"a prompt is a tensor of tokens of shape (samples, length), got {type(prompt).__name__}; "
                "its mask is passed as attention_mask="
            )
        if self._shared_by > 1:
            raise ValueError(
                f"{self._shared_by} tensor-parallel ranks share sequences, and one token cannot be shared: "
                "to generate, plan without sequence_parallel"
            )
        if num_tokens < 1 or prompt.dim() != 2:
            raise ValueError(
                f"a prompt of shape (samples, length) and at least one token more are needed, got "
                f"{tuple(prompt.shape)} and max_new_tokens={num_tokens}"
            )
        most = getattr(self._model.config, "max_position_embeddings", None)
        # The last token is not looked up any more.
        if most is not None and prompt.shape[1] + num_tokens - 1 > most:
            raise ValueError(
                f"{prompt.shape[1]} tokens of the prompt and max_new_tokens={num_tokens} are more than the "
                f"{most} positions of the model"
            )
        if mask is not None and mask.shape != prompt.shape:
            raise ValueError(
                f"attention_mask must have the shape of the prompt, {tuple(prompt.shape)}, got "
                f"{tuple(mask.shape)}"
            )
        if mask is not None and bool((mask[:, -1] == 0).any()):
            raise ValueError(
                "padding comes last in a prompt: pad on the left, so that the last position is what the next "
                "token follows"
            )
        padded = mask is not None and bool((mask == 0).any())
        return {
            "prompt": prompt,
            "mask": mask if padded else None,
            "num_tokens": num_tokens,
            "takes": self._names,
            "empty": partial(self._empty, prompt.shape[1] + num_tokens),
        }

    def choice(
        self, ends: int | Sequence[int] | None, pad: int | None, sampling: Mapping[str, Any]
    ) -> Choice:
        """How tokens are chosen; what is not given is as the model is configured.

        Raises:
            TypeError: A setting is unknown.
            ValueError: The model is configured to generate in a way that is not done, or a setting is for
                drawing tokens, and none are drawn.
        """
        known = [field.name for field in fields(Choice) if field.name not in ("ends", "pad")]
        if unknown := sorted(set(sampling) - set(known)):
            raise TypeError(
                f"generate() does not take {', '.join(unknown)}; it takes {', '.join(known)}. For all "
                "else use transformers' own generate"
            )
        configured = getattr(self._model, "generation_config", self._model.config)
        strange = [
            f"{k}={getattr(configured, k)}"
            for k, plain in _PLAIN.items()
            if getattr(configured, k, None) not in plain
        ]
        if strange:
            raise ValueError(
                f"the model is configured to generate with {', '.join(strange)}, which is not done here: set "
                "its generation_config to the defaults, or use transformers' own generate"
            )
        if not sampling.get("do_sample") and sampling:
            ignored = ", ".join(sorted(set(sampling) - {"do_sample"}))
            if ignored:
                raise ValueError(f"{ignored} is for drawing tokens: pass do_sample=True, too")
        if ends is None:
            ends = configured.eos_token_id
        found = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        if pad is None:
            pad = configured.pad_token_id
        if pad is None:
            pad = found[0] if found else 0
        return Choice(ends=found, pad=pad, **sampling)


def _length(inputs: Mapping[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(inputs.get(name), torch.Tensor):
            return int(inputs[name].shape[1])
    raise ValueError(f"token slices cut input_ids or inputs_embeds; there are {', '.join(inputs) or 'none'}")


def _check(inputs: Mapping[str, Any], length: int) -> None:
    for name, reason in _REFUSED.items():
        if inputs.get(name) is not None:
            raise ValueError(f"{name} cannot be an input of token slices: {reason}")
    mask, positions = inputs.get(MASK), inputs.get("position_ids")
    if mask is not None and tuple(mask.shape[1:]) != (length,):
        raise ValueError(
            f"token slices take an attention_mask of shape (samples, {length}), got {tuple(mask.shape)}"
        )
    if positions is not None and mask is None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids that do not rise by one mark several sequences packed into one, which slices with "
            "a cache would mix: pass the sequences apart, or an attention_mask if it is padding"
        )
