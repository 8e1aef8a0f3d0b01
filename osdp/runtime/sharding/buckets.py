"""Gradient buckets of replicated parameters: one all-reduce per bucket, overlapped with backward.

A bucket holds the gradients of one NO_SHARD unit in one flat tensor. As gradients arrive from autograd they
are scaled by 1/N into their slice of it and freed; the last one starts an asynchronous all-reduce. Buckets
start in one fixed order, the reverse of first use, whatever the order in which they fill, since ranks must
agree::

    backward     g3 g2        g1      g0
    bucket B     [g3|g2]→ all-reduce
    bucket A                  [g1     g0]→ all-reduce

The mean is linear, so an existing gradient (the same on all ranks) may be reduced again together with what is
added to it: accumulation over microbatches needs no second buffer. Where the contribution of a backward must
be kept apart from earlier gradients, for hooks or settings, the parameter's ``GradientPath`` holds those
meanwhile.

Of SHARD_OPTIMIZER the optimizer sees the rows of its rank alone; a bucket of such a unit may be reduced by an
exchange of them instead (``Route.EXCHANGE``). Its gradients lie by rank, so that one message takes all.

The bucket that starts last may carry one flag for each parameter: by then this rank knows which of them it
used, and after the all-reduce which of them any rank used. Nothing else has to be sent for that.
"""

import weakref
from collections.abc import Collection, Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from osdp.comm.averaging import Reduction
from osdp.comm.bucket_layouts import BucketLayout, InOrder, RowsByRank
from osdp.comm.collectives import wait_until_released
from osdp.comm.part_exchange import PartExchange
from osdp.plan.shard_math import ADDED_AT_ONCE
from osdp.runtime.module.group_dtensor import compute_as_whole
from osdp.runtime.sharding.gradients import AllReduceHook
from osdp.runtime.sharding.replicated import ParameterSteppedInShards, ReplicatedParameter
from osdp.torch_private.distributed import memory_uses, storage_uses
from osdp.torch_private.dtensor import wrap_like


class _Content(Enum):
    NOTHING = 0
    SCALED = 1  # a local sum, times the scale
    REDUCED = 2  # an earlier gradient, the same on all ranks, not scaled


#: How often the memory of a gradient is held that no other tensor shares: by itself and by who asks.
_OWN_USES = 2


class Bucket:
    """Gradients that share one reduction.

    Args:
        parameters: Trainable parameters of one dtype, in reverse order of first use.
        dtype: Dtype in which gradients are reduced.
        reduction: The all-reduce or the exchange of the bucket.
        num_flags: Number of flags that it carries, behind the gradients.
    """

    def __init__(
        self,
        parameters: Sequence[ReplicatedParameter],
        dtype: torch.dtype,
        reduction: Reduction,
        num_flags: int = 0,
    ) -> None:
        self.parameters = tuple(parameters)
        self._num_flags = num_flags
        self._dtype = dtype
        self._stored_dtype = parameters[0].stored.dtype
        self._reduction = reduction
        # Of SHARD_OPTIMIZER the optimizer sees a shard, of which nothing can be reduced again.
        in_shards = any(isinstance(parameter, ParameterSteppedInShards) for parameter in parameters)
        self._reuses = self._dtype == self._stored_dtype and not in_shards
        self._layout = _layout_of(self.parameters, reduction.group.size(), num_flags)
        self._flat: torch.Tensor | None = None
        #: Where the pieces of each gradient lie in it; empty until they are needed.
        self._places: Sequence[Sequence[torch.Tensor]] = ()
        #: Earlier gradients that are not the bucket's memory, by index, for as long as users hold them.
        self._earlier: dict[int, weakref.ref[torch.Tensor]] = {}
        self._content = [_Content.NOTHING] * len(parameters)
        #: Factor of each parameter's gradient, as settings say.
        self._scales = [self._scale(parameter) for parameter in parameters]
        self._arrived: set[int] = set()
        self._work: dist.Work | PartExchange | None = None
        #: How often the bucket's memory was held before its all-reduce.
        self._uses = 0
        self.started = False

    @property
    def syncs(self) -> bool:
        """Whether this backward reduces the bucket; parameters that do not sync keep their part aside."""
        return any(parameter.path.syncs for parameter in self.parameters)

    @property
    def is_full(self) -> bool:
        """Whether the gradients of all parameters have arrived in this backward."""
        return len(self._arrived) == len(self.parameters)

    def receive(self, index: int) -> None:
        """Move the gradient that autograd left on parameter ``index`` into the bucket.

        Raises:
            RuntimeError: The all-reduce of the bucket has already started.
        """
        parameter = self.parameters[index]
        grad = parameter.compute.grad
        if grad is None:
            return
        if self.started:
            raise RuntimeError(
                f"parameter {parameter.name!r} got a second gradient in one backward, after its all-reduce "
                "had started; use torch.utils.checkpoint with use_reentrant=False"
            )
        # Called for every gradient: a context costs microseconds, and gradients are off in most backwards.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._take(index, parameter, grad)
        else:
            self._take(index, parameter, grad)
        self._arrived.add(index)

    def start(self, flags: Sequence[bool] = ()) -> None:
        """Start the all-reduce of a full bucket; gradients that have not arrived count as zero.

        Args:
            flags: The flags that it carries; all set if empty.
        """
        with torch.no_grad():
            if self._flat is None:
                self._open()
            assert self._flat is not None
            for index, content in enumerate(self._content):
                if content is _Content.SCALED:
                    continue
                for place in self._places_of(index):
                    if content is _Content.NOTHING:
                        place.zero_()  # another rank may have used it
                    elif self._reduction.scale != 1.0:
                        # Alike on all ranks: scaled, the reduction gives it back as it was.
                        place.mul_(self._reduction.scale)
            self._uses = memory_uses(self._flat)
            if self._num_flags:
                sent = self._layout.extras(self._flat).fill_(self._reduction.scale)
                if flags:
                    sent.mul_(torch.tensor(flags, device=sent.device))
        if isinstance(self._layout, RowsByRank):
            self._work = self._reduction.start_exchange(self._layout.regions(self._flat))
        else:
            self._work = self._reduction.start(self._flat)
        self.started = True

    def flags_of_any(self) -> list[bool]:
        """Wait for the all-reduce; returns which of its flags are set on any rank."""
        assert self._flat is not None
        if self._work is not None:
            self._reduction.finish(self._work)
        return [
            flag != 0 for flag in self._layout.own_extras(self._flat, self._reduction.group.rank()).tolist()
        ]

    def finish(self, without_gradient: Collection[str]) -> None:
        """Wait for the all-reduce, and pass the gradients to the stored parameters.

        Args:
            without_gradient: Names of parameters that no rank used; their gradients stay unchanged.
        """
        flat = self._flat
        assert flat is not None
        if self._work is not None:
            self._reduction.finish(self._work)
            self._work = None
        is_reduced_whole = isinstance(self._layout, InOrder)  # messages are waited for with what holds them
        if flat.dtype != self._stored_dtype and flat.device.type == "cpu" and is_reduced_whole:
            # Dropped below, its memory is to be free before the next bucket is cast.
            wait_until_released(flat, self._uses)
        with torch.no_grad():
            hook = self._joint_hook
            if hook is not None:
                hook(self._layout.without_extras(flat))
            if flat.dtype != self._stored_dtype:
                # One cast for all; the gradients handed out are views of its result.
                self._flat = self._layout.without_extras(flat).to(self._stored_dtype)
                self._places = ()
            given = self._given()
            content, earlier = self._content, self._earlier
            # Before users' hooks run: they may already start another pass with these parameters.
            self.reset()
            for index, parameter in enumerate(self.parameters):
                missing = content[index] is _Content.NOTHING and parameter.name in without_gradient
                held = earlier[index]() if index in earlier else None
                _hand_over(parameter, None if missing else given[index], held)

    def _given(self) -> list[torch.Tensor]:
        """What the optimizer is to see of each reduced gradient."""
        if isinstance(self._layout, RowsByRank):
            flat, rank = self._flat, self._reduction.group.rank()
            assert flat is not None
            return [self._layout.part(flat, index, rank) for index in range(len(self.parameters))]
        wholes = [place for (place,) in self._places or self._make_places()]
        return [parameter.own_part(whole) for parameter, whole in zip(self.parameters, wholes, strict=True)]

    def reset(self) -> None:
        """Drop everything that has arrived."""
        if self._work is not None and not self._work.is_completed():
            self._reduction.finish(self._work)
        self._flat = None
        self._places = ()
        self._earlier = {}
        self._work = None
        self._uses = 0
        self.started = False
        self._content = [_Content.NOTHING] * len(self.parameters)
        self._arrived.clear()

    def give_up(self, index: int) -> None:
        """Drop the gradient that was kept for parameter ``index``."""
        if self._flat is not None:
            self._content[index] = _Content.NOTHING
            self._earlier.pop(index, None)
        if all(content is _Content.NOTHING for content in self._content):
            self.reset()

    def end_backward(self) -> None:
        """Keep the gradients that have arrived for the next backward of an accumulation."""
        self._arrived.clear()

    def _take(self, index: int, parameter: ReplicatedParameter, grad: torch.Tensor) -> None:
        """Move ``grad`` of ``parameter`` into the bucket."""
        if self._flat is None and not self._open_with(index, grad):
            self._open()
        parameter.compute.grad = None
        for place, rows in zip(self._places_of(index), self._layout.cut(index, grad), strict=True):
            self._put(index, place, rows)
        self._content[index] = _Content.SCALED

    def _put(self, index: int, view: torch.Tensor, grad: torch.Tensor) -> None:
        """Scale ``grad`` of parameter ``index``, or some rows of it, into its ``view``, or add it there."""
        scale, content = self._scales[index], self._content[index]
        if view.data_ptr() == grad.data_ptr():
            # The gradient shares the bucket's memory (``_open_with``, or autograd added into it): scale it
            # in place.
            if scale != 1.0:
                view.mul_(scale)
        elif content is not _Content.NOTHING:
            if content is _Content.REDUCED:
                view.mul_(self._reduction.scale)
            _add(view, grad, scale)
        elif scale != 1.0 and grad.dtype == self._dtype:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad)
            if scale != 1.0:
                view.mul_(scale)

    def _scale(self, parameter: ReplicatedParameter) -> float:
        """Factor of this rank's gradient: the mean over ranks, or what a divide factor makes of it."""
        factor = parameter.path.divide_factor
        return self._reduction.scale * (1.0 if factor is None else self._reduction.group.size() / factor)

    @property
    def _joint_hook(self) -> AllReduceHook | None:
        """The all-reduce hook if all parameters share it; otherwise hooks are called per parameter."""
        if isinstance(self._layout, RowsByRank):
            return None  # the rows of other ranks are not reduced
        hooks = {id(parameter.path.all_reduce_hook) for parameter in self.parameters}
        return self.parameters[0].path.all_reduce_hook if len(hooks) == 1 else None

    def follow_settings(self) -> None:
        """Apply the gradient settings of its parameters."""
        self._scales = [self._scale(parameter) for parameter in self.parameters]
        joint, syncs = self._joint_hook is not None, self.syncs
        for parameter in self.parameters:
            path = parameter.path
            path.calls_hook = path.all_reduce_hook is not None and not joint
            path.separate = path.all_reduce_hook is not None or (syncs and not path.syncs)

    def _open_with(self, index: int, grad: torch.Tensor) -> bool:
        """Use the gradient of a bucket's only parameter as the bucket, if dtype and strides are right."""
        parameter = self.parameters[index]
        fits = grad.dtype == self._dtype and grad.stride() == parameter.compute.stride()
        if len(self.parameters) > 1 or not fits or parameter.stored.grad is not None:
            return False
        # Parameters that are added after a view get views of one gradient: neither may be changed in place.
        if storage_uses(grad) > _OWN_USES:
            return False
        # In the order of memory, whatever the strides: the view of a channels-last weight has them again.
        self._flat = grad.as_strided((grad.numel(),), (1,))
        return True

    def _open(self) -> None:
        """Allocate the bucket: reuse the memory of gradients of an earlier backward, or take new memory."""
        grads = [parameter.local_grad for parameter in self.parameters]
        self._flat = self._joint_memory(grads) if self._reuses else None
        if self._flat is not None:
            self._content = [_Content.REDUCED] * len(grads)
        else:
            self._flat = torch.empty(
                self._layout.numel, dtype=self._dtype, device=self.parameters[0].compute.device
            )
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if not self._reuses or grad is None:
                continue
            if self._content[index] is _Content.NOTHING:
                for place, rows in zip(self._places_of(index), self._layout.cut(index, grad), strict=True):
                    place.copy_(rows)
                self._content[index] = _Content.REDUCED
                assert parameter.stored.grad is not None
                # Whoever holds that tensor is to see the sum in it, as autograd would add to it in place.
                self._earlier[index] = weakref.ref(parameter.stored.grad)
            # In the bucket now. The stored parameter gets it back with the sum.
            parameter.stored.grad = None

    def _joint_memory(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The bucket of an earlier backward, if its gradients are still the views that were handed out."""
        first = grads[0]
        assert isinstance(self._layout, InOrder)
        numel, offsets = self._layout.numel, self._layout.offsets
        if first is None or first.dtype != self._dtype:
            return None
        storage = first.untyped_storage()
        if storage.nbytes() != numel * first.itemsize:
            return None
        for index, grad in enumerate(grads):
            if (
                grad is None
                or grad.untyped_storage().data_ptr() != storage.data_ptr()
                or grad.storage_offset() != offsets[index]
                or grad.stride() != self.parameters[index].compute.stride()
            ):
                return None
        return first.as_strided((numel,), (1,), 0)

    def _places_of(self, index: int) -> Sequence[torch.Tensor]:
        return (self._places or self._make_places())[index]

    def _make_places(self) -> Sequence[Sequence[torch.Tensor]]:
        assert self._flat is not None
        self._places = self._layout.places(self._flat)
        return self._places


def _add(total: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
    """Add ``scale * grad`` to ``total``."""
    if total.dtype == grad.dtype or total.device.type != "cpu" or not grad.dim():
        total.add_(grad, alpha=scale)
        return
    # On CPUs torch copies all that it is given into the dtype of the result first.
    rows = ADDED_AT_ONCE * len(grad) // max(grad.numel(), 1)
    if rows:
        for part, more in zip(total.split(rows), grad.split(rows), strict=True):
            part.add_(more, alpha=scale)
        return
    for row, more in zip(total, grad, strict=True):
        _add(row, more, scale)


def _layout_of(parameters: Sequence[ReplicatedParameter], ranks: int, num_flags: int) -> BucketLayout:
    tensors = [parameter.compute for parameter in parameters]
    if all(isinstance(p, ParameterSteppedInShards) and p.by_exchange for p in parameters):
        return RowsByRank(tensors, ranks, num_flags)
    return InOrder(tensors, num_flags)


def _hand_over(parameter: ReplicatedParameter, grad: torch.Tensor | None, into: torch.Tensor | None) -> None:
    """Pass ``grad`` to the stored parameter, in the tensor ``into`` if that held an earlier gradient."""
    stored = parameter.stored
    is_plain = not isinstance(stored, DTensor)
    if is_plain and into is None and not parameter.path.is_held and stored.grad is None:
        stored.grad = grad  # as nearly always
        return
    if parameter.path.is_held:
        given = wrap_like(grad, stored) if grad is not None and isinstance(stored, DTensor) else grad
        compute_as_whole(given)
        if stored.grad is not None:
            # Autograd accumulated one directly on the stored parameter (a weight penalty, say), the same on
            # all ranks.
            given = stored.grad if given is None else given.add_(stored.grad)
        parameter.path.deliver(stored, given)
        return
    if grad is None:
        return
    earlier = parameter.local_grad
    if earlier is not None:
        earlier.add_(grad)
        return
    if into is not None:
        stored.grad = into
        assert parameter.local_grad is not None
        parameter.local_grad.copy_(grad)
        return
    stored.grad = wrap_like(grad, stored) if isinstance(stored, DTensor) else grad
