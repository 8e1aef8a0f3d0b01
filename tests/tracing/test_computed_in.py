"""Descriptions of models that compute in another dtype than they are stored in."""

import torch
from torch import nn

from osdp.model.description import TensorSpec
from osdp.tracing.computed_in import describe_computed_in
from osdp.tracing.trace import describe


def test_inputs_are_cast_as_in_training_and_described_as_they_are_given() -> None:
    """A batch of floating-point numbers was refused: the layers around it were in another dtype."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    desc = describe_computed_in(model, torch.randn(4, 8), "bfloat16")
    assert desc.sample == (TensorSpec((4, 8), "float32"),)
    assert {p.dtype for operator in desc.operators for p in operator.parameters} == {"float32"}
    wide = describe(model, torch.randn(4, 8))
    (narrow,) = desc.segments[0].outputs
    assert (narrow.dtype, wide.segments[0].outputs[0].dtype) == ("bfloat16", "float32")
