"""Orders of collectives: whose turn it is, positions for units that no rank has run yet, nesting of units.

An event is one collective of one participant: ``participant * CODES + code``.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from osdp.model.fqn import is_inside
from osdp.runtime.ranks.participants import CODES, GATHER, Participant, UnitCollectives
from osdp.torch_private.fsdp_comms import gathers_in_backward

#: The event that a rank asks for at the end of a pass.
NOTHING = -1


def insert_forward(events: Sequence[int], missing: Sequence[tuple[int, int]], codes: int) -> list[int]:
    """``events`` of a forward with missing ones inserted at their position in the plan.

    Args:
        events: The events that ran.
        missing: Pairs of a participant that did not run and its event.
        codes: Number of event codes per participant.
    """
    found = list(events)
    for index, event in missing:
        place = next((i for i, other in enumerate(found) if other // codes > index), len(found))
        found.insert(place, event)
    return found


@dataclass(frozen=True, slots=True)
class OrderSpan:
    """Begin and end of a participant's forward, as ticks of a counter."""

    begin: int
    end: int


def spans(indices: Sequence[int], participants: Sequence[Participant]) -> dict[int, OrderSpan]:
    """Begin and end of participants' forwards, derived from the order in which they begin.

    Nested participants end before the one that contains them, like brackets.
    """
    order = list(dict.fromkeys(indices))
    found: dict[int, OrderSpan] = {}
    clock = itertools.count()

    def run(index: int) -> None:
        holder = participants[index]
        begin = next(clock)
        for other in order:
            if holder.holds(participants[other]) and other not in found and other not in running:
                running.add(other)
                run(other)
        found[index] = OrderSpan(begin, next(clock))

    running: set[int] = set()
    for index in order:
        if index not in running and not any(participants[o].holds(participants[index]) for o in order):
            running.add(index)
            run(index)
    return found


def insert_backward(
    events: Sequence[int],
    index: int,
    participants: Sequence[Participant],
    when: Mapping[int, OrderSpan],
    *,
    reduces: bool,
) -> list[int]:
    """``events`` of a backward with the events of a participant that no rank has run inserted.

    They are inserted where a rank that runs it would have them: after the reduction of the participant that
    follows it in forward, next to the gather that it prefetches.

    Args:
        events: The order so far.
        index: The participant.
        participants: All participants.
        when: Begin and end of their forwards.
        reduces: Whether this backward reduces.
    """
    # 1. The next participant in forward that ran: backward reaches ``index`` after it.
    found = list(events)
    order = sorted(when, key=lambda i: when[i].end)
    at = order.index(index)
    ran = {event // CODES for event in events}
    after = next((other for other in order[at + 1 :] if other in ran), None)
    # 2. The place: after its last event, or after its gather if it contains ``index``.
    place = 0
    if after is not None:
        holds = participants[after].holds(participants[index])
        of_next = [
            i
            for i, event in enumerate(found)
            if event // CODES == after and (not holds or is_gather(event, participants))
        ]
        if not of_next and not holds:
            of_next = [-1]
        place = of_next[-1] + 1 if of_next else 0
    # 3. Its own gather, and that of the unit it prefetches, must come before its other collectives.
    mine = participants[index]
    if isinstance(mine, UnitCollectives):
        before = [o for o in reversed(order[:at]) if isinstance(participants[o], UnitCollectives)][:1]
        for unit in (index, *before):
            place = _hoist(found, unit, participants, place)
    for code in mine.backward_codes(reduces=reduces):
        found.insert(place, index * CODES + code)
        place += 1
    return found


def _hoist(found: list[int], index: int, participants: Sequence[Participant], place: int) -> int:
    """Move the gather of a unit to ``place`` if it comes later; returns the place of the next event."""
    unit, event = participants[index], index * CODES + GATHER
    assert isinstance(unit, UnitCollectives)
    if not gathers_in_backward(unit.module) or event in found[:place]:
        return place
    if event in found[place:]:
        del found[found.index(event, place)]
    found.insert(place, event)
    return place + 1


def is_gather(event: int, participants: Sequence[Participant]) -> bool:
    """Whether an event is the gather of a sharded unit."""
    index, code = divmod(event, CODES)
    return isinstance(participants[index], UnitCollectives) and code == GATHER


def inside_parts(ran: Iterable[int], participants: Sequence[Participant]) -> list[int]:
    """Participants that may run in a forward of parts of a model: all of those of its parts that ``ran``."""
    parts = {fqn.split(".")[0] for index in ran for fqn in participants[index].modules}
    return [
        index
        for index, participant in enumerate(participants)
        if all(any(is_inside(fqn, part) for part in parts if part) for fqn in participant.modules)
    ]


def turn_of(
    event: int,
    participants: Sequence[Participant],
    when: Mapping[int, OrderSpan],
    ahead: Mapping[int, int],
) -> tuple[bool, float, int]:
    """Sorting key of what ranks ask for at one time: the smallest comes next on all of them.

    Args:
        event: What a rank asks for; the end of the pass comes last.
        participants: All participants.
        when: In a backward begin and end of their forwards; empty in a forward, which follows the plan.
        ahead: By unit the one whose gather in backward it follows at once, since that one prefetches it.
    """
    index = event // CODES
    if index not in when:
        return event == NOTHING, index, event
    # A backward is the forward in reverse: a unit is gathered where its forward ended, and reduced where
    # it began. Most are gathered ahead, right after the unit that ran next in forward: a rank that runs
    # both would otherwise find what it runs in between before its own gather.
    if not is_gather(event, participants):
        return event == NOTHING, -when[index].begin, event
    if index not in ahead:
        return False, -when[index].end, event
    return False, -when[ahead[index]].end + 0.5, event
