"""Modules that run in slices, with the parameters, names and types of the modules they replace.

:class:`SplitLinear`, :class:`SplitEmbedding` and :class:`LMHeadLoss` are for direct use in a model's code;
:func:`make_sliced` turns a module of an existing model into one of its kind that runs in slices.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from osdp.nn.functional import split_cross_entropy, split_embedding, split_linear
from osdp.nn.sliced_weight import SliceOptions, Turns
from osdp.plan.shard_math import slice_bounds

#: Allowed values of ``by`` for each kind of module.
SLICED_BY = {
    "linear": ("output", "input"),
    "conv1d": ("output", "input"),
    "embedding": ("rows",),
    "head": ("rows",),
}


@dataclass(frozen=True, slots=True)
class SliceSetting:
    """Slicing of a module.

    Attributes:
        num_slices: Number of slices.
        by: The slices are of ``"output"`` or ``"input"`` features of a linear module, or of ``"rows"`` of a
            vocabulary.
        prefetch: Whether the next slice is gathered while one computes.
        dtype: Dtype an embedding's rows are gathered in; that of the weight if ``None``.
        reduce_dtype: Dtype gradients are reduced in; that of the weight if ``None``, also under autocast.
        by_exchange: Whether gradients are reduced by an exchange with local sums.
        num_kept: Number of slices that stay gathered from forward to backward; 0 for an embedding, which
            needs them in forward only.
        turns: Orders the module's collectives over all ranks.
    """

    num_slices: int
    by: str
    prefetch: bool = False
    num_kept: int = 0
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    by_exchange: bool = False
    turns: Turns | None = None

    @property
    def options(self) -> SliceOptions:
        """How slices are gathered and reduced."""
        return {
            "reduce_dtype": self.reduce_dtype,
            "prefetch": self.prefetch,
            "by_exchange": self.by_exchange,
            "turns": self.turns,
        }


class SplitLinear(nn.Linear):
    """An ``nn.Linear`` that runs in slices; its parameters are initialised as those of an ``nn.Linear``.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        bias: Whether there is a bias; a single one, whatever the number of slices.
        num_slices: Number of slices.
        by: ``"output"`` or ``"input"``: the features that are sliced.
        prefetch: Whether the next slice is gathered while one computes.
        num_kept: Number of slices, the last ones, that stay gathered from forward to backward.
        **options: ``device`` and ``dtype``, as for ``nn.Linear``.

    Raises:
        ValueError: There are more slices than features, or ``num_kept`` exceeds ``num_slices``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_slices: int,
        by: str = "output",
        prefetch: bool = False,
        num_kept: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.slicing = SliceSetting(num_slices, by, prefetch, num_kept)
        check_slicing(self, self.slicing)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``F.linear(input, weight, bias)``; ``input`` has shape ``(..., in_features)``."""
        return _linear(self, input, transposed=False)


class SplitEmbedding(nn.Embedding):
    """An ``nn.Embedding`` that runs in slices of the vocabulary, initialised as an ``nn.Embedding``.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Features of a row.
        padding_idx: Row that gets no gradient.
        num_slices: Number of slices.
        prefetch: Whether the next slice is gathered while one computes.
        **options: ``device`` and ``dtype``, as for ``nn.Embedding``.

    Raises:
        ValueError: There are more slices than rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        num_slices: int,
        prefetch: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **options)
        self.slicing = SliceSetting(num_slices, "rows", prefetch)
        check_slicing(self, self.slicing)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the ids ``input``, which may have any shape: ``(*input.shape, embedding_dim)``."""
        return _embedding(self, input)


class LMHeadLoss(nn.Module):
    """A language-model head together with its cross-entropy, in slices of the vocabulary.

    Attributes:
        weight: The head's weight, of shape ``(vocabulary, features)``.

    Only the logits of one slice exist at a time. Use it where a model would compute ``head(hidden)`` and then
    ``cross_entropy``; a weight that is tied to an embedding stays tied. It returns a sum and a count, so that
    microbatches and ranks can be weighted correctly: ``total, count = head_loss(hidden, labels)`` and then
    ``loss = total / count``.

    Args:
        head: The head; its parameters are shared, not copied. Heads with a bias are not supported.
        num_slices: Number of slices.
        ignore_index: Label of positions that do not count.
        prefetch: Whether the next slice is gathered while one computes.
        num_kept: Number of slices, the last ones, that stay gathered from forward to backward.

    Raises:
        ValueError: The head has a bias, fewer rows than slices, or fewer slices than are kept.
    """

    def __init__(
        self,
        head: nn.Linear,
        *,
        num_slices: int = 1,
        ignore_index: int = -100,
        prefetch: bool = False,
        num_kept: int = 0,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.ignore_index: int
        self.slicing: SliceSetting
        if head.bias is not None:
            raise ValueError("a head with a bias cannot run together with its loss; only its weight can")
        self.weight = head.weight
        self.ignore_index = ignore_index
        self.slicing = SliceSetting(num_slices, "rows", prefetch, num_kept)
        check_slicing(self, self.slicing)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses and number of positions that count.

        Args:
            hidden: Of shape ``(..., features)``.
            labels: Of shape ``(...)``, already shifted.
        """
        slicing = self.slicing
        return split_cross_entropy(
            hidden,
            self.weight,
            labels,
            num_slices=slicing.num_slices,
            ignore_index=self.ignore_index,
            num_kept=slicing.num_kept,
            **slicing.options,
        )


def keeps_dtype(module: nn.Module) -> bool:
    """Whether a module computes in its own dtype whatever dtype parameters are otherwise computed in.

    Batch norms take inputs of a narrower dtype, but refuse weights that are narrower than their statistics;
    FSDP excludes them from mixed precision as well.
    """
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module that can run in slices, a key of :data:`SLICED_BY`; ``None`` for other modules.

    A subclass with a ``forward`` of its own is of no kind: it may compute something else.
    """
    if isinstance(module, LMHeadLoss):
        return "head"
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_complex():
        return None  # gradients would need conjugates
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward in (nn.Linear.forward, SplitLinear.forward):
        return "linear"
    if isinstance(module, nn.Embedding) and forward in (nn.Embedding.forward, SplitEmbedding.forward):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "embedding" if plain else None
    bases: tuple[Any, ...] = type(module).__mro__
    own = next((base for base in bases if _is_conv1d(base)), None)
    return "conv1d" if own is not None and (forward is own.forward or "slicing" in module.__dict__) else None


def call_of_its_own(module: nn.Module) -> str | None:
    """What a call of ``module`` runs beside the forward of its class, in words; ``None`` if nothing."""
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "was compiled in place, which keeps running that module: compile the module around it"
    return None


def supported_slicing(module: nn.Module) -> tuple[str, int, int] | None:
    """Slicing that a module supports: ``by``, the sliced dimension of its weight, and its number of slices.

    The number is 0 if the plan may choose it; an :class:`LMHeadLoss` has one of its own. ``None`` if the
    module cannot run in slices, or is set to run in one.
    """
    kind = kind_of(module)
    if kind is None or call_of_its_own(module) is not None:
        return None
    by = SLICED_BY[kind][0]
    fixed = cast(SliceSetting, module.slicing).num_slices if kind == "head" else 0
    return (by, sliced_dim(module, by), fixed) if fixed != 1 else None


def _is_conv1d(kind: type[Any]) -> bool:
    # transformers is an optional dependency, so its class is recognized by name.
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def make_sliced(module: nn.Module, slicing: SliceSetting) -> nn.Module:
    """A copy of ``module`` that runs in slices, with the same parameters, buffers and hooks.

    Raises:
        ValueError: The module cannot run in such slices; gives the reason, and the modules that can.
    """
    check_slicing(module, slicing)
    kind = kind_of(module)
    assert kind is not None
    base = type(module)
    made = _RUNS_AS[kind](base) if "slicing" not in module.__dict__ else base
    # Everything registered on it stays registered: parameters are shared, not copied.
    new = made.__new__(made)
    new.__dict__.update(module.__dict__)
    new.__dict__["slicing"] = slicing
    return new


def check_slicing(module: nn.Module, slicing: SliceSetting) -> None:
    """Raise unless ``module`` can run in such slices.

    Raises:
        ValueError: It cannot; gives the reason, and the modules that can.
    """
    kind = kind_of(module)
    if kind is None:
        raise ValueError(
            f"a {type(module).__name__} cannot run in slices: only nn.Linear, transformers' Conv1D, "
            "nn.Embedding without max_norm, scale_grad_by_freq and sparse, and osdp's LMHeadLoss can, with "
            "real weights"
        )
    if slicing.by not in SLICED_BY[kind]:
        raise ValueError(
            f"a {type(module).__name__} is cut by {' or '.join(SLICED_BY[kind])}, not by {slicing.by!r}"
        )
    weight = cast(torch.Tensor, module.weight)
    slice_bounds(weight.shape[sliced_dim(module, slicing.by)], slicing.num_slices)
    if not 0 <= slicing.num_kept <= (0 if kind == "embedding" else slicing.num_slices):
        raise ValueError(
            f"of {slicing.num_slices} slices {slicing.num_kept} cannot be kept gathered from forward to "
            f"backward: {'an embedding needs none there' if kind == 'embedding' else '0 to all can'}"
        )


def slice_along(kind: str, by: str) -> str:
    """``by`` in the terms of a module of ``kind``: rows of an embedding are outputs of the tied head."""
    return by if by in SLICED_BY[kind] else {"output": "rows", "rows": "output"}.get(by, by)


def sliced_dim(module: nn.Module, by: str) -> int:
    """Dimension of the weight that slices are cut along; the other one is sharded."""
    out_dim = 1 if kind_of(module) == "conv1d" else 0
    return 1 - out_dim if by == "input" else out_dim


def _linear(module: Any, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    slicing: SliceSetting = module.slicing
    return split_linear(
        x,
        module.weight,
        module.bias,
        num_slices=slicing.num_slices,
        by=slicing.by,
        transposed=transposed,
        num_kept=slicing.num_kept,
        **slicing.options,
    )


def _embedding(module: Any, ids: torch.Tensor) -> torch.Tensor:
    slicing: SliceSetting = module.slicing
    return split_embedding(
        ids,
        module.weight,
        num_slices=slicing.num_slices,
        padding_idx=module.padding_idx,
        dtype=slicing.dtype,
        **slicing.options,
    )


def _as_linear(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Split{base.__name__}", (base,), {"forward": SplitLinear.forward})


def _as_conv1d(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return _linear(self, x, transposed=True)

    return type(f"Split{base.__name__}", (base,), {"forward": forward})


def _as_embedding(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Split{base.__name__}", (base,), {"forward": SplitEmbedding.forward})


_RUNS_AS = {"linear": _as_linear, "conv1d": _as_conv1d, "embedding": _as_embedding}
