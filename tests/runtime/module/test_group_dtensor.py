"""Sharded parameters compute as whole ones do, together with those on other meshes."""

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from osdp.runtime.module import group_dtensor
from osdp.runtime.module.group_dtensor import GroupDTensor, compute_as_whole
from osdp.runtime.ranks.control import Control
from tests.helpers.distributed import run


def on(mesh: DeviceMesh, seed: int) -> nn.Parameter:
    value = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
    compute_as_whole(parameter)
    return parameter


def parameters() -> list[nn.Parameter]:
    """On the mesh of all ranks, on pairs, on all ranks, on pairs."""
    world, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    found = [on(mesh, seed) for seed, mesh in enumerate((world, pairs, world, pairs))]
    for seed, parameter in enumerate(found):
        parameter.grad = on(parameter.device_mesh, 10 + seed).detach()
    return found


def data_is_assigned() -> None:
    """Torch would change nothing, in silence."""
    for parameter in parameters():
        before = parameter.full_tensor()
        for value in (parameter.data - 0.1 * parameter.grad, parameter.data.clamp(-0.1, 0.1)):
            with pytest.raises(RuntimeError, match="leaves the values of a sharded tensor"):
                parameter.data = value
        parameter.data = parameter.data.to(torch.float64)
        assert torch.equal(parameter.full_tensor(), before)
        parameter.data.copy_(parameter.data * 0.5)
        assert torch.equal(parameter.full_tensor(), before * 0.5)


def test_values_are_not_assigned_through_data() -> None:
    run(4, data_is_assigned)


#: Writes to a part of a tensor; under shards of dim 0 some of them would change a copy.
PARTS: dict[str, tuple[Callable[[torch.Tensor], object], bool]] = {
    "rows": (lambda p: p[:2].zero_(), True),
    "a row": (lambda p: p[-1].mul_(2), True),
    "rows of data": (lambda p: p.data.narrow(0, 1, 2).fill_(1.0), True),
    "a chunk": (lambda p: p.chunk(2)[1].add_(1.0), True),
    "assigned rows": (lambda p: p.__setitem__(slice(0, 2), 0.0), True),
    "an assigned row": (lambda p: p.__setitem__(3, 0.0), True),
    "columns": (lambda p: p[:, :2].zero_(), False),
    "a copy of rows": (lambda p: p[:2].clone().zero_(), False),
    "a diagonal": (lambda p: p.diagonal().zero_(), True),
    "a diagonal of data": (lambda p: torch.diagonal(p.data).fill_(1.0), True),
    "a copy of a diagonal": (lambda p: p.diagonal().clone().zero_(), False),
}


def writes_to_parts() -> None:
    for name, (write, is_refused) in PARTS.items():
        for parameter in parameters():
            whole = parameter.full_tensor().detach()
            with torch.no_grad():
                write(whole)
                if is_refused:
                    with pytest.raises(RuntimeError, match="would change a copy"):
                        write(parameter)
                else:
                    write(parameter)
                    assert torch.equal(parameter.full_tensor(), whole), name


def test_writes_to_rows_are_refused_rather_than_lost() -> None:
    """`weight.grad[:old].zero_()` changed a gathered copy, in silence, where the plan had sharded rows."""
    run(4, writes_to_parts)


def averages_of_another_plan() -> None:
    """An average in one layout, parameters in another."""
    for sharded in parameters():
        value, decay = sharded.full_tensor().detach(), 0.25
        start = torch.ones_like(value)
        expected = start.lerp(value, decay)
        with torch.no_grad():
            alone, listed = start.clone(), [start.clone()]
            alone.lerp_(sharded, decay)
            torch._foreach_lerp_(listed, [sharded], decay)
            assert torch.equal(alone, expected) and torch.equal(listed[0], expected)
            for plain_value in (value, value.clone()):
                shards = torch.ones_like(sharded)
                shards.lerp_(plain_value, decay)
                assert torch.equal(shards.full_tensor(), expected)
            several = [torch.ones_like(sharded), start.clone()]
            torch._foreach_lerp_(several, [value, sharded], decay)
            assert torch.equal(several[0].full_tensor(), expected) and torch.equal(several[1], expected)
            assert torch.equal((sharded - value).full_tensor(), torch.zeros_like(value))


def test_copies_that_were_made_under_another_plan_compute_with_the_parameters() -> None:
    """After a switch a list of averages was plain, and the parameters were not, and training stopped."""
    run(4, averages_of_another_plan)


def plain(tensors: list[nn.Parameter]) -> list[nn.Parameter]:
    whole = [nn.Parameter(tensor.detach().full_tensor()) for tensor in tensors]
    for mine, tensor in zip(whole, tensors, strict=True):
        mine.grad = tensor.grad.full_tensor()
    return whole


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def alike(operation: Callable[[list[nn.Parameter]], Any]) -> None:
    """``operation`` on parameters of two meshes is what it is on whole ones."""
    ours = parameters()
    theirs = plain(ours)
    got, want = operation(ours), operation(theirs)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(whole(got), want)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(whole(mine.detach()), other.detach())
        torch.testing.assert_close(whole(mine.grad), other.grad)
        assert isinstance(mine, GroupDTensor)


def clip(tensors: list[nn.Parameter], **options: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(tensors, 0.1, **options)


def merge(tensors: list[nn.Parameter]) -> None:
    with torch.no_grad():
        tensors[0].add_(tensors[1] @ tensors[2].t() @ tensors[3])
        tensors[1].sub_(tensors[0] * tensors[3])


def step(tensors: list[nn.Parameter], **options: Any) -> None:
    torch.optim.AdamW(tensors, lr=0.1, **options).step()


def lists(tensors: list[nn.Parameter]) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_mul_(tensors, [1.0, 2.0, 3.0, 4.0])
        torch._foreach_add_(tensors, [tensor.grad for tensor in tensors], alpha=0.5)
        return torch.stack([whole(norm) for norm in torch._foreach_norm(tensors)])


def copies(tensors: list[nn.Parameter]) -> None:
    """Copies of several at once, as those of state dicts are, are where the originals are."""
    copied = deepcopy([tensor.detach() for tensor in tensors])
    with torch.no_grad():
        for tensor, copy in zip(tensors, copied, strict=True):
            assert not isinstance(tensor, DTensor) or copy.placements == tensor.placements
            tensor.copy_(2 * copy)


def by_hand(tensors: list[nn.Parameter]) -> torch.Tensor:
    """A norm as a loop adds it up, in both ways to write it."""
    total, other = 0, tensors[1].grad.square().sum()
    for tensor in tensors:
        total += tensor.grad.square().sum()
    other.add_(tensors[0].grad.square().sum())
    return whole(total) + whole(other)


def written(tensors: list[nn.Parameter]) -> None:
    with torch.no_grad():
        tensors[1][:] = tensors[0]
        torch.add(tensors[0], tensors[1], out=tensors[3])
        tensors[2] *= tensors[3]


def beside_plain_matrices() -> None:
    """As optimizers of whole matrices compute; activations are other values on each rank."""
    world = init_device_mesh("cpu", (4,))
    matrix = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    own = matrix + dist.get_rank()
    with torch.no_grad():
        for tensor in parameters()[:1]:
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                matrix @ tensor  # nobody knows whether all ranks have the same
        Control.over(world)
        for tensor in parameters():
            want = matrix @ tensor.full_tensor()
            torch.testing.assert_close(whole(matrix @ tensor), want)
            torch.testing.assert_close(whole(matrix.mm(tensor.grad)), matrix @ tensor.grad.full_tensor())
            with pytest.raises(RuntimeError, match="differs among the ranks"):
                own @ tensor
            # A single number is taken as it is, also where another operand is laid out.
            mask, zero = torch.ones(7, 3, dtype=torch.bool), torch.tensor(0.0, dtype=torch.float64)
            torch.testing.assert_close(whole(torch.where(mask, tensor, zero)), tensor.full_tensor())


def test_plain_matrices_are_whole_where_all_ranks_have_the_same() -> None:
    """Each rank would make its part of ``activations @ weight`` of its own activations."""
    run(4, beside_plain_matrices)


def asked_of_autograd() -> None:
    tensors = parameters()
    found = torch.autograd.grad(sum(tensor.square().sum() for tensor in tensors), tensors)
    for tensor, gradient in zip(tensors, found, strict=True):
        torch.testing.assert_close(whole(gradient), 2 * whole(tensor.detach()))


def numbers_read() -> None:
    """A number read into Python is that of the whole tensor: torch's own DTensors give this rank's part."""
    for tensor in parameters():
        value = tensor.detach().full_tensor()
        norm = tensor.norm().detach()
        if dist.get_rank() == 0:  # the norm was whole before: reading is no collective
            assert norm.item() == float(norm) == pytest.approx(value.norm().item())
            assert f"{norm:.3f}" == f"{value.norm():.3f}"
        (of_list,) = torch._foreach_norm([tensor.detach()])
        assert of_list.item() == pytest.approx(value.norm().item())
        assert (tensor.max() > value.max() - 1).item() and not tensor.isnan().any()
        later = (2 * tensor.detach()).abs()
        assert later.sum().item() == pytest.approx(2 * value.abs().sum().item())
        if dist.get_rank() % 2:
            tensor.detach().to_local().view(-1)[-1:].fill_(float("nan"))
        assert tensor.isnan().any(), "of another rank's shard"


def clipped_at_once() -> None:
    """The norms of all gradients are joined by one all-reduce: read one by one they took one each."""
    tensors = [tensor for tensor in parameters() if tensor.device_mesh.ndim == 1]
    with mock.patch.object(group_dtensor, "_meet") as joined:
        clip(tensors * 3)
    assert joined.call_count <= 1
    tensor = tensors[0]
    largest = tensor.detach().abs().max(dim=-1).values
    assert largest.sum().item() == pytest.approx(
        tensor.detach().full_tensor().abs().max(dim=-1).values.sum().item()
    )
    assert tensor[:1, :1].sum().item() == float(tensor.detach().full_tensor()[0, 0])
    assert deepcopy(tensor).grad is not None


def on_four_ranks() -> None:
    clipped_at_once()
    numbers_read()
    alike(clip)
    alike(lambda tensors: clip(tensors, norm_type=float("inf")))
    alike(lambda tensors: clip(tensors, foreach=True))
    alike(lambda tensors: torch.nn.utils.clip_grad_value_(tensors, 0.1))
    alike(merge)
    alike(lists)
    alike(step)
    alike(lambda tensors: step(tensors, foreach=True))
    alike(lambda tensors: torch.stack([tensor.norm() for tensor in tensors]).sum().detach())
    alike(copies)
    alike(by_hand)
    alike(written)
    asked_of_autograd()
    pair = parameters()[1]
    assert type(pair.shape) is type(pair.size()) is torch.Size
    assert [placement.is_replicate() for placement in deepcopy({"w": pair.detach()})["w"].placements] == [
        True,
        False,
    ]
    mine = parameters()[1]
    (mine.square().sum() + parameters()[0].sum()).backward()
    torch.testing.assert_close(mine.grad.full_tensor(), (2 * mine + on(mine.device_mesh, 11)).full_tensor())
    file = io.BytesIO()
    torch.save(mine.detach(), file)
    file.seek(0)
    # Others read it without osdp.
    assert type(torch.load(file, weights_only=False)) is DTensor
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False), nn.Parameter)


def test_two_meshes_compute_together() -> None:
    run(4, on_four_ranks)
