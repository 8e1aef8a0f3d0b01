"""Descriptions with more blocks are those of the model that has them."""

from dataclasses import replace

import pytest
from torch import nn

from osdp import ModelDesc
from osdp.cluster.known_transformers import SHAPES
from osdp.integrations.huggingface.models import token_batch
from osdp.integrations.huggingface.shaped_models import model_of_shape
from osdp.model.more_blocks import with_more_blocks
from tests.helpers.stage_nets import TiedNet, batch


def described(name: str, layers: int) -> ModelDesc:
    model = model_of_shape(replace(SHAPES[name], layers=layers, sequence=64))
    return ModelDesc.from_module(model, token_batch(1, 64))


@pytest.mark.parametrize("name", ["gpt2", "llama2-70b", "bert-large"])
def test_many_blocks_are_described_as_if_they_were_traced(name: str) -> None:
    few = described(name, 4)
    assert with_more_blocks(few, 4) == few
    assert with_more_blocks(few, 9) == described(name, 9)


def test_blocks_of_a_sequential_that_share_an_embedding_with_the_head() -> None:
    few, many = (ModelDesc.from_module(TiedNet(layers=layers), batch(2)) for layers in (5, 8))
    assert with_more_blocks(few, 8) == many


def test_what_has_no_middle_is_refused() -> None:
    few = ModelDesc.from_module(TiedNet(layers=3), batch(2))
    with pytest.raises(
        ValueError, match=r"8 blocks of TiedNet takes at least 4 .* got blocks\.0, blocks\.1, blocks"
    ):
        with_more_blocks(few, 8)
    few = ModelDesc.from_module(TiedNet(layers=5), batch(2))
    with pytest.raises(ValueError, match="TiedNet has 5 blocks, more than the 4 to describe"):
        with_more_blocks(few, 4)
    odd = TiedNet(layers=6)
    odd.blocks[2].up, odd.blocks[2].down = nn.Linear(8, 24), nn.Linear(24, 8)
    with pytest.raises(ValueError, match=r"the blocks blocks\.1 to blocks\.4 of TiedNet are not alike"):
        with_more_blocks(ModelDesc.from_module(odd, batch(2)), 8)
