"""Operators that run in slices of their weight, one of which is gathered at a time.

Each is numerically the operator it replaces: one bias, the same weight, inputs of any number of dimensions,
sizes that the number of slices does not divide.

    output slices   y[:, j] = x @ W[j].T + b[j]         for each slice j of the output
    input slices    y = b + sum_j x[:, j] @ W[:, j].T   for each slice j of the input
    embedding       y[t] = W[j][id_t - start_j]         for each slice j of the vocabulary, tokens in it
    head and loss   log-sum-exp over the slices j of the vocabulary, one after the other (online softmax,
                    Milakov and Gimelshein, arXiv:1805.02867): the logits of one slice exist at a time

Backward gathers each slice once more, except those kept from forward, and reduces its gradient before the
next one.
"""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from osdp.errors import NoGradientError
from osdp.nn.sliced_weight import SlicedWeight, SliceOptions, has_compute_parameter, local_of
from osdp.torch_private.autograd import is_asked_for, will_run


def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_slices: int,
    by: str = "output",
    transposed: bool = False,
    num_kept: int = 0,
    **options: Unpack[SliceOptions],
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` in slices.

    Args:
        x: Input of shape ``(..., in_features)``.
        weight: Matrix of shape ``(out_features, in_features)``: whole, or a DTensor sharded along the
            dimension that is not sliced.
        bias: Of shape ``(out_features,)``, whole.
        num_slices: Number of slices.
        by: ``"output"`` or ``"input"``: the features that are sliced.
        transposed: Whether ``weight`` has shape ``(in_features, out_features)``, as in transformers'
            ``Conv1D``.
        num_kept: How many slices, the last ones, stay gathered from forward to backward; 0 in what is
            recomputed, whose backward comes right after.
        **options: How slices are gathered and reduced (:class:`osdp.nn.sliced_weight.SliceOptions`).

    Returns:
        Output of shape ``(..., out_features)``.

    Raises:
        ValueError: ``by`` is unknown, the weight cannot be sliced that way, or ``num_kept`` exceeds
            ``num_slices``.
        RuntimeError: The shapes do not fit.
    """
    if by not in ("output", "input"):
        raise ValueError(f"a linear operator is cut by 'output' or 'input' features, not {by!r}")
    out_dim = 1 if transposed else 0
    if x.shape[-1] != weight.shape[1 - out_dim]:
        raise RuntimeError(  # as torch's own operators do
            f"the input has {x.shape[-1]} features, the weight takes {weight.shape[1 - out_dim]}"
        )
    x, bias, dtype = _autocast(x, bias, weight)
    sliced_dim = out_dim if by == "output" else 1 - out_dim
    sliced = SlicedWeight.of(
        weight,
        num_slices,
        sliced_dim,
        dtype=dtype,
        num_kept=num_kept if _may_need_backward(x) else 0,
        **options,
    )
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _LinearSlices.apply(  # type: ignore[no-untyped-call]
        flat, _local(weight), bias, sliced, out_dim, _stored(weight)
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


def split_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_slices: int,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[SliceOptions],
) -> torch.Tensor:
    """``F.embedding(ids, weight, padding_idx)`` in slices of the vocabulary.

    Args:
        ids: Integers of any shape.
        weight: Matrix of shape ``(vocabulary, features)``: whole, or a DTensor sharded along dim 1.
        num_slices: Number of slices.
        padding_idx: Row that gets no gradient.
        dtype: Dtype of the result; that of the weight if ``None``.
        **options: How slices are gathered and reduced (:class:`osdp.nn.sliced_weight.SliceOptions`).

    Returns:
        Rows of shape ``(*ids.shape, features)``; on devices other than the CPU, zeros for ids outside the
        vocabulary.

    Raises:
        IndexError: On the CPU, an id is outside the vocabulary.
    """
    sliced = SlicedWeight.of(
        weight,
        num_slices,
        0,
        dtype=dtype,
        **options,
    )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    if _can_check_values(ids):
        outside = ids[(ids < 0) | (ids >= weight.shape[0])]
        if outside.numel():
            raise IndexError(f"id {int(outside[0])} is outside the vocabulary of {weight.shape[0]}")
    rows: torch.Tensor = _EmbeddingSlices.apply(  # type: ignore[no-untyped-call]
        ids.reshape(-1), _local(weight), sliced, padding, _stored(weight)
    )
    return rows.reshape(*ids.shape, rows.shape[-1])


def split_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_slices: int,
    ignore_index: int = -100,
    num_kept: int = 0,
    **options: Unpack[SliceOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of ``hidden @ weight.T`` in slices of the vocabulary, without ever storing all logits.

    Args:
        hidden: Of shape ``(..., features)``.
        weight: Matrix of shape ``(vocabulary, features)``: whole, or a DTensor sharded along dim 1.
        labels: Integers of shape ``(...)``; positions of ``ignore_index`` do not count.
        num_slices: Number of slices.
        ignore_index: The label of positions that do not count.
        num_kept: How many slices, the last ones, stay gathered from forward to backward; 0 in what is
            recomputed, whose backward comes right after.
        **options: How slices are gathered and reduced (:class:`osdp.nn.sliced_weight.SliceOptions`).

    Returns:
        The sum of the losses (fp32, or fp64 for fp64 inputs) and the number of positions that count.

    Raises:
        ValueError: The shapes of ``labels`` and ``hidden`` differ, or a label is outside the vocabulary.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} for hidden {tuple(hidden.shape)}")
    hidden, _, dtype = _autocast(hidden, None, weight)
    sliced = SlicedWeight.of(
        weight,
        num_slices,
        0,
        dtype=dtype,
        num_kept=num_kept if _may_need_backward(hidden, weight) else 0,
        **options,
    )
    flat = labels.reshape(-1)
    counts = flat != ignore_index
    if _can_check_values(flat):
        outside = flat[counts & ((flat < 0) | (flat >= weight.shape[0]))]
        if outside.numel():
            raise ValueError(f"label {int(outside[0])} is outside the vocabulary of {weight.shape[0]}")
    loss: torch.Tensor = _HeadAndLoss.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), _local(weight), flat, counts, sliced, _stored(weight)
    )
    return loss, counts.sum()


def _autocast(
    x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """The input, the bias and the compute dtype, cast as autocast would cast them for a matrix product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:  # which autocast leaves alone
        return x, bias, x.dtype
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), None if bias is None else bias.to(dtype), dtype


def _may_need_backward(*inputs: torch.Tensor) -> bool:
    """Whether a backward through ``inputs``, which needs the slices again, may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``weight``; its gradients become those of the DTensor."""
    return local_of(weight) if isinstance(weight, DTensor) else weight


def _stored(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight`` if operators compute with another tensor in its place.

    Functions take it only to be in its graph: ``torch.autograd.grad`` may be asked for the gradient by it.
    """
    if torch.compiler.is_compiling() or not isinstance(weight, DTensor):
        return None
    return weight if has_compute_parameter(weight) else None


def _asked_for(ctx: Any) -> torch.Tensor | None:
    """Zeros of the shape of the whole weight if ``torch.autograd.grad`` is asked for the gradient by it.

    That is this rank's own, as of a weight that is not sharded.

    Raises:
        NoGradientError: ``backward(inputs=...)`` is asked to accumulate it, which nobody would reduce.
    """
    if not ctx.has_stored:
        return None
    stored, compute = (ctx.next_functions[index][0] for index in (-1, 1))
    if stored is None:
        return None
    if not is_asked_for(stored):
        if will_run(stored) and not will_run(compute):
            raise NoGradientError
        return None
    whole: torch.Tensor = ctx.saved_tensors[1].new_zeros(ctx.sliced.shape)
    return whole


class _LinearSlices(torch.autograd.Function):
    """``y[:, j] = x @ W_j + b_j`` by output slices, ``y = b + sum_j x[:, j] @ W_j`` by input slices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sliced: SlicedWeight,
        out_dim: int,
        stored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_stored = stored is not None
        ctx.sliced, ctx.out_dim, ctx.has_bias, ctx.kept = sliced, out_dim, bias is not None, {}
        by_output = sliced.sliced_dim == out_dim
        width = sliced.bounds[-1][1] if by_output else sliced.sharded_size
        y = x.new_zeros(x.shape[0], width, dtype=x.dtype if by_output else _sum_dtype(x))
        sliced.before_forward()
        with _no_autocast(x):
            for _, start, stop, part in sliced.gather_slices(weight, ctx.kept):
                rows = part if out_dim == 0 else part.t()  # (outputs, inputs) of the slice
                if by_output:
                    y[:, start:stop] = F.linear(x, rows, None if bias is None else bias[start:stop])
                else:
                    _add_product(y, x[:, start:stop], rows.t())
                del part, rows  # before the next one is gathered
        if bias is not None and not by_output:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), sliced, out_dim = ctx.saved_tensors, ctx.sliced, ctx.out_dim
        grad, by_output = grads[0], sliced.sliced_dim == out_dim
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = torch.zeros_like(x, dtype=_sum_dtype(x)) if needs_x else None
        whole = _asked_for(ctx)
        grad_weight = torch.empty_like(weight) if needs_weight and whole is None else None
        reduces = grad_weight is not None
        sliced.before_backward(needs_x=needs_x, needs_weight=reduces, kept=bool(ctx.kept))
        # The gradient of the weight needs no weight: slices are gathered for that of x only.
        slices = sliced.regather_slices(weight, ctx.kept) if needs_x else _bounds(sliced)
        for index, start, stop, part in slices:
            mine = slice(start, stop)
            its_x, its_grad = (x, grad[:, mine]) if by_output else (x[:, mine], grad)
            if grad_x is not None and part is not None:
                target = grad_x if by_output else grad_x[:, mine]
                _add_product(target, its_grad, part if out_dim == 0 else part.t())
                del part
            if grad_weight is not None or whole is not None:
                made = its_grad.t() @ its_x if out_dim == 0 else its_x.t() @ its_grad
                sliced.put_gradient(made, grad_weight, whole, index)
                del made  # before the next slice is gathered
        grad_bias = grad.sum(0) if needs_bias and ctx.has_bias else None
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias, None, None, whole


class _EmbeddingSlices(torch.autograd.Function):
    """Embedding rows, slice by slice of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        sliced: SlicedWeight,
        padding: int,
        stored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.has_stored = stored is not None
        ctx.sliced, ctx.padding = sliced, padding
        rows = weight.new_zeros(ids.shape[0], sliced.sharded_size, dtype=sliced.dtype)
        sliced.before_forward()
        for _, start, stop, part in sliced.gather_slices(weight):
            place, inside = _places(ids, start, stop)
            torch.where(inside[:, None], part[place], rows, out=rows)
            del part  # before the next one is gathered
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (ids, weight), sliced = ctx.saved_tensors, ctx.sliced
        grad = grads[0]
        whole = _asked_for(ctx)
        grad_weight = torch.empty_like(weight) if whole is None else None
        sliced.before_backward(needs_x=False, needs_weight=whole is None, kept=False)
        for index, (start, stop) in enumerate(sliced.bounds):
            place, inside = _places(ids, start, stop)
            counts = inside & (ids != ctx.padding)
            # In 16 bits the rows of frequent ids would stop growing.
            made = grad.new_zeros(stop - start, sliced.sharded_size, dtype=_sum_dtype(grad))
            made.index_add_(0, place, (grad * counts[:, None]).to(made.dtype))
            sliced.put_gradient(made, grad_weight, whole, index)
            del made  # before the next one is made
        return None, grad_weight, None, None, whole


class _HeadAndLoss(torch.autograd.Function):
    """Sum of ``logsumexp(h @ W.T) - (h @ W.T)[label]`` over the positions that count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        sliced: SlicedWeight,
        stored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.kept, ctx.has_stored = {}, stored is not None
        exact = torch.promote_types(hidden.dtype, torch.float32)
        # Per position, all of shape (num_positions,): the maximum of the logits so far, the sum of
        # exp(logit - maximum) over the slices so far, and the logit of the label.
        highest = hidden.new_full(labels.shape, -torch.inf, dtype=exact)
        total, of_label = torch.zeros_like(highest), torch.full_like(highest, torch.nan)
        sliced.before_forward()
        with _no_autocast(hidden):
            for _, start, stop, part in sliced.gather_slices(weight, ctx.kept):
                logits = (hidden @ part.t()).to(exact)  # (num_positions, slice of the vocabulary)
                del part
                higher = torch.maximum(highest, logits.amax(1))
                place, inside = _places(labels, start, stop)
                of_label = torch.where(inside, logits.gather(1, place[:, None]).squeeze(1), of_label)
                summed = logits.sub_(higher[:, None]).exp_().sum(1)
                total = total * (highest - higher).exp() + summed  # rescaled to the new maximum
                highest = higher
        log_total = total.log().add_(highest)
        ctx.save_for_backward(hidden, weight, labels, counts, log_total)
        ctx.sliced, ctx.exact = sliced, exact
        return torch.where(counts, log_total - of_label, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (hidden, weight, labels, counts, log_total), sliced = ctx.saved_tensors, ctx.sliced
        scale = torch.where(counts, grads[0], 0.0)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=_sum_dtype(hidden)) if needs_hidden else None
        whole = _asked_for(ctx)
        grad_weight = torch.empty_like(weight) if needs_weight and whole is None else None
        reduces = grad_weight is not None
        sliced.before_backward(needs_x=True, needs_weight=reduces, kept=bool(ctx.kept))
        for index, start, stop, part in sliced.regather_slices(weight, ctx.kept):
            logits = (hidden @ part.t()).to(ctx.exact)
            place, inside = _places(labels, start, stop)
            # Gradient of the logits: softmax minus one-hot label, times the gradient of the loss.
            share = logits.sub_(log_total[:, None]).exp_()
            share.scatter_add_(1, place[:, None], -inside[:, None].to(share.dtype))
            share = share.mul_(scale[:, None]).to(hidden.dtype)
            del logits
            if grad_hidden is not None:
                _add_product(grad_hidden, share, part)
            del part
            if grad_weight is not None or whole is not None:
                sliced.put_gradient(share.t() @ hidden, grad_weight, whole, index)
            del share  # before the next slice is gathered
        hidden_gradient = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return hidden_gradient, grad_weight, None, None, None, whole


def _can_check_values(ids: torch.Tensor) -> bool:
    """Whether values can be checked: on other devices that would synchronize, and fake tensors have none."""
    return ids.device.type == "cpu" and not isinstance(ids, FakeTensor)


def _places(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each id in the slice (an arbitrary one for ids outside), and a mask of the ids inside."""
    inside = (ids >= start) & (ids < stop)
    return (ids - start).clamp_(0, stop - start - 1), inside


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which products of slices are summed: in 16 bits one more rounding per slice would show."""
    return torch.promote_types(x.dtype, torch.float32)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _no_autocast(x: torch.Tensor) -> Any:
    # Inputs are already cast; inside, autocast would cache its own copies of slices.
    return torch.autocast(x.device.type, enabled=False)


def _bounds(sliced: SlicedWeight) -> list[tuple[int, int, int, None]]:
    return [(index, start, stop, None) for index, (start, stop) in enumerate(sliced.bounds)]
