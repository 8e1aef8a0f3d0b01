"""Labels over groups of equal items: how many items take which path, as undominated row sums.

A label is one partial choice: for each group (kind) of equal items so far, the number of items on each path.
All items of a kind start on its base path; a label counts those that left it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osdp.arrays import Bools, Floats, Ints

#: Maximum number of labels for pairwise comparison; above, only equal ones are merged.
_PAIRWISE = 128
#: Weight of a label's distance from the relaxation against its excess, when labels must be dropped.
_NEARNESS = 0.05
#: Number of labels that are compared for each one that is kept.
_SPARE = 8
#: Row sums closer than this, relative to the largest, count as equal: sums in another order are rounded
#: differently.
_RESOLUTION = 1e-12


@dataclass(frozen=True)
class ItemGroup:
    """A group of ``count`` equal items, each of which may take any of ``P`` paths.

    Attributes:
        rows: Row sums of each path, shape ``(P, R)``; the first is the base, with the minimum excess.
        paths: The candidates of each path.
        excess: Minimum cost of each path beyond the cheapest one's, shape ``(P,)``.
        count: Number of items.
        least: Minimum that all items together add to each row, shape ``(R,)``.
    """

    rows: Floats
    paths: tuple[tuple[int, ...], ...]
    excess: Floats
    count: int
    least: Floats

    @property
    def most(self) -> Floats:
        """Maximum that all items together add to each row, shape ``(R,)``."""
        return np.asarray(self.count * self.rows.max(axis=0))

    @classmethod
    def of(
        cls, rows: Floats, paths: Sequence[tuple[int, ...]], excess: Floats, count: int, least: Floats
    ) -> "ItemGroup":
        """A group with its base first and the other paths by falling excess."""
        if not len(paths):
            return cls(rows, (), excess, count, least)
        base = int(np.argmin(excess))
        others = [k for k in np.argsort(-excess, kind="stable").tolist() if k != base]
        order = [base, *others]
        return cls(rows[order], tuple(paths[k] for k in order), excess[order], count, least)

    def spread(self, taken: NDArray[np.int16]) -> list[tuple[int, ...]]:
        """The path of each item, in a fixed order: ``taken[p]`` items on path ``p``, the rest on the base."""
        times = [self.count - int(taken[1:].sum()), *taken[1:].tolist()]
        return sorted(path for path, count in zip(self.paths, times, strict=True) for _ in range(count))


@dataclass(frozen=True)
class LabelTable:
    """A set of ``L`` labels (partial choices), as arrays.

    Attributes:
        rows: Row sums so far, shape ``(L, R)``.
        excess: Excess so far, shape ``(L,)``.
        used: Number of items of the current kind that left its base, shape ``(L,)``.
        taken: Number of items on each path of every kind so far, shape ``(L, total paths)``; the base's
            column is unused.
    """

    rows: Floats
    excess: Floats
    used: Ints
    taken: NDArray[np.int16]

    @property
    def size(self) -> int:
        """Number of labels."""
        return len(self.rows)

    @classmethod
    def start(cls, num_rows: int) -> "LabelTable":
        """The single label of the empty choice."""
        nothing = np.zeros(1)
        return cls(
            np.zeros((1, num_rows)), nothing, nothing.astype(np.int64), np.zeros((1, 0), dtype=np.int16)
        )

    def pick(self, which: Bools | Ints) -> "LabelTable":
        """The labels selected by ``which`` (mask or indices)."""
        return LabelTable(self.rows[which], self.excess[which], self.used[which], self.taken[which])

    def with_more(self, kind: ItemGroup, path: int, times: Ints) -> "LabelTable":
        """Each label with ``times`` items moved from the base to ``path``."""
        taken = self.taken.copy()
        taken[:, path - len(kind.paths)] += times.astype(np.int16)
        delta = kind.rows[path] - kind.rows[0]
        return LabelTable(
            self.rows + times[:, None] * delta,
            self.excess + times * (kind.excess[path] - kind.excess[0]),
            self.used + times,
            taken,
        )

    @staticmethod
    def joined(parts: Sequence["LabelTable"]) -> "LabelTable":
        """All labels of ``parts``."""
        return LabelTable(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.excess for part in parts]),
            np.concatenate([part.used for part in parts]),
            np.concatenate([part.taken for part in parts]),
        )


@dataclass(frozen=True)
class LabelLimits:
    """Limits of the labels of one kind, and the ranking by which they are kept.

    Attributes:
        room: Upper bound of the row sums, assuming that later kinds add their minimum, shape ``(R,)``.
        safe: Row sums that no choice for later kinds lifts above the caps, shape ``(R,)``; minus infinity for
            times.
        gap: Maximum excess, given the best known solution.
        width: Number of labels to keep.
        target: Row sums of the relaxation up to this kind, shape ``(R,)``.
        weights: Dual price of each row, shape ``(R,)``.
    """

    room: Floats
    safe: Floats
    gap: float
    width: int
    target: Floats
    weights: Floats

    def rank(self, labels: LabelTable) -> Floats:
        """Sort key, ``(L,)``, lowest kept first: little excess, among equals near the relaxation."""
        distance = np.abs(labels.rows - self.target) @ self.weights
        return np.asarray(labels.excess + _NEARNESS * distance)


def expand(
    labels: LabelTable, kind: ItemGroup, limits: LabelLimits, *, times: Floats | None
) -> tuple[LabelTable, float]:
    """Extend every label by every choice for the items of ``kind`` that can still be the best.

    Path by path, each label is copied once per number of items moved from the base to that path.

    Args:
        labels: Choices for the kinds before.
        kind: The kind to choose for.
        limits: Limits and ranking.
        times: For the last kind, the constants of the time rows, which come first; else ``None``.

    Returns:
        The labels, and the minimum excess of those dropped because of the width.
    """
    # 1. All items start on the base path.
    columns = np.zeros((labels.size, len(kind.paths)), dtype=np.int16)
    labels = LabelTable(
        labels.rows + kind.count * kind.rows[0],
        labels.excess + kind.count * kind.excess[0],
        np.zeros(labels.size, dtype=np.int64),
        np.concatenate([labels.taken, columns], axis=1),
    )
    # 2. Move items to the other paths, one path after the other.
    gains = np.minimum(kind.rows - kind.rows[0], 0.0)  # (P, R)
    lost = np.inf
    for path in range(1, len(kind.paths)):
        # Most that the paths from here on can still save, per item, shape (R,).
        gain = gains[path:].min(axis=0)
        labels = _promising(labels, kind, limits, gain)
        if times is not None and path == len(kind.paths) - 1:
            labels = _filled(labels, kind, path, limits.room, times)
            break
        labels = _with_path(labels, kind, path, limits, gain)
        if labels.size > 2 * limits.width:
            growth = kind.count * (kind.rows[path + 1 :] - kind.rows[0]).max(axis=0, initial=0.0)
            labels, dropped = _narrowed(labels, limits, limits.safe - growth)
            lost = min(lost, dropped)
    # 3. Only labels that fit as they stand.
    labels = _promising(labels, kind, limits, np.zeros(len(limits.room)))
    labels, dropped = _narrowed(labels, limits, limits.safe)
    return labels, min(lost, dropped)


def _promising(labels: LabelTable, kind: ItemGroup, limits: LabelLimits, gain: Floats) -> LabelTable:
    """Labels that can still fit and whose excess is within the gap.

    ``gain`` is the most that an item can still save on each row, shape ``(R,)``.
    """
    reachable = labels.rows + (kind.count - labels.used)[:, None] * gain
    return labels.pick((reachable <= limits.room).all(axis=1) & (labels.excess < limits.gap))


def _with_path(
    labels: LabelTable, kind: ItemGroup, path: int, limits: LabelLimits, gain: Floats
) -> LabelTable:
    """Labels with 0, 1, 2, ... items on ``path``, up to the number that can still fit within the gap."""
    # 1. The most items per label: those still on the base, ...
    free = kind.count - labels.used
    most = free.astype(float)
    # ... as many as the gap allows, ...
    dearer = kind.excess[path] - kind.excess[0]
    if dearer > 0:
        most = np.minimum(most, (limits.gap - labels.excess) / dearer)
    # ... and as many as the caps allow: an item on this path no longer saves what a later path might.
    growth = kind.rows[path] - kind.rows[0] - gain
    room = limits.room
    grows = (growth > 0) & np.isfinite(room)
    if grows.any():
        left = room[grows] - labels.rows[:, grows] - free[:, None] * gain[grows]
        most = np.minimum(most, (left / growth[grows]).min(axis=1))
    numbers = np.clip(np.floor(most), 0, free).astype(np.int64) + 1
    # 2. Copy label `l` once for each of 0 .. numbers[l] - 1 items.
    index = np.repeat(np.arange(labels.size), numbers)
    times = np.arange(len(index)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    return labels.pick(index).with_more(kind, path, times)


def _filled(labels: LabelTable, kind: ItemGroup, path: int, room: Floats, constant: Floats) -> LabelTable:
    """Each label with the best number of items on the last path.

    The largest time is convex in that number, so its minimum is at the most that fits, at the fewest that
    fits, or where two times cross.
    """
    delta = kind.rows[path] - kind.rows[0]
    times = len(constant)
    now = labels.rows[:, :times] + constant  # (L, times)
    # Rows that grow with the number bound it from above, rows that shrink bound it from below.
    growing = delta > 0
    slack = room[growing] - labels.rows[:, growing]
    fits = np.floor(slack / delta[growing]).min(axis=1, initial=np.inf)
    most = np.clip(np.minimum(fits, kind.count - labels.used), 0, None).astype(np.int64)
    saving = (delta < 0) & np.isfinite(room)
    needs = np.ceil((labels.rows[:, saving] - room[saving]) / -delta[saving]).max(axis=1, initial=0.0)
    fewest = np.minimum(np.clip(needs, 0, 2**31).astype(np.int64), most)
    numbers = [most, fewest] + [
        np.clip(crossing, fewest, most)
        for i in range(times)
        for j in range(i)
        if delta[i] != delta[j]
        for crossing in _crossings(now[:, i] - now[:, j], delta[j] - delta[i])
    ]
    options = np.stack(numbers, axis=1)  # (L, options)
    reached = now[:, None, :] + options[:, :, None] * delta[:times]  # (L, options, times)
    best = reached.max(axis=2).argmin(axis=1)
    return labels.with_more(kind, path, options[np.arange(labels.size), best])


def _crossings(distance: Floats, speed: float) -> tuple[Ints, Ints]:
    """The two integers around ``distance / speed``, each of shape ``(L,)``."""
    where = np.clip(np.floor(distance / speed), -1, 2**31).astype(np.int64)
    return where, where + 1


def _narrowed(labels: LabelTable, limits: LabelLimits, safe: Floats) -> tuple[LabelTable, float]:
    """Undominated labels, at most ``width`` of them, and the minimum excess of those dropped.

    Row sums below ``safe`` cannot violate a cap, so they count as equal. A label with more free items can do
    all that one with fewer can.
    """
    labels, dropped = _best(labels, limits, _SPARE * limits.width)
    rows = np.maximum(labels.rows, safe)
    labels = labels.pick(undominated(np.concatenate([rows, labels.used[:, None]], axis=1)))
    labels, also = _best(labels, limits, limits.width)
    return labels, min(dropped, also)


def _best(labels: LabelTable, limits: LabelLimits, width: int) -> tuple[LabelTable, float]:
    """The ``width`` labels of lowest rank, and the minimum excess of the others."""
    if labels.size <= width:
        return labels, np.inf
    order = np.argsort(limits.rank(labels), kind="stable")
    return labels.pick(np.sort(order[:width])), float(labels.excess[order[width:]].min())


def undominated(rows: Floats) -> Ints:
    """Indices of the undominated rows: no other row is as low in every column; the first of equals stays.

    >>> undominated(np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 2.0]])).tolist()
    [0, 1]
    """
    keep = np.arange(len(rows))
    if len(rows) < 2:
        return keep
    scale = np.abs(rows).max(axis=0)
    # Plus zero, since -0.0 and 0.0 differ in their bytes, by which equal rows are found.
    keys = np.round(rows / np.where(scale > 0, scale * _RESOLUTION, 1.0)) + 0.0
    if len(keep) > _PAIRWISE:
        whole = keys.view(np.dtype((np.void, keys.shape[1] * keys.itemsize))).ravel()
        keep = np.sort(np.unique(whole, return_index=True)[1])
    if len(keep) <= _PAIRWISE:
        columns = np.ascontiguousarray(keys[keep].T)
        beats = np.ones((len(keep), len(keep)), dtype=bool)
        for column in columns:
            beats &= column[:, None] <= column
        beats &= ~np.tril(beats.T)
        keep = keep[~beats.any(axis=0)]
    return keep
