"""Shard arithmetic against torch's own sharding, and which modules a unit wraps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osdp.model.description import Operator, Parameter
from osdp.model.fqn import is_inside, unit_modules
from osdp.plan.shard_math import can_shard, padded_numel, shard_numel


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), num_shards=st.integers(1, 8))
def test_shards_are_as_large_as_the_largest_chunk_of_dim_0(shape: list[int], num_shards: int) -> None:
    chunks = torch.chunk(torch.empty(shape), num_shards) if shape[0] else (torch.empty(shape),)
    assert shard_numel(shape, num_shards) == chunks[0].numel()
    assert padded_numel(shape, num_shards) == num_shards * chunks[0].numel() >= torch.empty(shape).numel()


def test_a_scalar_is_its_own_shard_and_cannot_be_sharded() -> None:
    assert shard_numel((), 4) == 1
    scalar, vector = Parameter("a.scale", (), "float32"), Parameter("a.bias", (3,), "float32")
    assert can_shard(operator("a", parameters=(vector,)))
    assert not can_shard(operator("a", parameters=(vector, scalar)))


def operator(name: str, *modules: str, parameters: tuple[Parameter, ...] = ()) -> Operator:
    return Operator(name, modules or (name,), parameters, None, 0, 0)


NAMES = ("embed", "h.0.attn.q", "h.0.attn.k", "h.0.mlp", "h.1.attn.q", "h.1.attn.k", "h.1.mlp", "h.10.mlp")
MODEL = {name: operator(name) for name in NAMES}
CALLED = ("", *NAMES, "h.0", "h.0.attn", "h.1", "h.1.attn", "h.10")


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (("embed",), ("embed",)),
        # As high as nothing else is below: to the block, but not past it into the list of blocks.
        (("h.0.attn.q", "h.0.attn.k", "h.0.mlp"), ("h.0",)),
        (("h.0.attn.q", "h.0.attn.k"), ("h.0.attn",)),
        (("h.0.attn.k", "h.0.mlp"), ("h.0.attn.k", "h.0.mlp")),
        # h.10 is not inside h.1.
        (("h.1.attn.q", "h.1.attn.k", "h.1.mlp"), ("h.1",)),
        (("h.1.mlp", "h.10.mlp"), ("h.1.mlp", "h.10")),
        # All blocks, but the list of blocks has no forward to hook.
        (NAMES[1:], ("h.0", "h.1", "h.10")),
        # The root is never wrapped as a part.
        (NAMES, ("embed", "h.0", "h.1", "h.10")),
    ],
)
def test_a_unit_wraps_the_fewest_modules(names: tuple[str, ...], modules: tuple[str, ...]) -> None:
    assert unit_modules([MODEL[name] for name in names], MODEL.values(), CALLED) == modules


def test_a_tied_operator_brings_all_its_modules() -> None:
    tied = operator("embed", "embed", "head")
    assert unit_modules([tied], [tied, *list(MODEL.values())[1:]], (*CALLED, "head")) == ("embed", "head")


@given(chosen=st.sets(st.sampled_from(NAMES), min_size=1), called=st.sets(st.sampled_from(CALLED)))
def test_units_hold_their_operators_and_no_others(chosen: set[str], called: set[str]) -> None:
    operators = [MODEL[name] for name in NAMES if name in chosen]
    modules = unit_modules(operators, MODEL.values(), called)
    held = {name for name in NAMES if any(is_inside(name, module) for module in modules)}
    assert held == chosen
    assert not any(a != b and is_inside(a, b) for a in modules for b in modules)
