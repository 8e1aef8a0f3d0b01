"""Conversion between candidate units with rows and problems and solutions of the chain solver."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from osdp.arrays import Floats
from osdp.search.sharding.candidates import CandidateUnits
from osdp.search.sharding.chain.solver import ChainProblem, ItemShape


def arrangements(
    kinds: Sequence[tuple[int, int]], paths: Sequence[tuple[int, ...]]
) -> list[list[tuple[int, ...]]]:
    """Alternative orders of the paths of equal items: as given, reversed, and spread evenly.

    The rows cannot tell them apart; the simulator can.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for item, kind in enumerate(kinds):
        places.setdefault(kind, []).append(item)
    reverse, even = list(paths), list(paths)
    for items in places.values():
        given = [paths[item] for item in items]
        for item, back, spread in zip(items, reversed(given), _evenly(given), strict=True):
            reverse[item], even[item] = back, spread
    unique = {tuple(option): option for option in (list(paths), reverse, even)}
    return list(unique.values())


def _evenly(paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same paths with equal ones at equal distances."""
    counts = Counter(paths)
    marks = [
        ((number + 0.5) / counts[path], path) for path in sorted(counts) for number in range(counts[path])
    ]
    return [path for _, path in sorted(marks)]


def chain_problem(
    space: CandidateUnits, rows: Floats, constant: Floats, caps: Floats, num_time_rows: int
) -> ChainProblem:
    """The chain problem of ``space`` under the given rows; items with equal rows are stored once.

    Args:
        space: Candidate units.
        rows: What each candidate adds to each row, shape ``(E, R)``.
        constant: Added to each row, shape ``(R,)``.
        caps: Upper bound of each row, shape ``(R,)``; infinite for times.
        num_time_rows: Number of time rows, which come first.
    """
    # A template is a shape of items (places of their candidates); its distinct items differ in their rows.
    shapes: dict[bytes, int] = {}
    contents: list[dict[bytes, int]] = []
    members: list[list[int]] = []
    kinds = []
    for item in range(space.num_items):
        inner = space.inner[item]
        start, stop, _ = space.places[item]
        # Bytes as keys: equal arrays are found without comparing all pairs.
        shape = start.tobytes() + stop.tobytes()
        template = shapes.setdefault(shape, len(shapes))
        if template == len(contents):
            contents.append({})
            members.append([])
        distinct = contents[template].setdefault(rows[inner].tobytes(), len(contents[template]))
        if distinct == len(members[template]):
            members[template].append(item)
        kinds.append((template, distinct))
    return ChainProblem(
        templates=tuple(_template(space, rows, items) for items in members),
        kinds=tuple(kinds),
        num_time_rows=num_time_rows,
        constant=constant,
        caps=caps,
    )


def _template(space: CandidateUnits, rows: Floats, items: list[int]) -> ItemShape:
    start, stop, end = space.places[items[0]]
    return ItemShape(
        size=end,
        start=start,
        stop=stop,
        rows=np.stack([rows[space.inner[item]] for item in items]),
    )


def candidates_of(space: CandidateUnits, paths: Sequence[Sequence[int]]) -> list[int]:
    """Indices of the candidates on the paths through all items, in trace order."""
    return [
        inner.start + candidate for inner, path in zip(space.inner, paths, strict=True) for candidate in path
    ]
