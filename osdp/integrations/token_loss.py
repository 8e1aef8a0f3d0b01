"""Losses of slices of a sequence: sums over positions, whose labels were shifted over the whole sequence."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_outputs import CausalLMOutputWithPast

from osdp.integrations.huggingface import causal_lm_loss, masked_lm_loss
from osdp.runtime.losses import LossFn

#: Positions of the sequences that a loss is tried on.
_TRIED = 4


def next_token_labels(labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """For each position the label of the next one, for the last one ``ignore_index``.

    Args:
        labels: Token ids of whole sequences, of shape ``(samples, length)``.
        ignore_index: Label of positions that do not count.

    >>> next_token_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


def by_position(loss_fn: LossFn | None, targets: Any) -> tuple[LossFn, Any]:
    """A loss that is a sum over positions, and what it wants: the given ones, or the same shifted before.

    Raises:
        ValueError: There is no loss function.
    """
    plain = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if plain is causal_lm_loss and isinstance(targets, torch.Tensor):
        options = loss_fn.keywords if isinstance(loss_fn, partial) else {}
        return partial(masked_lm_loss, **options), next_token_labels(targets, **options)
    if loss_fn is None:
        raise ValueError(
            "token slices need loss_fn=: the model's own loss shifts labels inside of each slice and takes "
            "means; pass labels as targets, with osdp.integrations.huggingface.causal_lm_loss"
        )
    return loss_fn, targets


def check_by_position(loss_fn: LossFn, targets: Any, length: int, vocabulary: int) -> None:
    """Refuse a loss that is not, with its count, the sum of those of the parts of a sequence.

    It is tried on random logits, the same on all ranks.

    Args:
        loss_fn: The loss function.
        targets: What it gets beside the output, of ``length`` positions along dim 1.
        length: Positions of a sequence.
        vocabulary: Channels of the logits.

    Raises:
        ValueError: It is not.
    """
    samples, tried = _samples(targets, length), min(length, _TRIED)
    if tried < 2:
        return
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(samples, tried, vocabulary, generator=generator)

    def values(start: int, stop: int) -> tuple[float, float]:
        def part(leaf: Any) -> Any:
            along = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
            return leaf[:samples, start:stop].cpu() if along else leaf

        output = CausalLMOutputWithPast(logits=logits[:, start:stop])
        given = () if targets is None else (tree_map(part, targets),)
        with torch.no_grad():
            loss = loss_fn(output, *given)
        if not isinstance(loss, tuple) or len(loss) != 2:
            raise ValueError(
                "the loss of token slices must be a pair (sum, count), over which slices add up; this "
                f"loss_fn returns {type(loss).__name__}, as a mean would be"
            )
        return float(loss[0]), float(loss[1])

    (total, count), halves = values(0, tried), (values(0, tried // 2), values(tried // 2, tried))
    sums = [sum(column) for column in zip(*halves, strict=True)]
    if abs(sums[0] - total) > 1e-3 * max(1.0, abs(total)) or abs(sums[1] - count) > 1e-3 * max(1.0, count):
        raise ValueError(
            f"the loss mixes positions: over {tried} positions it is {total:.6g} of {count:g}, over its two "
            f"halves together {sums[0]:.6g} of {sums[1]:g}. Shift labels over the whole sequence first "
            "(osdp.integrations.token_loss.next_token_labels) and let loss_fn take each position for itself"
        )


def _samples(targets: Any, length: int) -> int:
    found = [
        leaf
        for leaf in tree_leaves(targets)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
    ]
    if targets is not None and not found:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
        raise ValueError(
            f"targets of shape (samples, {length}) are needed, cut as the sequences are; got {shapes}"
        )
    return min(2, len(found[0])) if found else 1
