"""NO_SHARD parameters: stored parameters for the optimizer, plain ones for forward and backward.

In a model with sharded parameters a replicated one is *stored* as a ``Replicate()`` DTensor on their mesh, so
that optimizers, clipping and checkpoints see one kind of tensor. Modules *compute* with a plain parameter in
its place, since every operation on a DTensor costs tens of microseconds::

    between steps          forward ... backward          between steps
    stored (DTensor)  →    compute (plain)          →    stored (DTensor)
                  swap_in                       swap_out

Both share one storage; only with ``param_dtype`` the compute parameter is a copy, filled when it is swapped
in and freed before the optimizer steps: until then another backward may reach it, through a graph that was
retained or that of another forward. Where nothing is sharded, plain parameters are stored: optimizers then
cost the same as without osdp.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.runtime.sharding.gradients import GradientPath
from osdp.torch_private.autograd import version_of
from osdp.torch_private.dtensor import data_pointer
from osdp.torch_private.modules import registered_parameter


class ReplicatedParameter:
    """One parameter that every rank holds whole.

    Attributes:
        owned: The places where it is registered.
        name: The first of its FQNs.
        stored: The parameter that the optimizer sees.
        compute: The parameter that forward and backward use; never the stored one itself, whose hooks and
            gradient autograd would reach before the reduction.
        path: The path of its gradient to the optimizer.
    """

    def __init__(self, owned: ParameterSites, compute_dtype: torch.dtype | None) -> None:
        self.owned = owned
        self.name = owned.name
        self.stored = owned.parameter
        self.path = GradientPath()
        local = self.local
        self._copied = -1
        self._casts = compute_dtype is not None and local.is_floating_point() and local.dtype != compute_dtype
        if self._casts:
            copy = torch.empty_like(local, dtype=compute_dtype)
            self.compute = nn.Parameter(copy, requires_grad=self.stored.requires_grad)
            _free(self.compute)
        else:
            self.compute = nn.Parameter(local, requires_grad=self.stored.requires_grad)

    @property
    def local(self) -> torch.Tensor:
        """The stored values as a plain tensor."""
        with torch.no_grad():
            return self.stored.to_local() if isinstance(self.stored, DTensor) else self.stored.detach()

    @property
    def local_grad(self) -> torch.Tensor | None:
        """The gradient that the optimizer sees at present, as a plain tensor."""
        grad = self.stored.grad
        if grad is None:
            return None
        with torch.no_grad():
            return grad.to_local() if isinstance(grad, DTensor) else grad

    def swap_in(self) -> None:
        """Register the compute parameter."""
        if self.compute.requires_grad != self.stored.requires_grad:
            self.compute.requires_grad_(self.stored.requires_grad)
        if self._casts:
            _allocate(self.compute)
            self._copy()
        elif self.compute.data_ptr() != data_pointer(self.stored):
            self.compute.data = self.local  # the stored parameter was given other storage
        self.owned.register(self.compute)

    def refresh(self) -> None:
        """Register the compute parameter again if something else was registered, and copy changed values."""
        if any(registered_parameter(*place) is not self.compute for place in self.owned.places):
            self.owned.register(self.compute)  # torch.func.functional_call registers what it was given
        if self._casts and version_of(self.stored) != self._copied:
            self._copy()

    def _copy(self) -> None:
        # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
        self.compute.data.copy_(self.local)
        self._copied = version_of(self.stored)

    def swap_out(self) -> None:
        """Register the stored parameter."""
        self.owned.register(self.stored)

    def free_copy(self) -> None:
        """Free the compute parameter if it is a copy."""
        if self._casts:
            _free(self.compute)


class ReplicatedParameters:
    """All replicated parameters of a model, swapped together.

    Attributes:
        parameters: The parameters, in the order they were given.
        swapped_in: Whether modules register the compute parameters at present.
    """

    def __init__(self, parameters: Iterable[ReplicatedParameter]) -> None:
        self.parameters = tuple(parameters)
        self.swapped_in = False
        self._has_copies = False

    def __iter__(self) -> Iterator[ReplicatedParameter]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def swap_in(self) -> bool:
        """Register the compute parameters; returns whether they were swapped out before."""
        if self.swapped_in:
            for parameter in self.parameters:
                parameter.refresh()
            return False
        for parameter in self.parameters:
            parameter.swap_in()
        self.swapped_in = self._has_copies = True
        return True

    def swap_out(self) -> None:
        """Register the stored parameters."""
        if self.swapped_in:
            for parameter in self.parameters:
                parameter.swap_out()
            self.swapped_in = False

    def free_copies(self) -> None:
        """Free the compute parameters that are copies, unless modules register them at present."""
        if self._has_copies and not self.swapped_in:
            for parameter in self.parameters:
                parameter.free_copy()
            self._has_copies = False


def replicate(
    owned: ParameterSites, mesh: DeviceMesh, device: torch.device, stored_on: DeviceMesh | None
) -> nn.Parameter:
    """Register ``owned`` as a replicated parameter on ``mesh``, with rank 0's values.

    Args:
        owned: A plain or a tensor-parallel parameter; it may be on ``meta``.
        mesh: The mesh of all data-parallel ranks.
        device: This rank's device.
        stored_on: Mesh of the stored DTensor, if other parameters of the model are DTensors: ``mesh``, or
            ``mesh`` joined with the tensor-parallel mesh. ``None`` stores a plain parameter.
    """
    old = owned.parameter
    with torch.no_grad():
        local = old.to_local() if isinstance(old, DTensor) else old.detach()
        if not local.is_meta:
            local = local.to(device)
            torch.distributed.broadcast(local, group=mesh.get_group(), group_src=0)
        value = local if stored_on is None else _stored(local, old, stored_on)
    # A new object even where the values keep their storage: see osdp.runtime.module.replaced.
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    owned.register(new)
    return new


def _stored(local: torch.Tensor, old: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """``local`` as a DTensor on ``mesh``, with the placement of ``old``, if any, on the last axis."""
    replicated = [Replicate()] * mesh.ndim
    if not isinstance(old, DTensor):
        return DTensor.from_local(local, mesh, replicated, run_check=False)
    return DTensor.from_local(
        local,
        mesh,
        [*replicated[1:], *old.placements],
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )


def _allocate(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
