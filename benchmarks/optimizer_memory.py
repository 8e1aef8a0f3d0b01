"""Claim: the optimizer memory in ``osdp.model.training`` is what torch's optimizers keep and allocate.

``python -m benchmarks.optimizer_memory [--json FILE]`` counts, for every class and set of options, the bytes
of state after eight steps (RAdam changes its formula at the sixth) and the most bytes of live storages during
the ninth above those at its start, and prints them beside the table's. Exits 1 where they differ.
"""

import argparse
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osdp.model.training import OPTIMIZERS, Training
from osdp.profiler.optimizer import make_optimizer
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import step_local_tensors

#: Elements of the parameters. A large one first and one last tell apart what is proportional to all bytes, to
#: the largest tensor, and to the tensor before the one at hand.
SIZES = ((1024,), (1024, 1024), (4096, 1024), (1024, 4096), (1024,) * 6, (512, 2048, 1024, 256))

_OPTIONS = ("momentum", "nesterov", "amsgrad", "centered", "weight_decay")
_WARM_UP = 8


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operators return while they are alive.

    Attributes:
        live: Bytes alive now.
        peak: Most bytes alive so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` from now on."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
            self.peak = max(self.peak, self.live)

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return result


@dataclass(frozen=True)
class Row:
    """What one optimizer was counted to keep and allocate, and what the table says; bytes."""

    optimizer: str
    options: tuple[str, ...]
    implementation: str
    sizes: tuple[int, ...]
    state_bytes: int
    state_bytes_table: int
    temporary_bytes: int
    temporary_bytes_table: int

    @property
    def agrees(self) -> bool:
        """Whether count and table are equal."""
        counted = (self.state_bytes, self.temporary_bytes)
        return counted == (self.state_bytes_table, self.temporary_bytes_table)


def variants() -> Iterator[Training]:
    """Every class of the table with every set of its options and every implementation."""
    for name, cost in OPTIMIZERS.items():
        for chosen in itertools.product((False, True), repeat=len(cost.options)):
            options = {option: on for option, on in zip(cost.options, chosen, strict=True) if on}
            if "nesterov" in options and "momentum" not in options:
                continue
            yield Training(optimizer=name, foreach=False, **options)
            yield Training(optimizer=name, foreach=True, **options)
            if cost.fused:
                yield Training(optimizer=name, fused=True, **options)


def build(training: Training, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``training`` describes, with gradients in place."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return make_optimizer(training, parameters)


def measure(
    training: Training, sizes: Sequence[int], make: Callable[[int], torch.Tensor] = torch.randn
) -> Row:
    """Count one optimizer on parameters of ``sizes`` elements that ``make`` creates on CPU."""
    parameters = [nn.Parameter(make(size)) for size in sizes]
    optimizer = build(training, parameters)
    # As the runtime steps DTensors.
    is_sharded = isinstance(parameters[0], DTensor)
    step = partial(step_local_tensors, optimizer, wrap_like) if is_sharded else optimizer.step
    for _ in range(_WARM_UP):
        step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    counter = LiveStorages()
    for tensor in (*parameters, *(p.grad for p in parameters), *state):
        counter.track(tensor)
    resting = counter.live
    with counter:
        step()
    local = [getattr(p, "_local_tensor", p) for p in parameters]
    nbytes = [tensor.numel() * tensor.element_size() for tensor in local]
    return Row(
        optimizer=training.optimizer,
        options=tuple(name for name in _OPTIONS if getattr(training, name)),
        implementation=training.implementation("cpu"),
        sizes=tuple(sizes),
        state_bytes=resting - 2 * sum(nbytes),
        state_bytes_table=training.state_bytes(sum(nbytes), len(nbytes)),
        temporary_bytes=_without_scalars(counter.peak - resting),
        temporary_bytes_table=training.step_temporary_bytes(nbytes, "cpu"),
    )


def _without_scalars(nbytes: int) -> int:
    """``nbytes`` without the few 0-dim tensors a step makes: the parameters are multiples of 1 KiB."""
    return nbytes // 1024 * 1024


def main() -> int:
    """Print the table, write it as JSON, and say whether all of it agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(training, sizes) for training in variants() for sizes in SIZES]
    print(f"{'optimizer':10}{'options':32}{'step':10}{'state':>8}{'temporaries for 1-1':>22}{'for 4-1':>22}")
    for key, group in itertools.groupby(rows, key=attrgetter("optimizer", "options", "implementation")):
        by_sizes = {row.sizes: row for row in group}
        single, pair, uneven = (by_sizes[sizes] for sizes in (SIZES[0], SIZES[1], SIZES[2]))
        fault = "" if all(row.agrees for row in by_sizes.values()) else "  DIFFERS FROM THE TABLE"
        print(
            f"{key[0]:10}{' '.join(key[1]):32}{key[2]:10}{single.state_bytes / 4096:8.3f}"
            f"{pair.temporary_bytes / 4096:22.2f}{uneven.temporary_bytes / 4096:22.2f}{fault}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as file:
            json.dump(report(rows), file, indent=1)
    return 0 if all(row.agrees for row in rows) else 1


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON object of this claim."""
    return {
        "claim": "optimizer_memory",
        "command": " ".join(sys.argv),
        "environment": {"torch": torch.__version__, "python": sys.version.split()[0], "device": "cpu"},
        "rows": [vars(row) for row in rows],
        "summary": {"rows": len(rows), "differing": sum(not row.agrees for row in rows)},
    }


if __name__ == "__main__":
    sys.exit(main())
