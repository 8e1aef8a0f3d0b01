"""Training steps of several candidates in one process, timed in turn."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.support.baselines import TrainStep, mean_loss
from benchmarks.support.timing import alternate


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
