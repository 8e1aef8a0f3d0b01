"""One order of collectives on all ranks, even if they run different parts of the model.

A *pass* is one forward into the model from outside, or one backward. For each kind of pass the ranks agree
once on the order of its collectives: in the first pass of a kind, each rank asks the others before every
collective. From then on a rank follows the known order without communication. Collectives that it has
skipped (layers dropped at random, experts without tokens, branches) it *joins*, without any computation,
before the next one that it runs, and those left over at the end of the pass: so each collective has all its
ranks::

    agreed order   A  B  C  D
    rank 0         A  B  .  D     runs A, B, D; joins C before D
    rank 1         A  .  C  .     runs A, C; joins B before C, and D at the end

Training. Units that no rank has run yet are in the order too, at their position in the plan. A collective
that is not in the rest of the order (another order, a second call) starts a new agreement if all ranks ask
for it; otherwise ranks wait for different things, which :mod:`osdp.runtime.ranks.control` detects within
seconds.

Evaluation. Ranks exchange which pass they begin, and ask each other again at its end: so one rank may
evaluate more batches than another, which joins all collectives of the extra passes, and may run its units in
another order.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from osdp.comm.messages import Pending
from osdp.runtime.ranks.backward_end import watch_end_of_backward
from osdp.runtime.ranks.collective_order import (
    NOTHING,
    OrderSpan,
    insert_backward,
    insert_forward,
    inside_parts,
    is_gather,
    spans,
    turn_of,
)
from osdp.runtime.ranks.control import ASKS, BEGINS, COMPARES, Control, LockstepError
from osdp.runtime.ranks.participants import CODES, CollectiveObserver, Participant, UnitCollectives
from osdp.torch_private.autograd import in_backward
from osdp.torch_private.fsdp import initialise_root
from osdp.torch_private.fsdp_comms import set_backward_prefetch

#: Orders of evaluation with more events per participant than this are forgotten; they grow where ranks differ
#: each time.
_LONGEST = 8


@dataclass
class _Pass:
    """A forward or a backward in progress.

    Attributes:
        code: Identifies the kind of pass, equally on all ranks.
        label: Its name in messages.
        events: The known order of its collectives. An event is ``participant * CODES + code``.
        at: Number of events that are done.
        in_backward: Whether it is a backward.
        asks: Whether the order may be continued by agreement where it ends (evaluation).
        has_asked: Whether ranks agree on every collective from here on.
        is_new: Whether the order was unknown or has changed, so that it is stored at the end.
        joined: Events that this rank joined.
    """

    code: int
    label: str
    events: list[int]
    in_backward: bool
    asks: bool
    is_new: bool
    at: int = 0
    has_asked: bool = False
    joined: set[int] = field(default_factory=set)


class Lockstep:
    """The order of the collectives of one model.

    Args:
        control: The ranks; ``None`` if there is one, or nothing communicates.
        root: The model.
        participants: Its sharded units and operators in slices, in the order of the plan, outer ones first.

    Attributes:
        syncs: Whether the next backwards reduce gradients.
        on_backward: Called where a collective is the first sign of a backward.
        observer: Who is told of collectives of units and slices, if anybody is.
    """

    def __init__(self, control: Control | None, root: nn.Module, participants: Sequence[Participant]) -> None:
        self._control = control
        #: Which of the models on these ranks this is.
        self._number = 0 if control is None else control.number(self)
        self._root = root
        self._participants = tuple(participants) if control is not None else ()
        #: By code of a pass: the agreed order, its name, and participants in it that no rank has run.
        self._orders: dict[int, list[int]] = {}
        self._labels: dict[int, str] = {}
        self._unrun: dict[int, list[int]] = {}
        #: The passes in progress, a backward inside a forward last.
        self._passes: list[_Pass] = []
        #: Whether a collective is being joined at present, which must not ask for its turn again.
        self._joins = False
        #: Codes of the forwards whose backward has not run yet: they name that backward.
        self._pending: dict[int, None] = {}
        #: Whether ranks may be at different passes (at first, after an evaluation, after a fault), so that
        #: they must first agree on which one begins.
        self._unsure = True
        self._spans: dict[int, OrderSpan] = {}
        #: By unit the one whose gather in backward it follows at once, since that one prefetches it.
        self._gathers_ahead: dict[int, int] = {}
        self._prefetches_for: int | None = None
        self.syncs = True
        self.on_backward: Callable[[], object] = lambda: None
        self.observer: CollectiveObserver | None = None
        for index, participant in enumerate(self._participants):
            participant.watch(self, index)

    # Passes

    def enter(self, entry: str) -> None:
        """Begin an outermost forward.

        Args:
            entry: FQN of the module that is called, ``""`` for the root.
        """
        if self._control is None:
            return
        self._control.check()
        if not self._participants and not self._control.failed:
            return
        if self._passes:
            self.fail(None, "a pass that did not end")
        trains = torch.is_grad_enabled()
        label = f"a forward of {entry or 'the model'}{'' if trains else ' without gradients'}"
        code = self._code(label)
        if self._unsure or not trains:
            self._begin_together(code, trains)
        self._unsure = not trains
        self._open(code, in_backward=False, asks=not trains)

    def meet(self, label: str) -> None:
        """Return when all ranks have come here; evaluations that others run before are joined.

        Args:
            label: What they meet for, the same on all of them.
        """
        if self._control is not None and self._participants:
            self._begin_together(self._code(label), True)

    def leave(self) -> None:
        """End a forward."""
        if not self._passes:
            return
        entered = self._passes[-1]
        self._finish(entered)
        if not entered.asks and entered.is_new:
            self._add_unrun(entered)
        self._passes.pop()
        if not entered.asks:
            self._pending[entered.code] = None
            if self._prefetches_for != entered.code:
                self._set_prefetches(entered)

    def begin_backward(self) -> None:
        """Begin a backward; called by whatever comes first in it, and possibly again."""
        if self._control is None or (self._passes and self._passes[-1].in_backward):
            return
        if not self._participants:
            self._passes.append(_Pass(0, "the backward", [], in_backward=True, asks=False, is_new=False))
            watch_end_of_backward(self._end_backward, self._fail_backward)
            return
        forwards = " and ".join(sorted(self._labels[code] for code in self._pending)) or "nothing new"
        label = f"the backward of {forwards}{'' if self.syncs else ', which keeps its gradients'}"
        self._open(self._code(label), in_backward=True, asks=False)
        watch_end_of_backward(self._end_backward, self._fail_backward)

    def _end_backward(self) -> None:
        running = self._passes[-1]
        self._finish(running)
        self._passes.pop()
        if running.is_new:
            self._add_unrun_backward(running)
        joined = [self._participants[index] for index in {event // CODES for event in running.joined}]
        late = [participant.name for participant in joined if not participant.end_joined()]
        if late:
            raise self._late(late)
        self._pending.clear()

    def _late(self, names: Sequence[str]) -> LockstepError:
        assert self._control is not None
        return self._control.refuse(
            f"rank {self._control.rank} got gradients of {', '.join(map(repr, names))} after the ranks had "
            "reduced them: its backward ran in another order than agreed; run the same units in the same "
            "order on all ranks, or replicate those that differ"
        )

    def fail(self, error: BaseException | None, where: str) -> None:
        """End a pass after an exception: report it to the other ranks, and agree anew in the next pass."""
        if self._control is not None and not self._control.failed:
            self._control.fault(error, where if not self._passes else self._passes[-1].label)
        self._passes.clear()
        self._pending.clear()
        self._joins = False
        self._unsure = True

    def _fail_backward(self, error: BaseException | None) -> None:
        self.fail(error, "a backward")

    # Collectives

    @property
    def waits(self) -> bool:
        """Whether the host waits for collectives."""
        return self._control is not None and self._control.blocks

    def before(self, participant: int, code: int) -> None:
        """Return when it is this collective's turn on all ranks, after joining those skipped before it."""
        if self._joins:
            return
        event = participant * CODES + code
        # 1. The first collective of a backward opens its pass.
        if in_backward() and not (self._passes and self._passes[-1].in_backward):
            if not self._passes:
                self.on_backward()  # before anything is joined, which may leave gradients
            self.begin_backward()
        # 2. Outside of any pass (``unshard()``, say) ranks agree on each collective.
        if not self._passes:
            self._open(self._code("work outside of any forward"), in_backward=False, asks=True)
            self._passes[-1].events = []
            self._ask(self._passes[-1], event)
            self._passes.pop()
            return
        # 3. The common case, without communication: it is the next one of the known order.
        running = self._passes[-1]
        at = running.at
        if not running.has_asked and at < len(running.events) and running.events[at] == event:
            running.at = at + 1
            return
        self._reach(running, event)

    def run(self, start: Callable[[], Pending | None], participant: int, code: int) -> None:
        """Start a collective and wait for it."""
        if self._control is None:
            work = start()
            if work is not None:
                work.wait()
            return
        where = f" in {self._passes[-1].label}" if self._passes else ""
        label = self._participants[participant].label(code)
        self._control.run(start, f"{label}{where}", of_model=True)

    def wait(self, work: Pending, what: str) -> None:
        """Wait for another collective of the model, one that is not in the order."""
        if self._control is None:
            work.wait()
        else:
            self._control.wait(work, what)

    def used_anywhere(self, used: Sequence[bool]) -> list[bool]:
        """For each trainable parameter, whether any rank used it in this backward; a collective call."""
        if self._control is None:
            return list(used)
        return [bool(vote) for vote in self._control.maximum([*used], "the end of a backward of all ranks")]

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks."""
        return self._control is None or self._control.rank == 0

    def differing(self, numbers_of: Callable[[], Mapping[str, int]]) -> list[str]:
        """Names of the numbers that are not the same on all ranks; a collective call.

        Args:
            numbers_of: Returns this rank's by name, with the same names on all ranks; called if there are
                several.

        Raises:
            LockstepError: Other ranks are somewhere else.
        """
        if self._control is None:
            return []
        numbers = dict(numbers_of())
        if not numbers:
            return []
        what = "a comparison of the replicated parameters"
        # As many numbers as in all exchanges that may meet, and one rank's all only if they differ.
        digest = zlib.crc32(repr(numbers).encode())
        rows = self._control.exchange([COMPARES, digest, self._number, 0], what)
        if any(row[0] != COMPARES or row[2] != self._number for row in rows):
            raise self._different("compares its replicated parameters, after a backward")
        if all(row[1] == digest for row in rows):
            return []
        everybody = self._control.gather(numbers, what)
        return [name for name in numbers if len({theirs[name] for theirs in everybody}) > 1]

    def _reach(self, running: _Pass, event: int) -> None:
        if not running.has_asked:
            # 1. Later in the known order: join everything before it.
            try:
                later = running.events.index(event, running.at)
            except ValueError:
                later = -1
            if later >= 0:
                self._join_until(running, later, event)
                running.at = later + 1
                return
            # 2. Not in it: an evaluation joins the rest of the order and continues by agreement; training
            #    drops the rest, and agrees on a new order from here on.
            if running.asks:
                self._join_until(running, len(running.events))
            else:
                del running.events[running.at :]
                running.is_new = True
            running.has_asked = True
        self._ask(running, event)

    def _join_until(self, running: _Pass, end: int, wanted: int = NOTHING) -> None:
        # A unit that is about to be reduced must have been gathered, and FSDP2 has already resharded it: its
        # gather is not joined again.
        gathered = wanted // CODES * CODES if running.in_backward and wanted != NOTHING else NOTHING
        while running.at < end:
            event = running.events[running.at]
            running.at += 1
            if event != gathered or not is_gather(event, self._participants):
                self._join(running, event)

    def _join(self, running: _Pass, event: int) -> None:
        index, code = divmod(event, CODES)
        running.joined.add(event)
        self._joins = True
        try:
            self._participants[index].join(code, in_backward=running.in_backward)
        finally:
            self._joins = False

    # Agreements

    def _ask(self, running: _Pass, event: int) -> None:
        """Agree on the next collective with the other ranks, again and again, until ``event`` is chosen."""
        assert self._control is not None
        turn = partial(
            turn_of,
            participants=self._participants,
            when=self._spans if running.in_backward else {},
            ahead=self._gathers_ahead,
        )
        wanted = self._label_of(event)
        what = f"an agreement about {wanted}, which is not in the order so far, in {running.label}"
        while True:
            rows = self._control.exchange([ASKS, running.code, running.at, event], what)
            if len({tuple(row[:3]) for row in rows}) > 1:
                raise self._different(f"asks for {wanted} in {running.label}, after {running.at} others")
            chosen = min((row[3] for row in rows), key=turn)
            if chosen != NOTHING:
                running.events.append(chosen)
                running.at += 1
            if chosen == event:
                return
            self._join(running, chosen)

    def _finish(self, running: _Pass) -> None:
        if not running.has_asked:
            self._join_until(running, len(running.events))
        if running.asks or running.is_new:
            running.has_asked = True
            self._ask(running, NOTHING)
            self._orders[running.code] = running.events
            if len(running.events) > _LONGEST * len(self._participants):
                del self._orders[running.code]

    def _begin_together(self, code: int, trains: bool) -> None:
        """Begin a pass together; if other ranks begin an evaluation first, join all of that before."""
        assert self._control is not None
        while True:
            label = self._labels[code]
            mine = [code, self._number]
            rows = self._control.exchange([BEGINS, *mine, trains], f"all ranks to begin {label}")
            if any(row[0] != BEGINS for row in rows):
                raise self._different(f"begins {label}")
            if any(row[1:3] != mine for row in rows):
                evaluations = sorted(row[1:3] for row in rows if not row[3])
                # All ranks choose the same of several, of this model or of another one: those that do not run
                # it join it first.
                order = self._control.numbered(evaluations[0][1]) if evaluations else None
                if order is None:
                    raise self._different(f"begins {label}")
                if evaluations[0] != mine:
                    order._run_along(evaluations[0][0])
                    continue
            self._control.start_over()
            return

    def _run_along(self, code: int) -> None:
        """Join all collectives of an evaluation that this rank does not run."""
        initialise_root(self._root)
        self._labels.setdefault(code, "a forward that only other ranks run")
        with torch.no_grad():
            running = self._open(code, in_backward=False, asks=True)
            self._finish(running)
            self._passes.pop()
        if not self._pending:
            for participant in self._participants:
                participant.end_forward()
        self._unsure = True  # as on the ranks that run it

    def _different(self, mine: str) -> LockstepError:
        assert self._control is not None
        self._control.look_for_faults()  # a rank that failed may be at its next pass
        said = self._control.gather(mine, "what the other ranks do")
        lines = "\n".join(f"  rank {rank} {text}" for rank, text in enumerate(said))
        return self._control.refuse(
            "the ranks run different passes; all of them must run the same ones in the same order, but for "
            f"evaluations, of which some may run more:\n{lines}"
        )

    def _open(self, code: int, *, in_backward: bool, asks: bool) -> _Pass:
        known = self._orders.get(code)
        opened = _Pass(
            code,
            self._labels[code],
            [] if known is None else list(known),
            in_backward=in_backward,
            asks=asks,
            is_new=known is None,
            has_asked=known is None,
        )
        self._passes.append(opened)
        return opened

    def _code(self, label: str) -> int:
        code = zlib.crc32(label.encode())
        self._labels[code] = label
        return code

    def _label_of(self, event: int) -> str:
        if event == NOTHING:
            return "the end"
        index, code = divmod(event, CODES)
        return self._participants[index].label(code)

    # Units that no rank has run yet

    def _add_unrun(self, entered: _Pass) -> None:
        ran = {event // CODES for event in entered.events}
        is_whole = entered.label == "a forward of the model"
        reached = range(len(self._participants)) if is_whole else inside_parts(ran, self._participants)
        missing = [index for index in reached if index not in ran]
        self._unrun[entered.code] = missing
        forward = [(i, i * CODES + self._participants[i].forward_code()) for i in missing]
        self._orders[entered.code] = insert_forward(entered.events, forward, CODES)
        for _, event in forward:
            self._join(entered, event)

    def _add_unrun_backward(self, running: _Pass) -> None:
        missing = {index for code in self._pending for index in self._unrun.get(code, ())}
        missing -= {e // CODES for e in running.events if not is_gather(e, self._participants)}
        events = running.events
        for index in sorted(missing, key=lambda i: -self._spans[i].end):
            events = insert_backward(events, index, self._participants, self._spans, reduces=self.syncs)
        self._orders[running.code] = events

    def _set_prefetches(self, entered: _Pass) -> None:
        """Set each unit to prefetch in backward the one before it in the agreed order, run here or not.

        FSDP2's own choice is the unit before it among those that this rank ran.
        """
        self._prefetches_for = entered.code
        found = spans([e // CODES for e in self._orders[entered.code]], self._participants)
        self._spans.update(found)
        units = {
            index: participant
            for index in sorted(found, key=lambda i: found[i].end)
            if isinstance(participant := self._participants[index], UnitCollectives)
        }
        # Nothing follows the first unit in backward. It names itself: without a choice FSDP2 makes its own.
        for first in [*units][:1]:
            set_backward_prefetch(units[first].module, units[first].module)
        for before, index in pairwise(units):
            set_backward_prefetch(units[index].module, units[before].module)
            self._gathers_ahead[before] = index
