"""Control messages between ranks, and the detection of deadlocks and failed ranks.

Ranks make small exchanges in a gloo group of their own, and leave messages in a key-value store. A rank that
is blocked in a collective polls the store every second, where the others write what they wait for, an error
they met, or that they have ended. So a rank that would wait forever (all ranks wait, but not for the same
thing, or one has failed) ends within seconds, with a message that shows where each rank is. A rank that is
merely slow has written nothing, and is waited for.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import pickle
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.groups import device_of, equalize_group_count
from osdp.comm.messages import Pending
from osdp.torch_private.distributed import all_gather, backend_of, store_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Interval in which a rank waits for a collective before it reports that it is blocked and polls the store.
_SLICE = timedelta(seconds=1.0)
#: Seconds that a rank whose connection broke waits for a message of the rank that broke it.
_PATIENCE = 4.0


#: Number of intervals after which a blocked rank logs what it waits for.
_TELL_AFTER = 10

#: First numbers of exchanges that may meet: a rank begins a pass, asks for a collective, meets others, or
#: compares values.
BEGINS, ASKS, MEETS, COMPARES = range(4)


class LockstepError(RuntimeError):
    """Ranks cannot go on together: one of them failed, or they wait for different things."""


class Control:
    """Control messages between the ranks of one mesh: a gloo group of their own, and a store.

    Args:
        group: A gloo group, used only for small exchanges.
        blocks: Whether collectives of the model block the host, so that they are waited for in intervals.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
        group: The group.
        ranks: Its ranks in the default group, in order.
    """

    ranks: list[int]

    def __init__(self, group: dist.ProcessGroup, *, blocks: bool) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._blocks = blocks
        self._store = store_of(group)
        self._serial = 0
        self._faults = 0
        self._seen = 0
        self._ended = False
        self._broken_by: str | None = None
        #: The orders of collectives of the models on these ranks, by number.
        self._orders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._num_orders = 0
        atexit.register(_farewell, weakref.ref(self))

    @classmethod
    def over(cls, mesh: DeviceMesh) -> "Control | None":
        """The control of the ranks of ``mesh``, created once; ``None`` for one rank and for fake groups."""
        group: dist.ProcessGroup = mesh.get_group()
        if mesh.size() == 1 or dist.get_backend(group) == "fake":
            return None
        made = _MADE.get(group)
        if made is None:
            equalize_group_count(mesh, device_of(mesh))  # some ranks may have made groups of their own
            ranks = dist.get_process_group_ranks(group)
            own: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            # Not by the group's name, which is "undefined" if nobody chose one, or has one for each device.
            made = _MADE[group] = cls(own, blocks=backend_of(group, device_of(mesh)) == "gloo")
            made.ranks = sorted(ranks)
        return made

    @classmethod
    def known(cls, mesh: DeviceMesh) -> "Control | None":
        """The control of the ranks of ``mesh``, if it was created."""
        return _MADE.get(mesh.get_group()) if mesh.ndim == 1 else None

    @classmethod
    def among(cls, mesh: DeviceMesh) -> "Control | None":
        """The last control that was created for these ranks, whatever their mesh was."""
        ranks = sorted(mesh.mesh.flatten().tolist())
        return next((made for made in reversed(list(_MADE.values())) if made.ranks == ranks), None)

    # Models

    def number(self, order: Any) -> int:
        """The number of a model's order of collectives, which all ranks make one after the other."""
        self._num_orders += 1
        self._orders[self._num_orders] = order
        return self._num_orders

    def numbered(self, number: int) -> Any:
        """The order of that number; ``None`` if this rank has given its model up."""
        return self._orders.get(number)

    # Exchanges

    def exchange(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """All-gather small integers; returns one row per rank.

        Args:
            numbers: This rank's; the same number of them on every rank.
            what: The purpose, for messages of other ranks.
        """
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everybody = mine.new_empty(self.size * len(numbers))
        self.run(lambda: all_gather(everybody, mine, group=self.group, async_op=True), what)
        found: list[list[int]] = everybody.view(self.size, -1).tolist()
        return found

    def meet(self, what: str, mine: int = 0) -> list[int]:
        """Return when all ranks are here for the same; what each of them has brought.

        Args:
            what: The purpose, for messages of all ranks.
            mine: What this rank brings.

        Raises:
            LockstepError: Others are somewhere else.
        """
        # As many numbers as ranks exchange that agree on collectives: gloo ends a process that gets more.
        rows = self.exchange([MEETS, zlib.crc32(what.encode()), mine, 0], what)
        others = [str(rank) for rank, row in enumerate(rows) if row[:2] != rows[self.rank][:2]]
        if others:
            raise self.refuse(
                f"rank {self.rank} came for {what}, and rank {', '.join(others)} for something else: all of "
                "them have to do it, in the same order, or none"
            )
        return [row[2] for row in rows]

    def maximum(self, numbers: Sequence[int], what: str) -> list[int]:
        """The elementwise maximum of ``numbers`` over the ranks."""
        votes = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.run(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group, async_op=True), what)
        found: list[int] = votes.tolist()
        return found

    def gather(self, mine: T, what: str) -> list[T]:
        """All-gather pickled objects; returns them in rank order."""
        data = pickle.dumps(mine)
        longest = max(size for (size,) in self.exchange([len(data)], what))
        # An all-gather takes as much from every rank.
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everybody = padded.new_empty(self.size * longest)
        self.run(lambda: all_gather(everybody, padded, group=self.group, async_op=True), what)
        return [pickle.loads(bytes(one.tolist())) for one in everybody.view(self.size, -1)]

    def agree(self, mine: object, what: str) -> bool:
        """Whether ``mine`` has the same ``repr`` on all ranks."""
        digest = hashlib.sha256(repr(mine).encode()).digest()
        # Seven bytes are the most that surely fit into a signed number of eight.
        numbers = [int.from_bytes(digest[at : at + 7], "big") for at in range(0, 28, 7)]
        return all(theirs == numbers for theirs in self.exchange(numbers, what))

    # Waiting

    def run(self, start: Callable[[], Pending | None], what: str, *, of_model: bool = False) -> None:
        """Start a collective and wait for it.

        Args:
            start: Starts it.
            what: Its name, for messages of other ranks.
            of_model: Whether it is one of the model's, for which on an accelerator only the stream waits.

        Raises:
            LockstepError: Another rank failed, or the ranks wait for each other.
        """
        try:
            work = start()
        except RuntimeError as error:
            if not _is_of_connection(error):
                raise  # unsupported by the backend, for instance, and then on all ranks
            raise self._broken(error, what) from error
        if work is not None and of_model:
            self.wait(work, what)
        elif work is not None:
            self._wait(work, what)

    def wait(self, work: Pending, what: str) -> None:
        """Wait for a collective of the model; on an accelerator only the stream waits.

        Raises:
            LockstepError: Another rank failed, or the ranks wait for each other.
        """
        if self._blocks:
            self._wait(work, what)
        else:
            work.wait()

    @property
    def blocks(self) -> bool:
        """Whether collectives of the model block the host."""
        return self._blocks

    def _wait(self, work: Pending, what: str) -> None:
        self.check()
        if self._finished(work, what):
            return
        self._serial += 1
        self._say("waits", {"serial": self._serial, "for": what})
        self._store.add("waiting", 1)
        try:
            before: list[Any] | None = None
            patience = _TELL_AFTER
            while not self._finished(work, what):
                before = self._look(before)
                patience -= 1
                if not patience:
                    self._tell_waiting(what)
        finally:
            # A fault of this rank is already in the store, and others look for faults before they count the
            # waiting ranks: so they see the fault first.
            with contextlib.suppress(RuntimeError):
                self._store.add("waiting", -1)

    def _tell_waiting(self, what: str) -> None:
        waiting = self._store.add("waiting", 0)
        logger.warning(
            "rank %d waits for %s; %d of %d ranks have not come there. If they are in a collective of your "
            "own, such as a barrier after an evaluation of fewer batches, nobody will go on: give all ranks "
            "as many batches",
            self.rank,
            what,
            self.size - waiting,
            self.size,
        )

    def _finished(self, work: Pending, what: str) -> bool:
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it may have ended since
            except RuntimeError:
                raise self._broken(error, what) from error
        return True

    def _look(self, before: list[Any] | None) -> list[Any] | None:
        """Poll the store for faults and for a deadlock.

        Args:
            before: The messages of all ranks at the last poll, if all were waiting then.

        Returns:
            Their messages at this poll; ``None`` if some rank is not waiting.

        Raises:
            LockstepError: Another rank failed, or all wait, for different things, at two polls in a row.
        """
        self.look_for_faults()
        if self._store.add("waiting", 0) < self.size:
            return None
        words = [self._read("waits", rank) for rank in range(self.size)]
        # Each wait has a serial number: equal words mean that no rank has gone on between the two polls.
        if words == before and len({word["for"] for word in words if word}) > 1:
            lines = "\n".join(f"  rank {r} waits for {w['for']}" for r, w in enumerate(words) if w)
            raise self._give_up(
                "the ranks wait for different things, and would do so forever; all of them must run the same "
                f"passes, each with the same units or fewer, in one order:\n{lines}"
            )
        return words

    def look_for_faults(self) -> None:
        """Poll the store for faults of other ranks.

        Raises:
            LockstepError: There is one.
        """
        told = self._store.add("faults", 0)
        if told == self._seen:
            return
        for rank in range(self.size):
            word = self._read("fault", rank)
            if rank != self.rank and word is not None and (word["count"] > self._faults or word["broken"]):
                raise self._give_up(word["text"])
        self._seen = told

    def _broken(self, error: BaseException, what: str) -> LockstepError:
        """The error to raise when the backend has lost a connection: a fault in the store explains it."""
        deadline = time.monotonic() + _PATIENCE
        try:
            while time.monotonic() < deadline:
                self.look_for_faults()
                time.sleep(0.1)
        except LockstepError as found:
            return found
        except RuntimeError:
            pass  # the store is gone with its rank
        return self._give_up(
            f"rank {self.rank} waited for {what} when the connection to another rank broke, and none has "
            f"said why: a process has ended without a word; see the output of the other ranks ({error})"
        )

    # Messages in the store

    def refuse(self, text: str) -> LockstepError:
        """Report to the others that this rank gives up, with the reason; returns the error to raise."""
        self._tell_fault(text)
        return LockstepError(text)

    def _give_up(self, text: str) -> LockstepError:
        """As :meth:`refuse`, when a collective will never end, so that no other can follow."""
        self._broken_by = text
        return self.refuse(text)

    def check(self) -> None:
        """Raise if an earlier collective was given up.

        Raises:
            LockstepError: It was; the processes must be restarted.
        """
        if self._broken_by is not None:
            raise LockstepError(
                "an earlier error left collectives that only some ranks began; start the processes again "
                f"from the last checkpoint. It was: {self._broken_by}"
            )

    def fault(self, error: BaseException | None, where: str) -> None:
        """Report an error of this rank to the others."""
        if isinstance(error, LockstepError):
            return  # the others have it already
        said = "an error" if error is None else f"{type(error).__name__}: {error}"
        self._tell_fault(f"rank {self.rank} failed in {where}: {said}")

    @property
    def failed(self) -> bool:
        """Whether this rank has reported an error since :meth:`start_over`."""
        return self._faults > 0

    def start_over(self) -> None:
        """Clear this rank's fault: all ranks continue together."""
        if self._faults:
            self._faults = 0
            self._say("fault", {"count": 0, "text": "", "broken": False})

    def _tell_fault(self, text: str) -> None:
        self._faults += 1
        with contextlib.suppress(RuntimeError):
            broken = self._broken_by is not None
            self._say("fault", {"count": self._faults, "text": text, "broken": broken})
            self._store.add("faults", 1)

    def say_farewell(self) -> None:
        """Report to the others that this process ends, with the exception that ends it, if any."""
        last = getattr(sys, "last_value", None)
        if self._ended or isinstance(last, LockstepError):
            return
        self._ended = True
        if last is not None and not self._faults:
            self.fault(last, "its script")
        elif not self._faults:
            self._tell_fault(f"the process of rank {self.rank} has ended")

    def _say(self, kind: str, word: dict[str, Any]) -> None:
        self._store.set(f"{kind}/{self.rank}", json.dumps(word))

    def _read(self, kind: str, rank: int) -> dict[str, Any] | None:
        key = f"{kind}/{rank}"
        if not self._store.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found


def _farewell(control: "weakref.ref[Control]") -> None:
    alive = control()
    if alive is not None:
        alive.say_farewell()


#: Groups are costly and never freed, so each group of ranks creates its own only once while it exists.
_MADE: WeakKeyDictionary[dist.ProcessGroup, Control] = WeakKeyDictionary()


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether gloo reports a lost connection, rather than an unsupported operation."""
    text = str(error)
    return "gloo/" in text or "onnection" in text or "imed out" in text
