"""How ranks share a model of known dimensions is proven on a narrow one, as its own weights prove it."""

from dataclasses import replace

import pytest

from osdp.cluster.known_transformers import SHAPES
from osdp.integrations.huggingface.models import token_batch
from osdp.integrations.huggingface.shaped_models import blocks_of_shape, model_of_shape, tensor_plan_of_shape
from osdp.tracing.tensor_parallel.derive import derive

#: Models, and whether ranks share the sequence, which they cannot in encoder-decoders.
MODELS = [(name, shared) for name in ("gpt2", "llama3-8b", "bert-large") for shared in (False, True)]


@pytest.mark.parametrize(("name", "shared"), [*MODELS, ("t5-large", False)])
def test_a_narrow_model_proves_what_the_wide_one_does(name: str, shared: bool) -> None:
    shape = replace(SHAPES[name], layers=2, sequence=64, vocabulary=2048)
    if name == "llama3-8b":
        shape = replace(shape, hidden=1024, head_width=64, feed_forward=1536)
    if name == "t5-large":
        shape = replace(shape, decoder_layers=2)
    model = blocks_of_shape(shape, 2)
    for degree in (2, 4):
        expected = derive(model, token_batch(1, 64), degree, sequence_parallel=shared)
        assert tensor_plan_of_shape(model, shape, degree, sequence_parallel=shared) == expected


def test_a_vocabulary_smaller_than_the_hidden_size_is_kept_whole() -> None:
    shape = replace(SHAPES["gpt2"], layers=1, sequence=64, vocabulary=500)
    model = blocks_of_shape(shape, 1)
    plan = tensor_plan_of_shape(model, shape, 2, sequence_parallel=False)
    assert plan == derive(model, token_batch(1, 64), 2)
    assert {"transformer.wte", "lm_head"} <= {kept.module for kept in plan.kept}


def test_heads_and_widths_that_ranks_do_not_divide_are_named_as_they_are() -> None:
    shape = replace(SHAPES["gpt2"], layers=2, sequence=64, feed_forward=3074)
    model = model_of_shape(shape)
    with pytest.raises(ValueError, match="has 12 heads, which 8 tensor-parallel ranks cannot share"):
        tensor_plan_of_shape(model, shape, 8, sequence_parallel=False)
    plan = tensor_plan_of_shape(model, shape, 4, sequence_parallel=False)
    assert any("3074 features are not divisible by 4" in kept.reason for kept in plan.kept)
