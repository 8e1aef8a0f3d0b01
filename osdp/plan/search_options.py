"""Options of the sharding search: allowed modes, slices, recomputation and offload."""

from dataclasses import dataclass, replace

from osdp.plan.dims import ParallelDims
from osdp.plan.schedule import Schedule
from osdp.plan.sharding import Mode

#: Default numbers of slices an operator may run in.
SLICES = (2, 4, 8, 16)


@dataclass(frozen=True)
class SearchOptions:
    """Allowed choices of the sharding search.

    Attributes:
        allowed: Allowed sharding modes.
        slices: Allowed numbers of slices of an operator; none if empty.
        keep: Whether half of the slices may stay gathered from forward to backward.
        recompute: Whether blocks may be recomputed.
        offload: Whether sharded units may be offloaded to host memory.
        two_step: Whether collectives over all ranks must go in two steps (``True``) or must not (``False``);
            ``None`` allows both.
        reduce_each: Whether gradients of several microbatches must be reduced in each backward, or once a
            step; ``None`` allows both.
    """

    allowed: tuple[Mode, ...] = tuple(Mode)
    slices: tuple[int, ...] = ()
    keep: bool = True
    recompute: bool = False
    offload: bool = False
    two_step: bool | None = None
    reduce_each: bool | None = None

    @property
    def needs_groups(self) -> bool:
        """Whether every plan has groups of ranks."""
        return self.allowed == (Mode.HYBRID_SHARD,) or bool(self.two_step)


#: Sharding alone, in any mode.
SHARDING = SearchOptions()


def stage_options(options: SearchOptions, schedule: Schedule, dims: ParallelDims) -> SearchOptions:
    """Search options of a pipeline stage.

    On one rank nothing is sharded, and beside tensor parallelism no optimizer states alone. Where several
    microbatches are in flight, SHARD_GRAD_OP would keep parameters from the first forward to the last
    backward, as NO_SHARD does; so would kept slices. Both are ruled out there.
    """
    if dims.dp == 1 and len(options.allowed) > 1:
        return replace(options, allowed=(Mode.NO_SHARD,))
    if dims.tp > 1:
        options = _without(options, Mode.SHARD_OPTIMIZER)
    several = any(schedule.in_flight(stage) > 1 for stage in range(schedule.num_stages))
    if not several:
        return options
    return _without(replace(options, keep=False), Mode.SHARD_GRAD_OP)


def _without(options: SearchOptions, mode: Mode) -> SearchOptions:
    """``options`` without ``mode``, unless that is the only one."""
    if len(options.allowed) == 1:
        return options
    return replace(options, allowed=tuple(other for other in options.allowed if other is not mode))
