"""The gradient buckets of a model: forming them from units, and starting their all-reduces in order."""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.averaging import Reduction
from osdp.plan.shard_math import padded_numel
from osdp.plan.sharding import ShardingPlan
from osdp.runtime.sharding.buckets import Bucket
from osdp.runtime.sharding.replicated import ParameterSteppedInShards, ReplicatedParameter

#: Elements of a bucket's gaps for one parameter, which plans do not count: more messages would cost more.
_MOST_GAPS = 1024


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
        groups: list[tuple[list[ReplicatedParameter], torch.dtype]] = []
        # Backward reaches the last unit first, and in it the last parameter.
        for unit in reversed(self._units):
            alike: dict[tuple[torch.dtype, torch.dtype, str], list[ReplicatedParameter]] = {}
            # A bucket has one dtype on the way, and one in which its gradients are handed out.
            for parameter in reversed(unit):
                if parameter.stored.requires_grad:
                    dtype = parameter.compute.dtype
                    if self._reduce_dtype is not None and not dtype.is_complex:
                        dtype = self._reduce_dtype
                    kind = (dtype, parameter.stored.dtype, _lies_apart(parameter))
                    alike.setdefault(kind, []).append(parameter)
            groups += [(group, dtype) for (dtype, *_), group in alike.items()]
        num_parameters = sum(len(group) for group, _ in groups)
        # A last bucket with one parameter has no room for flags: that gradient may itself be the bucket.
        self._carries_flags = self._reduction.carries_flags and bool(groups) and len(groups[-1][0]) > 1
        flags = [0] * (len(groups) - 1) + [num_parameters if self._carries_flags else 0]
        buckets = [
            Bucket(group, dtype, self._reduction, num_flags)
            for (group, dtype), num_flags in zip(groups, flags, strict=False)
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

    def can_find_unused(self, due: Collection[str]) -> bool:
        """Whether the last bucket can carry flags of the parameters ``due``, one for each that is used.

        It can if ``due`` are exactly the parameters in the buckets.

        Args:
            due: Names of the parameters whose gradients are to be reduced in this backward.
        """
        return self._carries_flags and len(due) == len(self._places) and all(n in self._places for n in due)

    def start_rest_and_find_unused(self, used: Collection[str]) -> set[str]:
        """Start all remaining buckets; returns the parameters that no rank has used.

        Args:
            used: Names of the parameters that this rank has used; other ranks may have used others.
        """
        # Even without a gradient here: other ranks may have some, and no rank knows that before the flags.
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
                    return  # those after it wait, full or not: ranks start buckets in one order
                bucket.start()
            self._next += 1


def _lies_apart(parameter: ReplicatedParameter) -> str:
    """Its name if it would leave large gaps in a bucket that ranks exchange, else nothing.

    There are gaps where ranks have unequally many of its rows (:mod:`osdp.comm.bucket_layouts`): a position
    embedding with a single row has the size of the whole for each rank.
    """
    if not (isinstance(parameter, ParameterSteppedInShards) and parameter.by_exchange):
        return ""
    gaps = padded_numel(parameter.compute.shape, parameter.group.size()) - parameter.compute.numel()
    return parameter.name if gaps > _MOST_GAPS else ""


def replicated_units(
    plan: ShardingPlan, parameters: Iterable[ReplicatedParameter]
) -> tuple[tuple[ReplicatedParameter, ...], ...]:
    """The replicated parameters of each unit of ``plan``, in the order of first use.

    A unit that runs in slices contributes only its unsliced parameters; a unit sharded by FSDP2 is left out.
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


def gradient_group(
    mesh: DeviceMesh, *, beside_shards: bool, own: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """The process group in which replicated gradients are reduced.

    In a model with sharded units it is a group of its own: ranks may issue these all-reduces and the
    collectives of sharded units in different orders, which would deadlock in one group.

    Args:
        mesh: The mesh of the data-parallel ranks.
        beside_shards: Whether there are sharded units.
        own: One that was made for the model already.
    """
    group: dist.ProcessGroup = mesh.get_group()
    if not beside_shards or mesh.size() == 1:
        return group
    if own is None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    return own
