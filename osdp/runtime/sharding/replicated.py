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

A SHARD_OPTIMIZER parameter is stored as a ``Shard(0)`` DTensor, whose local part is a part of the whole
parameter's memory. The optimizer updates it, and keeps states of it alone; after its step the ranks send each
other what they have updated, right into place::

    whole on rank 0   [ stored | of rank 1 ]  ⇄  [ of rank 0 | stored ]   whole on rank 1
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from osdp.comm.collectives import GatherInPlace
from osdp.comm.first_values import broadcast_values
from osdp.comm.messages import PendingMessages
from osdp.plan.shard_math import shard_numel
from osdp.runtime.module.counted_dtensor import CountedDTensor, change_of, count_changes
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.module.parameter_owners import ParameterSites
from osdp.runtime.sharding.gradients import GradientPath
from osdp.torch_private.distributed import is_dense, storage_id
from osdp.torch_private.dtensor import data_pointer
from osdp.torch_private.modules import registered_parameter

#: Elements of a parameter that its checksum is made of.
_SUMMED = 4096


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
        # Sharded parameters compute with plain tensors (masks, averages): that must not depend on the plan.
        compute_as_whole(self.stored)
        self.path = GradientPath()
        local = self.local
        self._casts = compute_dtype is not None and local.is_floating_point() and local.dtype != compute_dtype
        if self._casts:
            copy = torch.empty_like(local, dtype=compute_dtype)
            self.compute = nn.Parameter(copy, requires_grad=self.stored.requires_grad)
            _free(self.compute)
        else:
            self.compute = nn.Parameter(local, requires_grad=self.stored.requires_grad)
        #: The memory of the compute parameter, unless it is a copy.
        self._memory = storage_id(self.compute)

    @property
    def local(self) -> torch.Tensor:
        """The stored values as a plain tensor."""
        with torch.no_grad():
            return self.stored.to_local() if isinstance(self.stored, DTensor) else self.stored.detach()

    def _pointer(self) -> int:
        """Address of :attr:`local`, without the view that it would create."""
        return data_pointer(self.stored)

    def own_part(self, reduced: torch.Tensor) -> torch.Tensor:
        """What the optimizer is to see of a reduced gradient of the whole parameter."""
        return reduced

    @property
    def local_grad(self) -> torch.Tensor | None:
        """The gradient that the optimizer sees at present, as a plain tensor."""
        grad = self.stored.grad
        if grad is None:
            return None
        with torch.no_grad():
            return grad.to_local() if isinstance(grad, DTensor) else grad

    def swap_in(self) -> bool:
        """Register the compute parameter; returns whether that was given other memory, which is lost."""
        if self.compute.requires_grad != self.stored.requires_grad:
            self.compute.requires_grad_(self.stored.requires_grad)
        was_moved = False
        if self._casts:
            _allocate(self.compute)
            self._copy()
        else:
            was_moved = self._follow_storage()
        self.owned.register(self.compute)
        return was_moved

    def refresh(self) -> bool:
        """Register the compute parameter again if something else was registered, with present values.

        Returns:
            As :meth:`swap_in`.
        """
        for module, name in self.owned.places:
            if registered_parameter(module, name) is not self.compute:
                self.owned.register(self.compute)  # torch.func.functional_call registers what it was given
        if self._casts:
            self._copy()  # changes through ``data`` are not counted
            return False
        return self._follow_storage()

    def _copy(self) -> None:
        # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
        self.compute.data.copy_(self.local)

    def _follow_storage(self) -> bool:
        """Let the compute parameter lie where the stored one does; returns whether a user has moved it."""
        if self.compute.data_ptr() == self._pointer():
            return False
        was_moved = storage_id(self.compute) != self._memory  # else the stored one was given other storage
        self.compute.data = self.local
        self._memory = storage_id(self.compute)
        return was_moved

    def swap_out(self) -> None:
        """Register the stored parameter."""
        self.owned.register(self.stored)

    def free_copy(self) -> None:
        """Free the compute parameter if it is a copy."""
        if self._casts:
            _free(self.compute)


class ParameterSteppedInShards(ReplicatedParameter):
    """A parameter that every rank holds whole and updates a shard of.

    Args:
        owned: A plain parameter with the same values on all ranks.
        compute_dtype: Dtype that it is computed in; its own if ``None``.
        mesh: The mesh of the data-parallel ranks.
        by_exchange: Whether ranks exchange parts of its gradient, and each adds up its own.

    Attributes:
        group: The data-parallel ranks.
        by_exchange: As given.
    """

    def __init__(
        self,
        owned: ParameterSites,
        compute_dtype: torch.dtype | None,
        mesh: DeviceMesh,
        *,
        by_exchange: bool,
    ) -> None:
        self.by_exchange = by_exchange
        plain = owned.parameter
        self.group: dist.ProcessGroup = mesh.get_group()
        rows = shard_numel(plain.shape[:1], mesh.size())
        self._bounds = [min(rank * rows, len(plain)) for rank in range(mesh.size() + 1)]
        self._rank = mesh.get_local_rank()
        #: The memory of each rank's shard, made when it is first needed, and the address of this rank's.
        self._parts: list[torch.Tensor] | None = None
        self._own_pointer = 0
        self._whole = plain.detach()
        if not _is_dense_by_rows(self._whole):
            self._whole = self._whole.contiguous()
        value = DTensor.from_local(
            self.own_part(self._whole),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=plain.shape,
            stride=self._whole.stride(),
        )
        owned.register(nn.Parameter(value, requires_grad=plain.requires_grad))
        super().__init__(owned, compute_dtype)
        count_changes(self.stored)
        self._gathered = change_of(self.stored)

    @property
    def local(self) -> torch.Tensor:
        """The values of the whole parameter."""
        return self._whole

    def _pointer(self) -> int:
        return self._whole.data_ptr()

    def own_part(self, reduced: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        return self._rows(reduced, self._rank)

    def _rows(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        start, stop = self._bounds[rank : rank + 2]
        return whole[start:stop]

    def parts_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each rank, flat; ``whole`` has the layout of the whole parameter."""
        rows = [self._rows(whole, rank) for rank in range(len(self._bounds) - 1)]
        return [part.as_strided((part.numel(),), (1,)) for part in rows]

    @property
    def has_changed(self) -> bool:
        """Whether the stored shard has changed since the whole parameter was gathered."""
        return self._gathered != change_of(self.stored)

    def parts(self) -> list[torch.Tensor]:
        """The memory of each rank's shard, one after the other, with this rank's own values in it."""
        stored = self.stored
        converted = stored.dtype != self._whole.dtype
        if self._parts is not None and isinstance(stored, CountedDTensor) and not converted:
            if data_pointer(stored) == self._own_pointer:
                return self._parts  # as nearly always
        if converted or stored.device != self._whole.device:
            self._whole = self._whole.to(stored.device, stored.dtype)
            self._parts = None
        if not isinstance(stored, CountedDTensor):
            count_changes(stored)  # ``module.to`` has exchanged it for another
        if self._parts is None:
            # Through ``data``: autograd must not see a new version of tensors saved for a pending backward.
            self._parts = self.parts_of(self._whole.data)
            self._own_pointer = self._parts[self._rank].data_ptr()
        if data_pointer(stored) != self._own_pointer:
            self.own_part(self._whole).copy_(super().local)  # the stored parameter was given other storage
        return self._parts

    def note_gathered(self) -> None:
        """Record that the whole parameter is made of the present shards."""
        self._gathered = change_of(self.stored)


class ReplicatedParameters:
    """All replicated parameters of a model, swapped together.

    Attributes:
        parameters: The parameters, in the order they were given.
        swapped_in: Whether modules register the compute parameters at present.
        wait: Waits for messages between ranks.
    """

    def __init__(self, parameters: Iterable[ReplicatedParameter]) -> None:
        self.parameters = tuple(parameters)
        self.swapped_in = False
        self.wait: Callable[[PendingMessages], object] = lambda work: work.wait()
        self._has_copies = False
        self._in_shards = [p for p in self.parameters if isinstance(p, ParameterSteppedInShards)]
        #: The parts that were gathered last, and how.
        self._known_gather: tuple[list[list[torch.Tensor]], GatherInPlace] | None = None

    def __iter__(self) -> Iterator[ReplicatedParameter]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def after_step(self, stepped: Collection[int]) -> None:
        """Take over what an optimizer has made of parameters; a collective call.

        Args:
            stepped: Identities of the stored parameters that it had gradients of. They are gathered whether
                or not changes were counted: kernels of other libraries change memory unseen.
        """
        self._gather(p for p in self._in_shards if id(p.stored) in stepped or p.has_changed)

    def gather_changed(self) -> None:
        """Gather the parameters whose shards have changed; a collective call.

        All ranks change them: by an optimizer, or by a state dict that is loaded.
        """
        self._gather(p for p in self._in_shards if p.has_changed)

    def checksums(self) -> dict[str, int]:
        """A number for the values of each parameter that every rank steps by itself, by name."""
        alone = [p for p in self.parameters if not isinstance(p, ParameterSteppedInShards)]
        if not alone:
            return {}
        with torch.no_grad():
            sums: list[int] = torch.stack([_checksum(parameter.local) for parameter in alone]).tolist()
        return {parameter.name: found for parameter, found in zip(alone, sums, strict=True)}

    def _gather(self, parameters: Iterable[ParameterSteppedInShards]) -> None:
        gathered = list(parameters)
        if gathered:
            with torch.no_grad():
                self._gather_of([p.parts() for p in gathered], gathered[0].group).run(self.wait)
            for parameter in gathered:
                parameter.note_gathered()

    def _gather_of(self, parts: list[list[torch.Tensor]], group: dist.ProcessGroup) -> GatherInPlace:
        """The gather of ``parts``, made anew only if they are not those of the last one."""
        known = self._known_gather
        # By identity: a parameter makes another list of its parts where its memory has changed.
        if known is None or list(map(id, known[0])) != list(map(id, parts)):
            self._known_gather = known = parts, GatherInPlace(parts, group)
        return known[1]

    def swap_in(self) -> bool:
        """Register the compute parameters; returns whether they were swapped out before.

        Raises:
            RuntimeError: Some were given other memory meanwhile, which the stored ones do not see; they lie
                where those do again.
        """
        was_in = self.swapped_in
        if was_in:
            moved = [parameter.name for parameter in self.parameters if parameter.refresh()]
        else:
            moved = [parameter.name for parameter in self.parameters if parameter.swap_in()]
        self.swapped_in = self._has_copies = True
        if moved:
            more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
            raise RuntimeError(
                f"{moved[0]!r}{more} was given other memory (p.data = value) in a forward, or before its "
                "backward, while modules had what they compute with in its place: what is trained does not "
                "see that. Change weights after optimizer.step(), by p.copy_(value) under torch.no_grad()"
            )
        return not was_in

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
    owned: ParameterSites,
    mesh: DeviceMesh,
    device: torch.device,
    stored_on: DeviceMesh | None,
    *,
    receives: bool = False,
) -> nn.Parameter:
    """Register ``owned`` as a replicated parameter on ``mesh``, with rank 0's values.

    Args:
        owned: A plain or a tensor-parallel parameter; it may be on ``meta``.
        mesh: The mesh of all data-parallel ranks.
        device: This rank's device.
        stored_on: Mesh of the stored DTensor, if other parameters of the model are DTensors: ``mesh``, or
            ``mesh`` joined with the tensor-parallel mesh. ``None`` stores a plain parameter.
        receives: Whether, on ``meta``, it gets rank 0's values all the same.
    """
    old = owned.parameter
    with torch.no_grad():
        local = old.to_local() if isinstance(old, DTensor) else old.detach()
        if receives or not local.is_meta:
            local = torch.empty_like(local, device=device) if local.is_meta else local.to(device)
            if not is_dense(local):
                local = local.contiguous()  # gradients lie alike, and gaps in a bucket are others' places
            broadcast_values(local, mesh.get_group())
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


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bytes of the first elements of ``tensor``: exact, in whichever order they are added up.

    Of a few elements it costs next to nothing, and they tell enough: noise, or new values, are everywhere.
    """
    for dim, size in enumerate(tensor.shape):
        if tensor.numel() <= _SUMMED:
            break
        tensor = tensor.narrow(dim, 0, max(1, _SUMMED * size // tensor.numel()))
    # Of a row of a transposed tensor, say, reshape(-1) makes a view with gaps, which has no bytes.
    return tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)


def _is_dense_by_rows(tensor: torch.Tensor) -> bool:
    """Whether its rows lie one after the other in memory, each without gaps."""
    by_channels = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.is_contiguous() or by_channels


def _allocate(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
