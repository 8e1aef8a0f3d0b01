"""Runs many habits on a few processes; one that fails, hangs or dies takes no other down.

Every rank writes each outcome to a file and waits for its peers'. After one that is not equal on all ranks
the processes end, since what it left behind may spoil the next: the others go on in new ones.
"""

import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from osdp import ModelDesc
from osdp.comm.objects import on_first_rank
from tests.habits.running.context import ALONE, Context, Record
from tests.habits.running.habit import Habit, habits_named
from tests.habits.running.outcome import CRASHED, EQUAL, HUNG, SKIPPED, Outcome, joined, judged
from tests.helpers.distributed import BackendCrash, RankCrashedError, RankError, run_once
from tests.helpers.load import slowdown

#: Seconds the other ranks get to end once one has.
GRACE = 12.0


@dataclass(frozen=True, slots=True)
class Case:
    """One habit in one framework.

    Attributes:
        habit: Its name.
        framework: As in Context.
        low: Whether parameters are computed in bfloat16.
    """

    habit: str
    framework: str
    low: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """What all runs of a habit in one dtype have in common.

    Attributes:
        records: What one process recorded.
        descriptions: Of the models it wraps, in order; grows with the first run that needs them.
    """

    records: Sequence[Record]
    descriptions: list[ModelDesc]


def measure(
    cases: Sequence[Case], world_size: int, done: Callable[[Case, Outcome], None] = lambda case, outcome: None
) -> dict[Case, Outcome]:
    """The outcome of each case; ``done`` is told each as soon as it is known."""
    outcomes: dict[Case, Outcome] = {}
    pending = list(cases)
    crashed: set[Case] = set()
    while pending:
        ended, fault, died = _attempt(pending, world_size)
        if died and ended and ended[-1].kind not in (EQUAL, SKIPPED):
            ended.pop()
        stopped = pending[len(ended)] if len(ended) < len(pending) else None
        if died and stopped is not None and stopped not in crashed:
            # The backend may be to blame (tests.helpers.distributed.run): a second try.
            crashed.add(stopped)
            warnings.warn(BackendCrash(f"{stopped}: {fault}"), stacklevel=2)
        elif stopped is not None and (not ended or ended[-1].kind == EQUAL):
            ended.append(Outcome(CRASHED, " ".join(fault.split())[-300:]))
        for case, outcome in zip(pending, ended, strict=False):
            outcomes[case] = outcome
            done(case, outcome)
        pending = pending[len(ended) :]
    return outcomes


def _attempt(cases: Sequence[Case], world_size: int) -> tuple[list[Outcome], str, bool]:
    """The outcomes up to the first that ended the ranks; how they ended, and whether by a signal."""
    limit = sum(habits_named([case.habit])[case.habit].seconds for case in cases) + 60
    fault, died = "the processes ended without a word", False
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_once(world_size, _work, (tuple(cases), folder), timeout=limit)
        except (RankError, TimeoutError) as error:
            fault, died = str(error), isinstance(error, RankCrashedError)
        found = [_read(Path(folder), index, world_size) for index in range(len(cases))]
    return [outcome for outcome in found if outcome is not None], fault, died


def _read(folder: Path, index: int, world_size: int) -> Outcome | None:
    paths = [folder / f"{index}.{rank}" for rank in range(world_size)]
    if not any(path.exists() for path in paths):
        return None
    lost = Outcome(CRASHED, "the process died without a word")
    return joined([pickle.loads(path.read_bytes()) if path.exists() else lost for path in paths])


def _work(cases: Sequence[Case], folder: str) -> None:
    """What each rank runs: the cases in order, to the first that is not equal on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    habits = habits_named({case.habit for case in cases})
    watch = _Watch(Path(folder), rank, world_size)
    references: dict[tuple[str, bool], Reference] = {}
    for index, case in enumerate(cases):
        habit = habits[case.habit]
        with watch.over(index, habit.seconds * slowdown()) as report:
            outcome = _outcome(habit, case, rank, world_size, references)
            report(outcome)
        # A mesh of an earlier case is nothing that a later one may lean on.
        if any(kind not in (EQUAL, SKIPPED) for kind in watch.all_outcomes(index)):
            sys.stdout.flush()
            os._exit(0)
    watch.end()


def _outcome(
    habit: Habit,
    case: Case,
    rank: int,
    world_size: int,
    references: dict[tuple[str, bool], Reference],
) -> Outcome:
    if case.framework in habit.skips:
        return Outcome(SKIPPED, habit.skips[case.framework])
    if case.low and (habit.low_tolerance is None or case.framework == "ddp"):
        return Outcome(SKIPPED, "says nothing in bfloat16")
    start = time.monotonic()
    key = (case.habit, case.low)
    if key not in references:
        records, fault = on_first_rank(partial(_alone, habit, world_size, case.low))
        if fault:
            return Outcome(CRASHED, f"one process: {fault}")
        references.clear()
        references[key] = Reference(records, [])
    right = references[key]
    dtype = torch.bfloat16 if case.low else None
    context = Context(habit, case.framework, world_size, rank, dtype, right.descriptions)
    context, error = _run(habit, context, case.low)
    tolerance = (habit.low_tolerance if case.low else None) or habit.tolerance
    outcome = judged(context.records, right.records, error, tolerance, case.low)
    return replace(outcome, seconds=time.monotonic() - start, modes=len(context.modes))


def _alone(habit: Habit, world_size: int, low: bool) -> tuple[list[Record], str]:
    """What one process records, and what stopped it, if anything did."""
    context, error = _run(habit, Context(habit, ALONE, world_size, 0, None), low)
    trace = "" if error is None else "".join(traceback.format_exception(error))
    return context.records, " ".join(trace.split())[-400:]


def _run(habit: Habit, context: Context, low: bool) -> tuple[Context, Exception | None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if low else torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            habit.function(context)
    except Exception as error:
        return context, error
    finally:
        torch.set_default_dtype(before)
    return context, None


class _Watch:
    """Outcomes as files, and a thread that ends the process of a case that takes too long."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._index, self._deadline = -1, float("inf")
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """All cases are over."""
        self._ended.set()
        self._thread.join()

    def over(self, index: int, seconds: float) -> "_Watch":
        self._index, self._deadline = index, time.monotonic() + seconds
        return self

    def __enter__(self) -> Callable[[Outcome], None]:
        return self._write

    def __exit__(self, *_: object) -> None:
        self._deadline = float("inf")

    def all_outcomes(self, index: int) -> list[str]:
        """Kinds of all ranks; waits for them."""
        paths = [self._folder / f"{index}.{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + 3 * GRACE * slowdown()
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                return [HUNG]
            time.sleep(0.002)
        return [pickle.loads(path.read_bytes()).kind for path in paths]

    def _write(self, outcome: Outcome) -> None:
        path = self._folder / f"{self._index}.{self._rank}"
        if not path.exists():
            path.with_suffix(f".{self._rank}.part").write_bytes(pickle.dumps(outcome))
            path.with_suffix(f".{self._rank}.part").rename(path)

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            deadline = self._deadline
            if self._someone_ended():
                deadline = self._deadline = min(deadline, time.monotonic() + GRACE * slowdown())
            if time.monotonic() > deadline:
                frame = sys._current_frames().get(self._main)
                trace = traceback.format_stack(frame) if frame is not None else []
                self._write(Outcome(HUNG, "in " + " ".join("".join(trace[-2:]).split())[-300:]))
                os._exit(1)

    def _someone_ended(self) -> bool:
        return any(
            (self._folder / f"{self._index}.{rank}").exists()
            for rank in range(self._world_size)
            if rank != self._rank
        )
