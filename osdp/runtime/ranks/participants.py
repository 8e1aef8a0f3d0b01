"""Participants: sharded units and operators in slices, whose forwards and backwards run collectives.

Each can be *joined* by a rank that does not run it: the rank takes part in the all-gather and drops the
result, and takes part in the reduction with zeros. So ranks may run different units (experts without tokens,
LayerDrop) and each collective still has all its ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from osdp.comm.collectives import FlatAllGather, ReduceOp, TwoStepAllGather, scatter_sum, wait_until_released
from osdp.comm.messages import Pending
from osdp.model.fqn import is_inside
from osdp.nn.modules import kind_of, sliced_dim
from osdp.nn.sliced_weight import SlicedWeight
from osdp.plan.sharding import ShardingPlan
from osdp.torch_private.distributed import AllGather, DefaultReduceScatter, ReduceScatter, memory_uses
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.fsdp_comms import (
    comms_of,
    discard_gather,
    finalize_reduction,
    join_gather,
    join_reduction,
    set_comms,
)

#: Number of collective codes that a participant can have.
CODES = 64

#: Codes of a sharded unit.
GATHER, REDUCE = 0, 1
#: What observers are told instead of a collective of slices.
OF_SLICE = -1

#: Compute dtypes of an operator in slices. Its code has the index of the dtype in bits 4 and 5, flags below.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BACKWARD, _NEEDS_X, _NEEDS_WEIGHT, _KEPT = 1, 2, 4, 8


class CollectiveObserver(Protocol):
    """Is told of the collectives of sharded units and slices."""

    def begin(self) -> Any:
        """What stands for the moment at which a collective begins."""

    def end(self, unit: str, code: int, nbytes: int, begin: Any) -> None:
        """A collective has ended; ``code`` is one of a sharded unit, or :data:`OF_SLICE`."""


class Order(Protocol):
    """Orders the collectives of participants over all ranks.

    Attributes:
        observer: Who is told of collectives, if anybody is.
    """

    observer: CollectiveObserver | None

    def before(self, participant: int, code: int) -> None:
        """Return when it is this collective's turn on all ranks."""

    def run(self, start: Callable[[], Pending | None], participant: int, code: int) -> None:
        """Start a collective and wait for it."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for collectives."""


class UnitCollectives:
    """The collectives of a unit that FSDP2 shards.

    Args:
        name: Its name in messages.
        modules: Its modules by FQN.
    """

    def __init__(self, name: str, modules: dict[str, nn.Module]) -> None:
        self.name = name
        self.modules = modules
        self.module = next(iter(modules.values()))

    def watch(self, order: Order, index: int) -> None:
        """Make its collectives ask ``order`` first."""
        gather, reduce = comms_of(self.module)
        set_comms(
            self.module,
            _OrderedGather(gather, order, index, self.name),
            _OrderedReduce(reduce, order, index, self.name),
        )

    def label(self, code: int) -> str:
        """Name of a collective in messages."""
        return f"the {'gather' if code == GATHER else 'reduction'} of the unit of {self.name!r}"

    def join(self, code: int, *, in_backward: bool) -> None:
        """Take part in a collective without running the unit."""
        if code == GATHER:
            join_gather(self.module, in_backward=in_backward)
        else:
            join_reduction(self.module)

    def end_forward(self) -> None:
        """Free the gathered parameters after a forward without gradients that this rank only joined."""
        discard_gather(self.module)

    def end_joined(self) -> bool:
        """Return to idle after a joined backward; ``False`` if a gradient came after the reduction."""
        is_whole = finalize_reduction(self.module)
        discard_gather(self.module)
        return is_whole

    def forward_code(self) -> int:
        """The collective of a forward."""
        return GATHER

    def backward_codes(self, *, reduces: bool) -> tuple[int, ...]:
        """The collectives of a backward, except gathers."""
        return (REDUCE,) if reduces else ()

    def holds(self, other: "Participant") -> bool:
        """Whether the modules of ``other`` are inside its modules."""
        return other is not self and all(
            any(is_inside(fqn, outer) for outer in self.modules) for fqn in other.modules
        )


class SliceCollectives:
    """The collectives of one module of an operator that runs in slices of a sharded weight.

    Args:
        fqn: FQN of the module.
        module: The module.
        kind: Its kind: ``"linear"``, ``"conv1d"``, ``"embedding"`` or ``"head"``.
    """

    def __init__(self, fqn: str, module: nn.Module, kind: str) -> None:
        self.name = fqn
        self.modules = {fqn: module}
        self.module = module
        self._kind = kind
        self._order: Order | None = None
        self._index = -1
        self._last: SlicedWeight | None = None

    def watch(self, order: Order, index: int) -> None:
        """Make its collectives ask ``order`` first."""
        self._order, self._index = order, index
        self.module.slicing = replace(self._slicing, turns=self)

    def before_forward(self, sliced: SlicedWeight) -> None:
        """Called by the operator before its slices are gathered."""
        self._last = sliced
        if self._order is not None:
            self._order.before(self._index, self._dtype_code(sliced.dtype))

    def before_backward(self, sliced: SlicedWeight, *, needs_x: bool, needs_weight: bool, kept: bool) -> None:
        """Called by the operator before slices are gathered again or gradients reduce-scattered."""
        if self._order is not None and (needs_x or needs_weight):
            flags = _BACKWARD | _NEEDS_X * needs_x | _NEEDS_WEIGHT * needs_weight | _KEPT * kept
            self._order.before(self._index, self._dtype_code(sliced.dtype) | flags)

    def wait(self, start: Callable[[], Pending | None]) -> None:
        """Start a collective and wait for it."""
        if self._order is None:
            work = start()
            if work is not None:
                work.wait()
            return
        observer = self._order.observer
        begin = observer.begin() if observer is not None else None
        self._order.run(start, self._index, 0)
        if observer is not None:
            observer.end(self.name, OF_SLICE, 0, begin)

    @property
    def waits(self) -> bool:
        """Whether the host waits for collectives."""
        return self._order is not None and self._order.waits

    def label(self, code: int) -> str:
        """Name of a collective in messages."""
        return f"the {'backward' if code & _BACKWARD else 'forward'} of {self.name!r}, which runs in slices"

    def join(self, code: int, *, in_backward: bool) -> None:
        """Take part in the collectives of all slices without running the operator."""
        del in_backward
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        local = weight.to_local().detach()
        sliced = self._slices(weight, _DTYPES[code >> 4])
        with torch.no_grad():
            if not code & _BACKWARD:
                for _ in sliced.gather_slices(local):
                    pass
                return
            self._join_backward(code, weight, local, sliced)

    def _join_backward(self, code: int, weight: DTensor, local: torch.Tensor, sliced: SlicedWeight) -> None:
        count = len(sliced.bounds)
        kept = {i: local for i in range(count - self._num_kept, count)} if code & _KEPT else {}
        gradient = torch.zeros_like(local) if code & _NEEDS_WEIGHT else None
        slices: Any = (
            sliced.regather_slices(local, kept)
            if code & _NEEDS_X
            else [(index, *bounds, None) for index, bounds in enumerate(sliced.bounds)]
        )
        for index, start, stop, _ in slices:
            if gradient is not None:
                shape = [stop - start, sliced.sharded_size]
                zeros = local.new_zeros(shape if sliced.sliced_dim == 0 else shape[::-1], dtype=sliced.dtype)
                sliced.scatter_gradient(zeros, gradient, index)
        if gradient is not None:
            made = wrap_like(gradient, weight)
            if weight.grad is None:
                weight.grad = made
            else:
                weight.grad.add_(made)

    @property
    def _num_kept(self) -> int:
        return 0 if self._kind == "embedding" else int(self._slicing.num_kept)

    @property
    def _slicing(self) -> Any:
        return self.module.slicing

    def _slices(self, weight: DTensor, dtype: torch.dtype) -> SlicedWeight:
        slicing = self._slicing
        return SlicedWeight.of(
            weight,
            slicing.num_slices,
            sliced_dim(self.module, slicing.by),
            dtype=dtype,
            **(slicing.options | {"turns": self}),
        )

    @staticmethod
    def _dtype_code(dtype: torch.dtype) -> int:
        return _DTYPES.index(dtype) << 4

    def end_forward(self) -> None:
        """No effect: nothing stays gathered."""

    def end_joined(self) -> bool:
        """Always true: nothing stays gathered."""
        return True

    def forward_code(self) -> int:
        """The collectives of a forward, in the dtype of the last one."""
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        dtype = self._last.dtype if self._last is not None else self._slicing.dtype or weight.dtype
        return self._dtype_code(dtype)

    def backward_codes(self, *, reduces: bool) -> tuple[int, ...]:
        """The collectives of a backward in which everything needs a gradient."""
        del reduces  # gradients of slices are reduced in every backward
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        needs_x = self._kind != "embedding"
        flags = _BACKWARD | _NEEDS_X * needs_x | _NEEDS_WEIGHT * weight.requires_grad
        return (self.forward_code() | flags | _KEPT * (self._num_kept > 0),)

    def holds(self, other: "Participant") -> bool:
        """Always false: nothing is inside an operator in slices."""
        del other
        return False


Participant = UnitCollectives | SliceCollectives


def participants_of(model: nn.Module, plan: ShardingPlan) -> list[Participant]:
    """The participants of ``model`` under ``plan``, in the order of first use, outer ones first."""
    position = {fqn: i for i, d in reversed(list(enumerate(plan.decisions))) for fqn in d.modules}
    found: list[tuple[int, int, Participant]] = []
    for unit in plan.fsdp_units:
        fqns = ("",) if unit.root else unit.modules
        first = min(i for fqn, i in position.items() if any(is_inside(fqn, outer) for outer in fqns))
        made = UnitCollectives(unit.operators[0], {fqn: model.get_submodule(fqn) for fqn in fqns})
        found.append((-1 if unit.root else first, min(fqn.count(".") for fqn in fqns), made))
    for decision in plan.decisions:
        if decision.slices > 1 and decision.mode.sharded:
            for fqn in decision.modules:
                module = model.get_submodule(fqn)
                kind = kind_of(module)
                assert kind is not None
                found.append((position[fqn], fqn.count("."), SliceCollectives(fqn, module, kind)))
    return [participant for _, _, participant in sorted(found, key=lambda entry: entry[:2])]


class _Ordered:
    """A collective of a sharded unit that waits for its turn."""

    def __init__(self, inner: Any, order: Order, index: int, name: str) -> None:
        self._inner, self._order, self._index, self._name = inner, order, index, name
        #: When the first buffer was allocated, into which FSDP2 copies before it calls the collective.
        self._begin: Any = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer allocated by the collective itself."""
        if self._begin is None and self._order.observer is not None:
            self._begin = self._order.observer.begin()
        made: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return made

    def _tell(self, code: int, nbytes: int) -> None:
        """Tell the observer, if there is one, that the collective has ended."""
        begin, self._begin = self._begin, None
        if begin is not None and self._order.observer is not None:
            self._order.observer.end(self._name, code, nbytes, begin)


class _OrderedGather(_Ordered, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._gather(output_tensor, input_tensor, group, async_op)
        self._tell(GATHER, output_tensor.nbytes)
        return work

    def _gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        order, index, inner = self._order, self._index, self._inner
        order.before(index, GATHER)
        if async_op or not order.waits:
            work: dist.Work | None = inner(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
            return work

        def start() -> Pending | None:
            begin = inner.start if isinstance(inner, FlatAllGather) else partial(inner, async_op=True)
            work: Pending | None = begin(output_tensor, input_tensor, group)
            return work

        uses = memory_uses(output_tensor)
        order.run(start, index, GATHER)
        wait_until_released(output_tensor, uses)
        if isinstance(inner, TwoStepAllGather):
            inner.free()
        return None


class _OrderedReduce(_Ordered, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._reduce(output_tensor, input_tensor, group, op, async_op)
        self._tell(REDUCE, input_tensor.nbytes)
        return work

    def _reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        order, index = self._order, self._index
        order.before(index, REDUCE)
        if order.waits and not async_op and isinstance(self._inner, DefaultReduceScatter):
            scatter_sum(
                output_tensor,
                input_tensor,
                op,
                group,
                lambda start: order.run(start, index, REDUCE),
            )
            return None
        work: dist.Work | None = self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
        return work
