"""Sharding arithmetic shared by cost model and runtime: shards, padding, the modules of a unit."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from osdp.model_desc import Operator


def padded_numel(shape: Sequence[int], num_shards: int) -> int:
    """Number of elements of a tensor whose dim 0 is padded to ``num_shards`` equal shards.

    FSDP2 shards dim 0 and pads each parameter by itself (``torch.distributed.fsdp``, ``FSDPParam``).

    >>> padded_numel((7, 15), 4)
    120
    """
    return num_shards * shard_numel(shape, num_shards)


def shard_numel(shape: Sequence[int], num_shards: int) -> int:
    """Number of elements of one padded shard of a tensor sharded on dim 0; of the whole tensor if 0-dim.

    >>> shard_numel((7, 15), 4)
    30
    """
    rest = 1
    for size in shape[1:]:
        rest *= size
    return -(-shape[0] // num_shards) * rest if shape else 1


def part_sizes(size: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of ``num_parts`` parts of ``size``, as even as possible, the larger ones first.

    >>> part_sizes(10, 4)
    (3, 3, 2, 2)
    """
    whole, more = divmod(size, num_parts)
    return (whole + 1,) * more + (whole,) * (num_parts - more)


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees: the number of ranks along each axis of the mesh.

    Attributes:
        pp: Pipeline ranks.
        dp: Data-parallel ranks of each stage.
        tp: Tensor-parallel ranks.
    """

    pp: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.pp * self.dp * self.tp


def degrees(world_size: int, pp: int | None = None, dp: int | None = None, tp: int | None = None) -> Degrees:
    """Parallel degrees of ``world_size`` ranks; ``pp`` or ``dp`` is inferred from the others.

    >>> degrees(8, dp=2)
    Degrees(pp=4, dp=2, tp=1)
    >>> degrees(8, pp=2, tp=2)
    Degrees(pp=2, dp=2, tp=2)
    >>> degrees(8)
    Degrees(pp=1, dp=8, tp=1)

    Raises:
        ValueError: The product of the degrees is not the number of ranks.
    """
    given = {name: value for name, value in (("pp", pp), ("dp", dp), ("tp", tp)) if value is not None}
    product = math.prod(given.values())
    if any(value < 1 for value in given.values()) or world_size % product:
        raise ValueError(
            f"{' x '.join(f'{name}={value}' for name, value in given.items())} does not divide the "
            f"{world_size} ranks there are"
        )
    # What is left over goes to data parallelism, unless only dp (and tp) are given: then to the pipeline.
    rest = world_size // product
    if dp is None and (pp is not None or tp is not None or not given):
        found = Degrees(pp or 1, rest, tp or 1)
    else:
        found = Degrees(pp or rest, dp or rest, tp or 1)
    if found.world_size != world_size:
        raise ValueError(
            f"pp={found.pp} x dp={found.dp} x tp={found.tp} are {found.world_size} ranks, but the world size "
            f"is {world_size}; leave out pp= or dp= to have it inferred"
        )
    return found


def can_shard(operator: Operator) -> bool:
    """Whether FSDP2 can shard an operator: it rejects 0-dim parameters."""
    return all(parameter.shape for parameter in operator.parameters)


def unit_modules(
    operators: Sequence[Operator], all_operators: Iterable[Operator], callable_modules: Collection[str]
) -> tuple[str, ...]:
    """Modules to wrap as one unit: the fewest that hold the parameters of ``operators`` and of no others.

    Climbs from each operator's modules to the highest ancestor whose own forward ran and under which every
    operator belongs to the unit.

    Args:
        operators: The unit's operators, in trace order.
        all_operators: All operators of the model.
        callable_modules: FQNs of modules whose forward runs.

    Returns:
        FQNs, in trace order, none inside another.
    """
    inside = {module for operator in operators for module in operator.modules}
    outside = [module for op in all_operators for module in op.modules if module not in inside]
    found: list[str] = []
    for operator in operators:
        for module in operator.modules:
            # Climb until an ancestor would contain an operator of another unit. Ancestors without a forward
            # of their own (nn.ModuleList) have no hooks to wrap: they are skipped.
            best = module
            parts = module.split(".") if module else []
            for length in range(len(parts) - 1, 0, -1):
                ancestor = ".".join(parts[:length])
                if any(is_inside(other, ancestor) for other in outside):
                    break
                if ancestor in callable_modules:
                    best = ancestor
            found.append(best)
    unique = list(dict.fromkeys(found))
    return tuple(m for m in unique if not any(m != other and is_inside(m, other) for other in unique))


def is_inside(fqn: str, ancestor: str) -> bool:
    """Whether ``fqn`` is ``ancestor`` or one of its descendants.

    >>> is_inside("h.1.attn", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", "")
    (True, False, True)
    """
    return not ancestor or fqn == ancestor or fqn.startswith(ancestor + ".")


def slice_bounds(size: int, num_slices: int) -> tuple[tuple[int, int], ...]:
    """Start and end of each slice of a dimension: as equal as possible, the longer ones first.

    Raises:
        ValueError: There are more slices than elements, or none.

    >>> slice_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    if not 1 <= num_slices <= size:
        raise ValueError(
            f"a dimension of {size} cannot be cut into {num_slices} slices; 1 to {size} are possible"
        )
    base, longer = divmod(size, num_slices)
    ends = [index * base + min(index, longer) for index in range(num_slices + 1)]
    return tuple(pairwise(ends))
