"""Token slices of transformers' models: checks and arguments for ``train_step`` and ``generate``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from osdp.integrations.huggingface.slice_cache import (
    CACHE_ARGUMENTS,
    SliceCache,
    check_sliceable,
    drops_cache,
)
from osdp.integrations.huggingface.token_loss import by_position, check_by_position, check_targets
from osdp.plan.token_slices import TokenSlices
from osdp.runtime.losses import LossFn
from osdp.runtime.pipeline.generation import Sampling
from osdp.runtime.token_slices.slicing import MASK, TokenSlicing

_REFUSED = {
    "labels": (
        "the model would shift them inside each slice; pass them as targets, with "
        "osdp.integrations.huggingface.causal_lm_loss as loss_fn"
    ),
    **dict.fromkeys(CACHE_ARGUMENTS, "token slices use a cache of their own"),
}


#: Generation settings that are not supported, with the values that have no effect.
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

#: As above, of settings that have an effect only when sampling.
_PLAIN_SAMPLES: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}


class Slicer:
    """Cuts the sequences of a model into token slices.

    Args:
        model: A decoder of transformers, whole or with only the modules of some stages.
        shared_by: Number of ranks that share each sequence; it must divide the length of every slice.
        device: Where steps run; by default where their targets are.
    """

    def __init__(self, model: nn.Module, shared_by: int = 1, device: torch.device | None = None) -> None:
        self._model: Any = model
        self._shared_by = shared_by
        self._device = device
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._sliceable = False
        self._tried: LossFn | None = None

    @cached_property
    def _empty(self) -> Callable[..., SliceCache]:
        return SliceCache.of(self._model)

    def named(self, inputs: Any) -> dict[str, Any]:
        """Inputs by the names of the model's forward arguments."""
        if isinstance(inputs, Mapping):
            return {str(name): value for name, value in inputs.items()}
        args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        return dict(zip(self._names, args, strict=False))

    def slicing(
        self, inputs: Mapping[str, Any], token_slices: int | TokenSlices | Sequence[int]
    ) -> TokenSlicing:
        """Make the slices of a batch.

        Args:
            inputs: The inputs by name.
            token_slices: Number of slices, their lengths, or TokenSlices.

        Raises:
            ValueError: The lengths do not add up to those of the sequences, or an input or the model cannot
                be cut.
        """
        # Activation checkpointing may have been turned on since the last step.
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
                f"with sequence_parallel the length of every slice must be a multiple of {self._shared_by}"
            )
        _check_frequencies(self._model.config, slices.lengths, inputs.get("position_ids"))
        return TokenSlicing(slices, partial(self._empty, length))

    def loss(self, loss_fn: LossFn | None, targets: Any, length: int) -> tuple[LossFn, Any]:
        """Loss function and targets for slices.

        Raises:
            ValueError: The loss is not a sum over positions, or targets are not as long as the sequences.
        """
        found, wanted = by_position(loss_fn, targets)
        check_targets(wanted, length)
        if loss_fn is not self._tried:
            vocabulary = self._model.config.get_text_config().vocab_size
            if check_by_position(found, wanted, length, vocabulary, self._device):
                self._tried = loss_fn
        return found, wanted

    def request(self, prompt: torch.Tensor, num_tokens: int, mask: torch.Tensor | None) -> dict[str, Any]:
        """Keyword arguments for :meth:`osdp.runtime.steps.StepRunner.generate`.

        Raises:
            ValueError: Padding is on the right, no token is requested, the model has too few positions or no
                cache, its rotary frequencies would change on the way, or its ranks share sequences.
        """
        check_sliceable(self._model, trains=False)
        if not isinstance(prompt, torch.Tensor):
            raise TypeError(
                f"a prompt is a tensor of tokens of shape (samples, length), got {type(prompt).__name__}; "
                "pass its mask as attention_mask="
            )
        if self._shared_by > 1:
            raise ValueError(
                f"{self._shared_by} tensor-parallel ranks share sequences, but one token cannot be shared: "
                "to generate, plan without sequence_parallel"
            )
        if num_tokens < 1 or prompt.dim() != 2:
            raise ValueError(
                f"a prompt of shape (samples, length) and at least one new token are needed, got "
                f"{tuple(prompt.shape)} and max_new_tokens={num_tokens}"
            )
        most = getattr(self._model.config, "max_position_embeddings", None)
        # The last new token is never an input, so it needs no position.
        if most is not None and prompt.shape[1] + num_tokens - 1 > most:
            raise ValueError(
                f"{prompt.shape[1]} tokens of the prompt and max_new_tokens={num_tokens} are more than the "
                f"{most} positions of the model; shorten one of them"
            )
        if mask is not None and mask.shape != prompt.shape:
            raise ValueError(
                f"attention_mask must have the shape of the prompt, {tuple(prompt.shape)}, got "
                f"{tuple(mask.shape)}"
            )
        if mask is not None and bool((mask[:, -1] == 0).any()):
            raise ValueError(
                "a prompt ends with padding: pad on the left, so that new tokens follow the last token of "
                "the prompt"
            )
        # Padding has no position.
        lengths = [prompt.shape[1]] if mask is None else (mask != 0).sum(-1).tolist()
        _check_switch(self._model.config, lengths, num_tokens)
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
    ) -> Sampling:
        """Settings by which tokens are chosen; defaults are the model's generation configuration.

        Raises:
            TypeError: A setting is unknown.
            ValueError: The model is configured to generate in an unsupported way, or a setting is for
                sampling without ``do_sample=True``.
        """
        known = [field.name for field in fields(Sampling) if field.name not in ("ends", "pad")]
        if unknown := sorted(set(sampling) - set(known)):
            raise TypeError(
                f"generate() does not take {', '.join(unknown)}; it takes {', '.join(known)}. For other "
                "settings use transformers' own generate"
            )
        configured = getattr(self._model, "generation_config", self._model.config)
        without_effect = _PLAIN | (_PLAIN_SAMPLES if sampling.get("do_sample") else {})
        strange = [
            f"{k}={getattr(configured, k)}"
            for k, plain in without_effect.items()
            if getattr(configured, k, None) not in plain
        ]
        if strange:
            raise ValueError(
                f"the model is configured to generate with {', '.join(strange)}, which is not supported "
                "here: set its generation_config to the defaults, or use transformers' own generate"
            )
        if not sampling.get("do_sample") and sampling:
            ignored = ", ".join(sorted(set(sampling) - {"do_sample"}))
            if ignored:
                raise ValueError(f"{ignored} has an effect only when sampling: pass do_sample=True, too")
        if sampling.get("do_sample"):
            defaults = {k: getattr(configured, k, None) for k in ("temperature", "top_k", "top_p")}
            # To transformers, a top_k of 0 is none.
            defaults["top_k"] = defaults["top_k"] or None
            sampling = {k: value for k, value in defaults.items() if value is not None} | dict(sampling)
        if ends is None:
            ends = configured.eos_token_id
        found = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        if pad is None:
            pad = configured.pad_token_id
        if pad is None:
            pad = found[0] if found else 0
        return Sampling(ends=found, pad=pad, **sampling)


def _length(inputs: Mapping[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(inputs.get(name), torch.Tensor):
            return int(inputs[name].shape[1])
    raise ValueError(
        f"token slices need input_ids or inputs_embeds among the inputs; got {', '.join(inputs) or 'none'}"
    )


def _frequency_limits(config: Any) -> list[tuple[str, int]]:
    """Kinds of rotary frequencies that change with the length of an input, and the tokens up to which not."""
    text = config.get_text_config(decoder=True)
    given = getattr(text, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layers.
    ropes = [rope for rope in given.values() if isinstance(rope, dict)] or [given]
    found = []
    for rope in ropes:
        kind = rope.get("rope_type") or "default"
        if kind == "longrope":
            found.append((kind, rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            found.append((kind, text.max_position_embeddings))
    return found


def _check_frequencies(config: Any, lengths: Sequence[int], positions: torch.Tensor | None) -> None:
    """Raise if a slice would have other rotary frequencies than the whole sequence."""
    limits = _frequency_limits(config) if len(lengths) > 1 else []
    for kind, most in limits:
        first, whole = lengths[0], sum(lengths)
        if positions is not None:  # behind padding there are fewer
            first = int(positions[..., :first].amax(-1).min()) + 1
            whole = int(positions.max()) + 1
        # Of longrope, all slices have the frequencies of long sequences if the first one is long enough.
        if whole <= most or (kind == "longrope" and first > most):
            continue
        instead = f"make the first slice longer than {most} tokens, or " if kind == "longrope" else ""
        raise ValueError(
            f"sequences of {sum(lengths)} tokens cannot be cut into slices of {list(lengths)}: this model "
            f"has other rotary frequencies ({kind}) for inputs of more than {most} tokens, and its slices "
            f"would not have those of whole sequences; {instead}train without token_slices"
        )


def _check_switch(config: Any, lengths: Sequence[int], num_tokens: int) -> None:
    """Raise if rotary frequencies would change while ``num_tokens`` follow prompts of ``lengths`` tokens."""
    for kind, most in _frequency_limits(config):
        # The last new token is never an input.
        crossing = [length for length in lengths if length <= most < length + num_tokens - 1]
        if kind == "longrope" and crossing:
            raise ValueError(
                f"{max(crossing)} tokens of a prompt and max_new_tokens={num_tokens} pass token {most}, "
                "behind which this model has other rotary frequencies (longrope) for all tokens, also for "
                f"those in its cache: pass max_new_tokens={most - max(crossing) + 1} or fewer, or longer "
                "prompts"
            )


def _check(inputs: Mapping[str, Any], length: int) -> None:
    for name, reason in _REFUSED.items():
        if inputs.get(name) is not None:
            raise ValueError(f"{name} cannot be an input of token slices: {reason}")
    mask, positions = inputs.get(MASK), inputs.get("position_ids")
    if mask is not None and tuple(mask.shape[1:]) != (length,):
        raise ValueError(
            f"token slices need an attention_mask of shape (samples, {length}), got {tuple(mask.shape)}"
        )
    jumps = None if positions is None else positions.diff(dim=-1) != 1
    if jumps is not None and mask is not None:
        jumps = jumps & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)  # those at padding mean nothing
    if jumps is not None and bool(jumps.any()):
        raise ValueError(
            "position_ids that do not increase by one mark several sequences packed into one, which token "
            "slices with a cache would mix: pass the sequences separately, or an attention_mask that is 0 "
            "where it is padding"
        )
