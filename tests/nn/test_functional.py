"""Operators in slices equal the operators they stand for: one process, and two and three ranks."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from osdp.nn.functional import split_cross_entropy, split_embedding, split_linear
from osdp.nn.sliced_weight import SlicedWeight
from osdp.plan.shard_math import slice_bounds
from tests.helpers.distributed import run

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of ``want``."""
    got, want = got.detach(), want.detach()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


@given(size=st.integers(1, 200), data=st.data())
def test_slices_cover_and_are_equal_but_for_one(size: int, data: st.DataObject) -> None:
    bounds = slice_bounds(size, data.draw(st.integers(1, size)))
    assert [index for start, stop in bounds for index in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(
    features=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    before=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    by=st.sampled_from(["output", "input"]),
    transposed=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    prefetch=st.booleans(),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_linear_is_the_unsplit_one(
    features: tuple[int, int],
    before: list[int],
    by: str,
    transposed: bool,
    has_bias: bool,
    dtype: torch.dtype,
    prefetch: bool,
    data: st.DataObject,
) -> None:
    ins, outs = features
    num_slices = data.draw(st.integers(1, outs if by == "output" else ins))
    x, weight = leaf(*before, ins, dtype=dtype), leaf(outs, ins, dtype=dtype, seed=1)
    bias = leaf(outs, dtype=dtype, seed=2) if has_bias else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    want = F.linear(x, weight, bias)
    want_grads = torch.autograd.grad((want * want).sum(), inputs)
    given_weight = weight.t().contiguous().detach().requires_grad_() if transposed else weight
    num_kept = data.draw(st.integers(0, num_slices))
    got = split_linear(
        x, given_weight, bias, num_slices=num_slices, by=by, transposed=transposed, prefetch=prefetch,
        num_kept=num_kept,
    )  # fmt: skip
    inputs[1] = given_weight
    grads = list(torch.autograd.grad((got * got).sum(), inputs))
    grads[1] = grads[1].t() if transposed else grads[1]
    assert got.shape == want.shape
    for mine, theirs in zip([got, *grads], [want, *want_grads], strict=True):
        assert difference(mine, theirs) <= TOLERANCE[dtype]


def test_weight_gradients_of_output_slices_are_bit_equal() -> None:
    x, weight = leaf(64, 48, dtype=torch.float32), leaf(96, 48, dtype=torch.float32, seed=1)
    grad = torch.randn(64, 96)
    (want,) = torch.autograd.grad(F.linear(x, weight), [weight], grad)
    for num_slices in (1, 2, 4, 8):
        (got,) = torch.autograd.grad(split_linear(x, weight, num_slices=num_slices), [weight], grad)
        assert torch.equal(got, want)


@given(
    vocabulary=st.integers(1, 12),
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    pads=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_embedding_is_the_unsplit_one(
    vocabulary: int, shape: list[int], pads: bool, data: st.DataObject
) -> None:
    num_slices = data.draw(st.integers(1, vocabulary))
    padding = data.draw(st.integers(-vocabulary, vocabulary - 1)) if pads else None
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(3))
    weight = leaf(vocabulary, 5)
    want = F.embedding(ids, weight, padding)
    got = split_embedding(ids, weight, num_slices=num_slices, padding_idx=padding)
    assert torch.equal(got, want)
    wants, gots = (torch.autograd.grad((y * y).sum(), [weight])[0] for y in (want, got))
    assert difference(gots, wants) <= 1e-12


@given(
    vocabulary=st.integers(1, 12),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    dtype=st.sampled_from(list(TOLERANCE)),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_head_and_loss_are_the_unsplit_ones(
    vocabulary: int, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    num_slices = data.draw(st.integers(1, vocabulary))
    hidden, weight = leaf(*shape, 6, dtype=dtype), leaf(vocabulary, 6, dtype=dtype, seed=1)
    labels = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(4))
    ignored = torch.rand(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.3
    labels = labels.masked_fill(ignored, -100)
    logits = F.linear(hidden, weight).flatten(0, -2)
    want = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    want_grads = torch.autograd.grad(want, [hidden, weight])
    num_kept = data.draw(st.integers(0, num_slices))
    got, count = split_cross_entropy(hidden, weight, labels, num_slices=num_slices, num_kept=num_kept)
    grads = torch.autograd.grad(got, [hidden, weight])
    assert int(count) == int((labels != -100).sum())
    error, size = abs(got - want).item(), abs(want).item()
    assert error <= TOLERANCE[dtype] * max(size, 1.0)
    for mine, theirs in zip(grads, want_grads, strict=True):
        assert float((mine - theirs).norm()) <= TOLERANCE[dtype] * max(float(theirs.norm()), 1.0)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    x, weight = leaf(3, 4), leaf(6, 4, seed=1)
    for by in ("output", "input"):
        y = split_linear(x, weight.detach(), num_slices=2, by=by)
        (grad,) = torch.autograd.grad(y.sum(), [x])
        assert difference(grad, weight.sum(0).expand(3, 4)) <= 1e-12
        y = split_linear(x.detach(), weight, num_slices=2, by=by)
        (grad,) = torch.autograd.grad(y.sum(), [weight])
        assert difference(grad, x.sum(0).expand(6, 4)) <= 1e-12


def test_autocast_computes_as_autocast_does() -> None:
    x, weight, bias = (leaf(*shape, dtype=torch.float32) for shape in ((5, 8), (6, 8), (6,)))
    with torch.autocast("cpu", torch.bfloat16):
        want = F.linear(x, weight, bias)
        for by in ("output", "input"):
            got = split_linear(x, weight, bias, num_slices=3, by=by)
            assert got.dtype is torch.bfloat16
            assert difference(got.float(), want.float()) < 1e-2
            (grad,) = torch.autograd.grad(got.float().sum(), [weight])
            assert grad.dtype is torch.float32


def test_autocast_leaves_float64_alone() -> None:
    x, weight = leaf(5, 8), leaf(6, 8, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = split_linear(x, weight, num_slices=3), F.linear(x, weight)
    assert got.dtype is want.dtype is torch.float64
    assert difference(got, want) <= 1e-12


def averaged_under_autocast() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]))
    x = torch.full((1, 2), 256.0 if dist.get_rank() == 0 else 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = split_linear(x, weight, num_slices=2)
    y.float().sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.full_tensor().tolist() == [[128.5] * 2] * 4


def test_gradients_under_autocast_are_averaged_in_the_dtype_of_the_weight() -> None:
    """They were in bfloat16, in which 128 + 0.5 is 128; those of whole operators are in float32."""
    run(2, averaged_under_autocast)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_linear(leaf(2, 4), leaf(3, 4), num_slices=4), "3 cannot be cut into 4 slices"),
        (lambda: split_linear(leaf(2, 4), leaf(3, 4), num_slices=2, by="row"), "not 'row'"),
        (
            lambda: split_linear(leaf(2, 4), leaf(3, 4), num_slices=2, num_kept=3),
            "of 2 slices 3 cannot be kept; 0 to all can",
        ),
        (lambda: split_linear(leaf(2, 4), leaf(3, 4, 2), num_slices=2), "only matrices"),
        (
            lambda: split_cross_entropy(leaf(2, 4), leaf(3, 4), torch.tensor([0, 3]), num_slices=2),
            "label 3 is outside the vocabulary of 3",
        ),
        (
            lambda: split_cross_entropy(leaf(2, 4), leaf(3, 4), torch.tensor([0]), num_slices=2),
            r"labels of shape \(1,\) for hidden \(2, 4\)",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_shapes_that_do_not_fit_raise_what_torch_raises() -> None:
    with pytest.raises(RuntimeError, match="input has 5 features, the weight takes 4"):
        split_linear(leaf(2, 5), leaf(3, 4), num_slices=2)


def test_kept_slices_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not are gathered again in backward; in a second backward, all are."""
    gathered: list[int] = []
    start = SlicedWeight._start_gather

    def counted(self: SlicedWeight, local: torch.Tensor, index: int) -> Any:
        gathered.append(index)
        return start(self, local, index)

    monkeypatch.setattr(SlicedWeight, "_start_gather", counted)
    x, weight = leaf(3, 4), leaf(8, 4, seed=1)
    y = split_linear(x, weight, num_slices=4, num_kept=3).sum()
    assert gathered == [0, 1, 2, 3]
    (first,) = torch.autograd.grad(y, [x], retain_graph=True)
    assert gathered[4:] == [0]
    (again,) = torch.autograd.grad(y, [x])
    assert gathered[5:] == [0, 1, 2, 3]
    assert difference(again, first) <= 1e-12
    with torch.no_grad():
        split_linear(x, weight, num_slices=4, num_kept=3)
    assert gathered[9:] == [0, 1, 2, 3]


def test_kept_slices_are_right_in_what_is_recomputed() -> None:
    x, weight = leaf(3, 4), leaf(8, 4, seed=1)
    want = torch.autograd.grad(F.linear(x, weight).square().sum(), [x, weight])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, weight, num_slices=4, num_kept=2).square()

    got = torch.autograd.grad(checkpoint(forward, x, use_reentrant=False).sum(), [x, weight])
    for mine, theirs in zip(got, want, strict=True):
        assert difference(mine, theirs) <= 1e-12


def sharded_operators() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()

    def shard(weight: torch.Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(dim)]))

    def mean(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    def check(parameter: nn.Parameter, want: torch.Tensor) -> None:
        grad = parameter.grad
        assert isinstance(grad, DTensor) and grad.placements == parameter.placements
        assert difference(grad.full_tensor(), mean(want)) <= 1e-12

    for prefetch in (False, True):
        weight, bias = leaf(7, 5, seed=1), leaf(7, seed=2)
        x = leaf(3, 2, 5, seed=10 + rank)
        want = F.linear(x, weight, bias)
        wants = torch.autograd.grad((want * want).sum(), [x, weight])
        for by, transposed in (("output", False), ("input", False), ("output", True), ("input", True)):
            stored = weight.t() if transposed else weight
            sliced_dim = int((by == "input") != transposed)
            parameter = shard(stored, 1 - sliced_dim)
            mine = x.detach().clone().requires_grad_()
            for num_slices, num_kept in ((1, 0), (2, 1), (4, 0), (4, 3), (4, 4)):
                parameter.grad = mine.grad = None
                got = split_linear(
                    mine, parameter, bias, num_slices=num_slices, by=by, transposed=transposed,
                    prefetch=prefetch, num_kept=num_kept,
                )  # fmt: skip
                assert difference(got, want) <= 1e-12
                (got * got).sum().backward()
                assert difference(mine.grad, wants[0]) <= 1e-12
                check(parameter, wants[1].t().clone() if transposed else wants[1].clone())
        table = leaf(11, 5, seed=3)
        ids = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(rank))
        want = F.embedding(ids, table)
        wants = torch.autograd.grad((want * want).sum(), [table])
        parameter = shard(table, 1)
        got = split_embedding(ids, parameter, num_slices=4, prefetch=prefetch)
        (got * got).sum().backward()
        assert torch.equal(got, want)
        check(parameter, wants[0].clone())
        hidden = leaf(4, 3, 5, seed=20 + rank)
        logits = F.linear(hidden, table).flatten(0, 1)
        want = F.cross_entropy(logits, ids.flatten(), reduction="sum")
        wants = torch.autograd.grad(want, [hidden, table])
        parameter.grad = None
        got, _ = split_cross_entropy(hidden, parameter, ids, num_slices=3, prefetch=prefetch, num_kept=2)
        got.backward()
        assert difference(got, want) <= 1e-12
        assert difference(hidden.grad, wants[0]) <= 1e-12
        check(parameter, wants[1].clone())


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_weights(world_size: int) -> None:
    run(world_size, sharded_operators)


@pytest.mark.parametrize("kind", ["output", "input", "loss"])
def test_backward_frees_the_gradient_of_a_slice_before_the_next_is_gathered(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held until the next one was made: plans with large slices took 2 % more than their limit."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    put, gather = SlicedWeight.put_gradient, SlicedWeight._start_gather

    def putting(self: SlicedWeight, gradient: torch.Tensor, *rest: Any) -> None:
        made.append(weakref.ref(gradient))
        put(self, gradient, *rest)

    def gathering(self: SlicedWeight, local: torch.Tensor, index: int) -> Any:
        alive.append(sum(reference() is not None for reference in made))
        return gather(self, local, index)

    monkeypatch.setattr(SlicedWeight, "put_gradient", putting)
    monkeypatch.setattr(SlicedWeight, "_start_gather", gathering)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    if kind == "loss":
        loss = split_cross_entropy(x, weight, torch.arange(6), num_slices=4)[0]
    else:
        loss = split_linear(x, weight, num_slices=4, by=kind).square().sum()
    loss.backward()
    assert len(made) == 4
    assert len(alive) == 8
    assert not any(alive)


def test_rows_of_frequent_ids_do_not_stop_growing_in_16_bits() -> None:
    """They were summed in bfloat16, in which 256 + 1 is 256."""
    weight = leaf(4, 5, dtype=torch.float32)
    rows = split_embedding(torch.zeros(4096, dtype=torch.long), weight, num_slices=2, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(rows.float().sum(), [weight])
    assert grad[0].tolist() == [4096.0] * 5
