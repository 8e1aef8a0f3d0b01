"""Labels over items of one kind: how many take which path, as row sums that are not dominated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Pairwise comparison pays up to this many labels; beyond, only equal ones are merged.
_PAIRWISE = 128
#: How much of a label's distance from the relaxation counts as excess when labels must be dropped.
_NEARNESS = 0.05
#: Labels that are compared for each that is kept.
_SPARE = 8
#: Row sums closer than this, relative to the largest, count as equal: the rounding of sums in another order.
_RESOLUTION = 1e-12


@dataclass(frozen=True)
class Kind:
    """``count`` items that may each take any of ``P`` paths.

    Attributes:
        rows: Row sums of each path, shape ``(P, R)``; the first is the base, with the least excess.
        paths: The candidates of each.
        excess: What each costs at least over the cheapest, shape ``(P,)``.
        count: Number of items.
        least: The least all items together add to each row, shape ``(R,)``.
    """

    rows: Floats
    paths: tuple[tuple[int, ...], ...]
    excess: Floats
    count: int
    least: Floats

    @property
    def most(self) -> Floats:
        """The most all items together add to each row."""
        return np.asarray(self.count * self.rows.max(axis=0))

    @classmethod
    def of(
        cls, rows: Floats, paths: Sequence[tuple[int, ...]], excess: Floats, count: int, least: Floats
    ) -> "Kind":
        """A kind with its base first and the others by falling excess."""
        if not len(paths):
            return cls(rows, (), excess, count, least)
        base = int(np.argmin(excess))
        others = [k for k in np.argsort(-excess, kind="stable").tolist() if k != base]
        order = [base, *others]
        return cls(rows[order], tuple(paths[k] for k in order), excess[order], count, least)

    def spread(self, taken: NDArray[np.int16]) -> list[tuple[int, ...]]:
        """The path of each item, in a fixed order, when so many take each; the base has the rest."""
        times = [self.count - int(taken[1:].sum()), *taken[1:].tolist()]
        return sorted(path for path, count in zip(self.paths, times, strict=True) for _ in range(count))


@dataclass(frozen=True)
class Labels:
    """``L`` partial choices.

    Attributes:
        rows: Row sums, shape ``(L, R)``.
        excess: Excess so far, shape ``(L,)``.
        used: Items of the present kind that left its base, shape ``(L,)``.
        taken: For every path of every kind so far, how many items take it; the base's column is unused.
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
    def start(cls, num_rows: int) -> "Labels":
        """The one label of nothing chosen."""
        nothing = np.zeros(1)
        return cls(
            np.zeros((1, num_rows)), nothing, nothing.astype(np.int64), np.zeros((1, 0), dtype=np.int16)
        )

    def pick(self, which: NDArray[np.bool_] | Ints) -> "Labels":
        """The labels that ``which`` selects."""
        return Labels(self.rows[which], self.excess[which], self.used[which], self.taken[which])

    def with_more(self, kind: Kind, path: int, times: Ints) -> "Labels":
        """Each label with ``times`` items moved from the base to ``path``."""
        taken = self.taken.copy()
        taken[:, path - len(kind.paths)] += times.astype(np.int16)
        delta = kind.rows[path] - kind.rows[0]
        return Labels(
            self.rows + times[:, None] * delta,
            self.excess + times * (kind.excess[path] - kind.excess[0]),
            self.used + times,
            taken,
        )

    @staticmethod
    def joined(parts: Sequence["Labels"]) -> "Labels":
        """All labels of ``parts``."""
        return Labels(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.excess for part in parts]),
            np.concatenate([part.used for part in parts]),
            np.concatenate([part.taken for part in parts]),
        )


@dataclass(frozen=True)
class Frame:
    """What labels of one kind must stay within, and which are kept if there are too many.

    Attributes:
        room: What row sums may reach, later kinds at their least, shape ``(R,)``.
        safe: Row sums that no choice for later kinds lifts above the caps; minus infinity for times.
        gap: Excess that the best solution known leaves.
        width: Labels to keep.
        target: Row sums of the relaxation at this place.
        weights: What a unit of each row is worth.
    """

    room: Floats
    safe: Floats
    gap: float
    width: int
    target: Floats
    weights: Floats

    def rank(self, labels: Labels) -> Floats:
        """Lower is kept first: little excess, and among equals near the relaxation."""
        distance = np.abs(labels.rows - self.target) @ self.weights
        return np.asarray(labels.excess + _NEARNESS * distance)


def expand(labels: Labels, kind: Kind, frame: Frame, *, times: Floats | None) -> tuple[Labels, float]:
    """Every label with every choice for the items of ``kind`` that can still be the best.

    Args:
        labels: Choices for the kinds before.
        kind: The kind to choose for.
        frame: Limits and ranking.
        times: For the last kind, constants of the time rows, which come first; else ``None``.

    Returns:
        The labels, and the least excess of those dropped for want of width.
    """
    columns = np.zeros((labels.size, len(kind.paths)), dtype=np.int16)
    labels = Labels(
        labels.rows + kind.count * kind.rows[0],
        labels.excess + kind.count * kind.excess[0],
        np.zeros(labels.size, dtype=np.int64),
        np.concatenate([labels.taken, columns], axis=1),
    )
    gains = np.minimum(kind.rows - kind.rows[0], 0.0)
    lost = np.inf
    for path in range(1, len(kind.paths)):
        # What the paths from here on can still save, per item.
        gain = gains[path:].min(axis=0)
        labels = _promising(labels, kind, frame, gain)
        if times is not None and path == len(kind.paths) - 1:
            labels = _filled(labels, kind, path, frame.room, times)
            break
        labels = _with_path(labels, kind, path, frame, gain)
        if labels.size > 2 * frame.width:
            growth = kind.count * (kind.rows[path + 1 :] - kind.rows[0]).max(axis=0, initial=0.0)
            labels, dropped = _narrowed(labels, frame, frame.safe - growth)
            lost = min(lost, dropped)
    labels = _promising(labels, kind, frame, np.zeros(len(frame.room)))
    labels, dropped = _narrowed(labels, frame, frame.safe)
    return labels, min(lost, dropped)


def _promising(labels: Labels, kind: Kind, frame: Frame, gain: Floats) -> Labels:
    """Labels that can still fit and whose excess is within the gap."""
    reachable = labels.rows + (kind.count - labels.used)[:, None] * gain
    return labels.pick((reachable <= frame.room).all(axis=1) & (labels.excess < frame.gap))


def _with_path(labels: Labels, kind: Kind, path: int, frame: Frame, gain: Floats) -> Labels:
    """Labels with 0, 1, 2 ... items on ``path``, up to the number that can still fit within the gap."""
    free = kind.count - labels.used
    most = free.astype(float)
    dearer = kind.excess[path] - kind.excess[0]
    if dearer > 0:
        most = np.minimum(most, (frame.gap - labels.excess) / dearer)
    # Each item on this path no longer saves the most that a later path might.
    growth = kind.rows[path] - kind.rows[0] - gain
    room = frame.room
    grows = (growth > 0) & np.isfinite(room)
    if grows.any():
        left = room[grows] - labels.rows[:, grows] - free[:, None] * gain[grows]
        most = np.minimum(most, (left / growth[grows]).min(axis=1))
    numbers = np.clip(np.floor(most), 0, free).astype(np.int64) + 1
    index = np.repeat(np.arange(labels.size), numbers)
    times = np.arange(len(index)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    return labels.pick(index).with_more(kind, path, times)


def _filled(labels: Labels, kind: Kind, path: int, room: Floats, constant: Floats) -> Labels:
    """Each label with the best number of items on the last path.

    The largest time is convex in that number, so it is least at the most that fits, the fewest that do, or
    where two times cross.
    """
    delta = kind.rows[path] - kind.rows[0]
    times = len(constant)
    now = labels.rows[:, :times] + constant
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
    options = np.stack(numbers, axis=1)
    reached = now[:, None, :] + options[:, :, None] * delta[:times]
    best = reached.max(axis=2).argmin(axis=1)
    return labels.with_more(kind, path, options[np.arange(labels.size), best])


def _crossings(distance: Floats, speed: float) -> tuple[Ints, Ints]:
    """The whole numbers around ``distance / speed``."""
    where = np.clip(np.floor(distance / speed), -1, 2**31).astype(np.int64)
    return where, where + 1


def _narrowed(labels: Labels, frame: Frame, safe: Floats) -> tuple[Labels, float]:
    """Undominated labels, at most ``width``, and the least excess of those dropped.

    Below ``safe`` bytes are as good as fewer. A label that leaves more items free can do what another can.
    """
    labels, dropped = _best(labels, frame, _SPARE * frame.width)
    rows = np.maximum(labels.rows, safe)
    labels = labels.pick(undominated(np.concatenate([rows, labels.used[:, None]], axis=1)))
    labels, also = _best(labels, frame, frame.width)
    return labels, min(dropped, also)


def _best(labels: Labels, frame: Frame, width: int) -> tuple[Labels, float]:
    """The ``width`` labels of least rank, and the least excess of the others."""
    if labels.size <= width:
        return labels, np.inf
    order = np.argsort(frame.rank(labels), kind="stable")
    return labels.pick(np.sort(order[:width])), float(labels.excess[order[width:]].min())


def undominated(rows: Floats) -> Ints:
    """Indices of the rows that no other one beats or equals in every column; the first of equals stays.

    >>> undominated(np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 2.0]])).tolist()
    [0, 1]
    """
    keep = np.arange(len(rows))
    if len(rows) < 2:
        return keep
    scale = np.abs(rows).max(axis=0)
    # Plus zero, since the bytes of -0.0 and 0.0 differ.
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
