"""Degrees of parallelism."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelDims:
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


def degrees(
    world_size: int, pp: int | None = None, dp: int | None = None, tp: int | None = None
) -> ParallelDims:
    """Parallel degrees of ``world_size`` ranks; ``pp`` or ``dp`` is inferred from the others.

    >>> degrees(8, dp=2)
    ParallelDims(pp=4, dp=2, tp=1)
    >>> degrees(8, pp=2, tp=2)
    ParallelDims(pp=2, dp=2, tp=2)
    >>> degrees(8)
    ParallelDims(pp=1, dp=8, tp=1)

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
        found = ParallelDims(pp or 1, rest, tp or 1)
    else:
        found = ParallelDims(pp or rest, dp or rest, tp or 1)
    if found.world_size != world_size:
        raise ValueError(
            f"pp={found.pp} x dp={found.dp} x tp={found.tp} are {found.world_size} ranks, but the world size "
            f"is {world_size}; leave out pp= or dp= to have it inferred"
        )
    return found
