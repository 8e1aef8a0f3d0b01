"""The buckets of a model: which unit is in which, and in which order their all-reduces start."""

from collections.abc import Iterable, Sequence

import torch

from osdp.plan import Plan
from osdp.runtime.buckets import Bucket, Reduction
from osdp.runtime.replicated import ReplicatedParameter


class GradientReducer:
    """All-reduces the gradients of the replicated parameters.

    Args:
        units: The replicated parameters, one sequence for each bucket, in the order of first use.
        reduce_dtype: What gradients are reduced in; ``None`` for the dtype they are computed in.
        reduction: How they are averaged.
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
        self.buckets: tuple[Bucket, ...] = ()
        self._places: dict[str, tuple[Bucket, int]] = {}
        self.rebuild()

    @property
    def holds_gradients(self) -> bool:
        """Whether an accumulation is under way."""
        return any(bucket.is_open for bucket in self.buckets)

    def rebuild(self) -> None:
        """Form the buckets anew, from the parameters that are trainable now."""
        buckets = []
        # Backward reaches the last unit first, and in it the last parameter.
        for unit in reversed(self._units):
            kinds: dict[tuple[torch.dtype, torch.dtype], list[ReplicatedParameter]] = {}
            for parameter in reversed(unit):
                if parameter.stored.requires_grad:
                    dtype = self._reduce_dtype or parameter.compute.dtype
                    kinds.setdefault((dtype, parameter.stored.dtype), []).append(parameter)
            buckets += [Bucket(kind, dtype, self._reduction) for (dtype, _), kind in kinds.items()]
        self.buckets = tuple(buckets)
        self._places = {
            parameter.name: (bucket, index)
            for bucket in buckets
            for index, parameter in enumerate(bucket.parameters)
        }

    def receive(self, parameter: ReplicatedParameter, *, reduces: bool) -> None:
        """Take the gradient autograd left on ``parameter``; start what is full if this backward reduces."""
        bucket, index = self._places[parameter.name]
        bucket.receive(index)
        if reduces and bucket.is_full:
            self._start_full()

    def start_rest(self) -> None:
        """At the end of a backward that reduces: start every bucket that waits for a gradient."""
        while self._next < len(self.buckets):
            self._start_next()

    def finish(self, without_gradient: set[str]) -> None:
        """Wait for all buckets and hand out the gradients, except to ``without_gradient``."""
        for bucket in self.buckets:
            bucket.finish(without_gradient)
        self._next = 0

    def end_backward(self) -> None:
        """At the end of a backward that does not reduce."""
        for bucket in self.buckets:
            bucket.end_backward()

    def reset(self) -> None:
        """Forget all gradients that were not handed out."""
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0

    def _start_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1


def replicated_units(
    plan: Plan, parameters: Iterable[ReplicatedParameter]
) -> tuple[tuple[ReplicatedParameter, ...], ...]:
    """The replicated parameters of each unit of ``plan``, in the order of first use.

    Of a unit that runs in slices those are what is not cut; of one that FSDP2 shards there are none.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    position = {decision.operator: index for index, decision in enumerate(plan.decisions)}
    # The gradient of what is used twice is complete where it was used first.
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
