"""Labels of a Pareto dynamic program: their row sums, where they came from, and which are dominated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Pairwise comparison pays up to this many labels; beyond, only equal ones are merged.
_PAIRWISE = 128
#: Row sums closer than this, relative to the largest, count as equal: the rounding of sums in another order.
_RESOLUTION = 1e-12


@dataclass(frozen=True)
class Frontier:
    """``L`` labels at one place.

    Attributes:
        rows: Row sums, shape ``(L, R)``.
        origin: Place each came from.
        parent: Index of its parent there.
        option: Index into ``options`` of the choice made last.
        options: Choices, each a tuple of candidates.
    """

    rows: Floats
    origin: Ints
    parent: Ints
    option: Ints
    options: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of labels."""
        return len(self.rows)

    @classmethod
    def of(cls, rows: Floats, options: Sequence[tuple[int, ...]]) -> "Frontier":
        """Labels that are choices, one each."""
        zeros = np.zeros(len(rows), dtype=np.int64)
        return cls(rows, zeros, zeros, np.arange(len(rows)), tuple(options))

    @classmethod
    def single(cls, num_rows: int) -> "Frontier":
        """The label at the start."""
        return cls.of(np.zeros((1, num_rows)), [()])

    @classmethod
    def empty(cls, num_rows: int) -> "Frontier":
        """No labels."""
        return cls.of(np.zeros((0, num_rows)), [])

    def extended(self, options: "Frontier", place: int) -> "Frontier":
        """Every label with every option; their origin is ``place``."""
        count, choices = self.size, options.size
        rows = (self.rows[:, None, :] + options.rows[None, :, :]).reshape(count * choices, self.rows.shape[1])
        return Frontier(
            rows,
            np.full(count * choices, place, dtype=np.int64),
            np.repeat(np.arange(count), choices),
            np.tile(options.option, count),
            options.options,
        )

    @staticmethod
    def joined(parts: Sequence["Frontier"]) -> "Frontier":
        """All labels of ``parts``, in order."""
        if len(parts) == 1:
            return parts[0]
        shifts = np.cumsum([0, *(len(part.options) for part in parts)])
        return Frontier(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.origin for part in parts]),
            np.concatenate([part.parent for part in parts]),
            np.concatenate([part.option + shift for part, shift in zip(parts, shifts, strict=False)]),
            tuple(option for part in parts for option in part.options),
        )

    def taken(self, which: NDArray[np.bool_] | Ints) -> "Frontier":
        """The labels that ``which`` selects."""
        return Frontier(
            self.rows[which], self.origin[which], self.parent[which], self.option[which], self.options
        )

    def choice(self, label: int) -> tuple[int, ...]:
        """The candidates chosen last by ``label``."""
        return self.options[int(self.option[label])]


def without_dominated(front: Frontier, bounds: Floats) -> tuple[Frontier, Floats]:
    """``front`` without labels that another one beats or equals in every row; the first of equals stays.

    Args:
        front: Labels at one place.
        bounds: Lower bound of each, shape ``(L,)``.

    Returns:
        The labels that stay, in order, and their bounds.
    """
    if front.size < 2:
        return front, bounds
    scale = np.abs(front.rows).max(axis=0)
    keys = np.round(front.rows / np.where(scale > 0, scale * _RESOLUTION, 1.0))
    _, first = np.unique(keys, axis=0, return_index=True)
    keep = np.sort(first)
    if 1 < len(keep) <= _PAIRWISE:
        chosen = keys[keep]
        beaten = (chosen[:, None, :] <= chosen[None, :, :]).all(axis=2)
        np.fill_diagonal(beaten, False)
        keep = keep[~beaten.any(axis=0)]
    return front.taken(keep), bounds[keep]
