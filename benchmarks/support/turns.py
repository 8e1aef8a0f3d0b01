"""Training steps of several candidates in one process, timed in turn."""

import gc
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from benchmarks.support.baselines import TrainStep, mean_loss
from benchmarks.support.timing import alternate

#: Rounds of one making of the candidates, the fewest before intervals are looked at, and the most of them.
ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 5, 20, 200
#: Seconds after which no further rounds begin: on slow networks a step takes seconds, and varies little.
ENOUGH = 240
#: The loss of the last of them is compared with a single process. In later ones rounding grows beyond any
#: tolerance: a ResNet's loss under DDP on four ranks is off by 3e-8 in step 2, 2e-5 in step 5, 7e-4 in 8.
COMPARED_STEPS = 5


@dataclass(frozen=True)
class Turns:
    """What the turns of a worker showed.

    Attributes:
        seconds: Seconds a step, one per round, by candidate.
        losses: Loss of each candidate's last step, averaged over the ranks.
        steps: Steps each candidate did, warm-up included.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    steps: int


def take_turns(
    steps: Mapping[str, TrainStep], *, rounds: int, warmup: int, repeats: int = 1, settling: int = 0
) -> Turns:
    """Time the steps of all candidates in turn, on every rank of the live group.

    Args:
        steps: A candidate's step number ``i``, by name; see
            :meth:`benchmarks.support.candidates.Candidate.prepare`.
        rounds: Timed turns of each.
        warmup: Untimed turns of each before.
        repeats: Timed steps in one turn.
        settling: Untimed steps at the beginning of each turn.
    """
    done, losses = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0.0)

    def run(name: str) -> None:
        losses[name] = steps[name](done[name])
        done[name] += 1

    seconds = alternate(
        {name: lambda name=name: run(name) for name in steps},
        rounds=rounds,
        warmup=warmup,
        repeats=repeats,
        settling=settling,
        synchronize=dist.barrier,
    )
    count = (rounds + warmup) * (settling + repeats)
    return Turns(seconds, {name: mean_loss(loss) for name, loss in losses.items()}, count)


def take_turns_until_narrow(
    makers: Mapping[str, Callable[[], TrainStep]],
    still_needed: Callable[[Mapping[str, list[float]]], Collection[str]],
    *,
    clearly_slower: Callable[[Mapping[str, list[float]]], Collection[str]] = lambda seconds: (),
    most_rounds: int = MOST_ROUNDS,
) -> Turns:
    """Time the steps of all candidates in turn, on every rank of the live group, for as long as needed.

    Two instances of one program differ by several percent, by where their memory happens to lie; so each
    candidate is made anew for every few rounds. One that is no longer needed takes no further part: of two
    candidates the first rounds are those in which both did.

    Args:
        makers: Makes a candidate's step number ``i``, by name.
        still_needed: Names of the candidates that have to go on after :data:`LEAST_ROUNDS`, given the
            seconds so far.
        clearly_slower: Names of those that need not go on until then.
        most_rounds: The most rounds.

    Returns:
        As of :func:`take_turns`, with the seconds of as many rounds as each took part in. Losses are those of
        step :data:`COMPARED_STEPS` of the last instances, which do a step more than :data:`ROUNDS`.
    """
    losses = dict.fromkeys(makers, 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    steps: dict[str, TrainStep] = {}
    done: dict[str, int] = {}

    def run(name: str) -> None:
        loss = steps[name](done[name])
        if done[name] < COMPARED_STEPS:
            losses[name] = loss
        done[name] += 1

    taking_part, begin = list(makers), time.monotonic()
    while taking_part:
        steps.clear()
        gc.collect()
        steps |= {name: makers[name]() for name in taking_part}
        done |= dict.fromkeys(taking_part, 0)
        # The first step makes optimizer states and buckets.
        found = alternate(
            {name: partial(run, name) for name in taking_part},
            rounds=ROUNDS,
            warmup=1,
            synchronize=dist.barrier,
            seed=len(seconds[taking_part[0]]),
        )
        for name, values in found.items():
            seconds[name] += values
        rounds = len(seconds[taking_part[0]])
        if rounds >= most_rounds or time.monotonic() - begin > ENOUGH:
            taking_part = []
        elif rounds >= LEAST_ROUNDS:
            needed = still_needed(seconds)
            taking_part = [name for name in taking_part if name in needed]
        else:
            slower = clearly_slower(seconds)
            taking_part = [name for name in taking_part if name not in slower]
        # As the first rank finds: clocks and times differ.
        decided = [taking_part]
        dist.broadcast_object_list(decided, 0)
        taking_part = decided[0]
    return Turns(seconds, {name: mean_loss(loss) for name, loss in losses.items()}, COMPARED_STEPS)
