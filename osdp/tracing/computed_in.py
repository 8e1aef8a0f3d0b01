"""Description of a model that computes in another dtype than its parameters have, as in mixed precision."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from osdp.model.description import ModelDesc, Operator
from osdp.nn.modules import keeps_dtype
from osdp.tracing.loss import LossFn
from osdp.tracing.sample_batch import SampleBatch
from osdp.tracing.tensors import dtype_name
from osdp.tracing.trace import describe


def describe_computed_in(
    model: nn.Module, sample_inputs: Any, dtype: str, *, loss_fn: LossFn | None = None
) -> ModelDesc:
    """Describe ``model`` with the work and activations of ``dtype``, and parameters as they are stored.

    Args:
        model: The model; it may be on ``meta``.
        sample_inputs: As for :meth:`osdp.ModelDesc.from_module`.
        dtype: The dtype of compute, for example ``"bfloat16"``.
        loss_fn: As there.

    Raises:
        ValueError: As there.
    """
    batch = SampleBatch.of(sample_inputs)
    desc = describe(computing_in(model, dtype), batch_in(batch, dtype), loss_fn=loss_fn)
    return as_stored(desc, model, batch, dtype)


def computing_in(model: nn.Module, dtype: str) -> nn.Module:
    """A copy of ``model`` in ``dtype``; modules whose parameters keep theirs are in float32."""
    narrow = deepcopy(model).to(getattr(torch, dtype))
    for module in narrow.modules():
        if keeps_dtype(module):
            module.float()
    return narrow


def batch_in(batch: SampleBatch, dtype: str) -> SampleBatch:
    """The batch with its floating-point numbers in ``dtype``."""
    return batch.map(
        lambda tensor: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
    )


def as_stored(desc: ModelDesc, model: nn.Module, batch: SampleBatch, dtype: str) -> ModelDesc:
    """The description of :func:`computing_in`, or of a part of it, with parameters and batch as stored.

    Args:
        desc: The description.
        model: The model in the dtypes of its parameters.
        batch: Its batch.
        dtype: What ``desc`` computes in.
    """
    stored = {
        name: dtype_name(parameter.dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }

    def of_operator(operator: Operator) -> Operator:
        parameters = tuple(replace(each, dtype=stored[each.name]) for each in operator.parameters)
        return replace(operator, parameters=parameters)

    operators = tuple(map(of_operator, desc.operators))
    return replace(desc, operators=operators, sample=batch.specs, computed_in=dtype)
