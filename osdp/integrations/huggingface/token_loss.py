"""Losses of token slices: sums over positions, with labels shifted before the sequence is cut."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_outputs import CausalLMOutputWithPast

from osdp.integrations.huggingface.models import causal_lm_loss, masked_lm_loss
from osdp.runtime.losses import LossFn

#: Number of adjacent positions that a loss is tried on, maximum number of places in a sequence to try, and of
#: samples.
_TRIED, _PLACES, _SAMPLES = 4, 16, 2


def next_token_labels(labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """Shift labels: each position gets the label of the next one, the last one ``ignore_index``.

    Args:
        labels: Token ids of whole sequences, of shape ``(samples, length)``.
        ignore_index: Label of positions that do not count.

    >>> next_token_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


def by_position(loss_fn: LossFn | None, targets: Any) -> tuple[LossFn, Any]:
    """A loss that is a sum over positions, and its targets.

    :func:`causal_lm_loss` shifts labels itself: it is replaced by the equivalent loss on shifted labels.
    Others are returned as they are.

    Raises:
        ValueError: There is no loss function.
    """
    plain = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if plain is causal_lm_loss and isinstance(targets, torch.Tensor):
        options = loss_fn.keywords if isinstance(loss_fn, partial) else {}
        return partial(masked_lm_loss, **options), next_token_labels(targets, **options)
    if loss_fn is None:
        raise ValueError(
            "token slices need loss_fn=: the model's own loss shifts labels inside each slice and takes "
            "means; pass labels as targets, with osdp.integrations.huggingface.causal_lm_loss"
        )
    return loss_fn, targets


def check_by_position(
    loss_fn: LossFn, targets: Any, length: int, vocabulary: int, device: torch.device | None = None
) -> bool:
    """Check that a loss and its count are sums over the positions of a sequence.

    The loss is tried on random logits for a few positions, the same on all ranks: its value for all of them
    must be the sum of its values for the two halves.

    Args:
        loss_fn: The loss function.
        targets: Its second argument, with ``length`` positions along dim 1.
        length: Number of positions of a sequence.
        vocabulary: Size of the last dimension of the logits.
        device: Where the loss is computed; by default where the targets are.

    Returns:
        Whether the check was conclusive: it is not if none of the positions that were tried counts.

    Raises:
        ValueError: The loss is not such a sum, or the targets have other shapes.
    """
    like = _like(targets, length)
    if length < 2:
        return True
    samples, tried, place = min(len(like), _SAMPLES), min(length, _TRIED), device or like.device
    generator = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(samples, tried, vocabulary, generator=generator, device="cpu").to(place)

    def values(begin: int, start: int, stop: int) -> tuple[float, float]:
        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            # Cut as microbatches are: also what has one number for each sample.
            own = leaf[:samples] if leaf.dim() and len(leaf) == len(like) else leaf
            along = own.dim() > 1 and own.shape[1] == length
            return (own[:, begin + start : begin + stop] if along else own).to(place)

        given = () if targets is None else (tree_map(part, targets),)
        with torch.no_grad():
            return _sum_and_count(loss_fn(CausalLMOutputWithPast(logits=logits[:, start:stop]), *given))

    # Several places, since the labels at one may all be ignored (padding): those show nothing.
    for begin in range(0, length - tried + 1, max(1, (length - tried) // _PLACES)):
        whole, halves = (
            values(begin, 0, tried),
            (values(begin, 0, tried // 2), values(begin, tried // 2, tried)),
        )
        sums = [sum(column) for column in zip(*halves, strict=True)]
        if any(abs(a - b) > 1e-3 * max(1.0, abs(b)) for a, b in zip(sums, whole, strict=True)):
            raise ValueError(
                f"the loss mixes positions: for random logits at {tried} of them, (sum, count) is "
                f"({whole[0]:.6g}, {whole[1]:g}) for all at once and ({sums[0]:.6g}, {sums[1]:g}) for two "
                "halves. Shift labels over the whole sequence first "
                "(osdp.integrations.huggingface.token_loss.next_token_labels), and let loss_fn treat each "
                "position by itself"
            )
        if whole[1]:
            return True
    return False


def _sum_and_count(loss: Any) -> tuple[float, float]:
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise ValueError(
            "the loss of token slices must be a pair (sum, count), which can be added over slices; this "
            f"loss_fn returns {type(loss).__name__}, like a mean; for language models use "
            "osdp.integrations.huggingface.causal_lm_loss"
        )
    return float(loss[0]), float(loss[1])


def check_targets(targets: Any, length: int) -> None:
    """Check that some of the targets can be cut like sequences of ``length`` tokens.

    Raises:
        ValueError: None of their tensors has ``length`` elements along dim 1.
    """
    _like(targets, length)


def _like(targets: Any, length: int) -> torch.Tensor:
    """A target that is cut, for the number of samples and the device."""
    tensors = [leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
    found = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.shape[1] == length]
    if targets is None:
        return torch.empty(1)
    if not found:
        raise ValueError(
            f"targets of shape (samples, {length}) are needed, to be cut like the sequences; got "
            f"{[tuple(tensor.shape) for tensor in tensors]}"
        )
    return max(found, key=len)
