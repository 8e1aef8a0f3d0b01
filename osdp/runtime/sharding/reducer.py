"""The gradient buckets of a model: forming them from units, and starting their all-reduces in order."""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.plan.sharding import ShardingPlan
from osdp.runtime.sharding.buckets import Bucket, Reduction
from osdp.runtime.sharding.replicated import ReplicatedParameter


class GradientReducer:
    """All-reduces the gradients of the replicated parameters.

    Args:
        units: The replicated parameters, one sequence for each unit, in the order of first use.
        reduce_dtype: Dtype in which gradients are reduced; ``None`` for the dtype they are computed in.
        reduction: Averages them over the ranks.
    """

    def __init__(
        self,
        units: Sequence[Sequence[ReplicatedParameter]],
        reduce_dtype: torch.dtype | None,
        reduction: Reduction,
    ) -> None:
        self._units = units
        self._reduce_dtype = reduce_dtype
        self._reduction = reduction
        self._next = 0
        self._carries_flags = False
        self.buckets: tuple[Bucket, ...] = ()
        self._places: dict[str, tuple[Bucket, int]] = {}
        self.rebuild()

    def rebuild(self) -> None:
        """Form the buckets anew, from the parameters that are trainable at present."""
        found: list[tuple[list[ReplicatedParameter], torch.dtype]] = []
        # Backward reaches the last unit first, and in it the last parameter.
        for unit in reversed(self._units):
            kinds: dict[tuple[torch.dtype, torch.dtype], list[ReplicatedParameter]] = {}
            for parameter in reversed(unit):
                if parameter.stored.requires_grad:
                    dtype = self._reduce_dtype or parameter.compute.dtype
                    kinds.setdefault((dtype, parameter.stored.dtype), []).append(parameter)
            found += [(kind, dtype) for (dtype, _), kind in kinds.items()]
        count = sum(len(kind) for kind, _ in found)
        # The gradient of a bucket's only parameter may itself be the bucket, which leaves no place for flags.
        self._carries_flags = self._reduction.carries_flags and bool(found) and len(found[-1][0]) > 1
        flags = [0] * (len(found) - 1) + [count if self._carries_flags else 0]
        buckets = [
            Bucket(kind, dtype, self._reduction, number)
            for (kind, dtype), number in zip(found, flags, strict=False)
        ]
        self.buckets = tuple(buckets)
        self._places = {
            parameter.name: (bucket, index)
            for bucket in buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self.follow_settings()

    def receive(self, parameter: ReplicatedParameter) -> None:
        """Take the gradient that autograd left on ``parameter``; start full buckets, in order."""
        bucket, index = self._places[parameter.name]
        bucket.receive(index)
        if bucket.is_full:
            self._start_full()

    def give_up(self, parameter: ReplicatedParameter) -> None:
        """Drop the gradient that an accumulation has kept for ``parameter``."""
        bucket, index = self._places[parameter.name]
        bucket.give_up(index)

    def start_rest(self, without_gradient: Collection[str]) -> None:
        """Start the buckets that still wait for a gradient at the end of a backward.

        Buckets whose parameters are all in ``without_gradient`` are skipped, on all ranks.
        """
        for bucket in self.buckets[self._next :]:
            if bucket.syncs and any(p.name not in without_gradient for p in bucket.parameters):
                bucket.start()
        self._next = len(self.buckets)

    def finds_unused(self, due: Collection[str]) -> bool:
        """Whether its last bucket can tell which of the parameters called ``due`` no rank has used."""
        return self._carries_flags and len(due) == len(self._places) and all(n in self._places for n in due)

    def start_rest_and_find_unused(self, used: Collection[str]) -> set[str]:
        """As :meth:`start_rest` for all buckets; returns the parameters that no rank has used.

        Args:
            used: Names of the parameters that this rank has used, which need not be others'.
        """
        *others, last = self.buckets
        for bucket in others[self._next :]:
            bucket.start()
        if not last.started:
            last.start([name in used for name in self._places])
        self._next = len(self.buckets)
        return {name for name, flag in zip(self._places, last.flags_of_any(), strict=True) if not flag}

    def finish(self, without_gradient: Collection[str]) -> None:
        """Wait for all buckets and hand out the gradients, except to ``without_gradient``."""
        self._next = 0
        for bucket in self.buckets:
            if bucket.started:
                bucket.finish(without_gradient)
            else:
                bucket.end_backward()

    def follow_settings(self) -> None:
        """Apply the gradient settings of the parameters."""
        for bucket in self.buckets:
            bucket.follow_settings()

    def reset(self) -> None:
        """Drop all gradients that were not handed out."""
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0

    def _start_full(self) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.syncs:
                if not bucket.is_full:
                    return
                bucket.start()
            self._next += 1


def replicated_units(
    plan: ShardingPlan, parameters: Iterable[ReplicatedParameter]
) -> tuple[tuple[ReplicatedParameter, ...], ...]:
    """The replicated parameters of each unit of ``plan``, in the order of first use.

    A unit that runs in slices contributes the parameters that are not sliced; a unit that FSDP2 shards none.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    position = {decision.operator: index for index, decision in enumerate(plan.decisions)}
    # The gradient of a parameter that is used twice is complete where backward reaches its first use.
    units = sorted(plan.units, key=lambda unit: min(position[operator] for operator in unit.operators))
    found = (
        tuple(
            by_name[name]
            for operator in unit.operators
            for name in plan.decisions[position[operator]].parameters
            if name in by_name
        )
        for unit in units
    )
    return tuple(members for members in found if members)


def gradient_group(mesh: DeviceMesh, *, beside_shards: bool) -> dist.ProcessGroup:
    """The process group in which replicated gradients are reduced.

    With sharded units in the model it is a separate one: the two kinds of collectives have no common order.
    """
    group: dist.ProcessGroup = mesh.get_group()
    if not beside_shards or mesh.size() == 1:
        return group
    ranks = dist.get_process_group_ranks(group)
    own: dist.ProcessGroup = dist.new_group(
        ranks, backend=dist.get_backend(group), use_local_synchronization=True
    )
    return own
