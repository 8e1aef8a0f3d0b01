"""Random states of tensor-parallel ranks inside the model, separate from those of the user's program.

Replicated activations must get the same dropout masks on all ranks: replicas of weights would drift apart as
soon as one rank drew a random number on its own, to shuffle its data for example. So inside the model torch,
Python and NumPy draw from states of the tensor-parallel group: a *shared* one, the same on all ranks, and
where activations are sharded (between a column and a row module, or along the sequence) each rank's *own* of
torch. Outside the model they continue from the states of the user's program; seeds set there do not affect
the model.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from osdp.nn.random_states import python_sources, seeded_python_states, torch_sources
from osdp.runtime.replay import Changing
from osdp.runtime.tensor_parallel.collectives import TensorParallelGroup
from osdp.torch_private.autograd import in_backward, queue_backward_callback


class _Place(Enum):
    OUTSIDE = auto()
    SHARED = auto()
    OWN = auto()


def _refuse_draws() -> None:
    raise RuntimeError(
        "a part of a layer that tensor-parallel ranks share draws random numbers, such as dropout of "
        "attention, inside torch.utils.checkpoint, which cannot draw the same ones again: let the plan "
        "recompute instead, by OSDP(..., recompute=True), or set this dropout to 0"
    )


class GroupRandom(Changing):
    """One rank's random states of a tensor-parallel group.

    Args:
        ranks: The group; torch's random states must be the same on all its ranks at this point.
        device: This rank's device.
    """

    def __init__(self, ranks: TensorParallelGroup, device: torch.device) -> None:
        self._sources = torch_sources(device)
        self._place = _Place.OUTSIDE
        #: The states before a recomputation that is the user's; whether it is in a region without its module.
        self._before: dict[_Place, list[Any]] | None = None
        self._alone = False
        self._open: list[tuple[nn.Module, _Place]] = []
        self._states = {_Place.SHARED: [source.get() for source in self._sources]}
        # Seeds are drawn rather than fixed, so that another stage of this rank gets other ones.
        devices = dict.fromkeys((torch.device("cpu"), device))
        seeds = [int(torch.randint(2**62, (), device=where)) for where in devices]
        self._states[_Place.OWN] = [
            torch.Generator(where).manual_seed(seed + ranks.rank).get_state()
            for where, seed in zip(devices, seeds, strict=True)
        ]
        self._seed = seeds[0]
        #: States of Python's and NumPy's generators: the group's outside the model, the program's inside.
        self._others = seeded_python_states(self._seed)
        self._switch: Callable[[_Place], None] = torch.compiler.disable(self._switch_states)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupRandom":
        """Copies of a module share the states of the group."""
        return self

    def surround(self, module: nn.Module, *, sharded: bool = False) -> None:
        """Use the group's states inside ``module``: each rank's own if ``sharded``, else the shared one."""
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        place = _Place.OWN if sharded else _Place.SHARED
        vars(module)["group_random"] = self  # found there by snapshots for recomputation
        module.register_forward_pre_hook(lambda module, _: enter(module, place), prepend=True)
        module.register_forward_hook(lambda module, *_: leave(module), always_call=True)

    def begin_region(self) -> None:
        """Switch from the shared to this rank's own state: activations are sharded from here on."""
        if self._place is _Place.OUTSIDE and in_backward():
            self._alone = True
            self._draw_again()
        if self._place is _Place.SHARED:
            self._switch(_Place.OWN)

    def end_region(self) -> None:
        """Switch back to the shared state: activations are replicated from here on."""
        if self._place is _Place.OWN:
            self._switch(_Place.SHARED)
        if self._alone:
            self._alone = False
            self._switch(_Place.OUTSIDE)

    def _draw_again(self) -> None:
        """A user's checkpoint recomputes, from the shared state that torch had when it began."""
        self._before = dict(self._states)
        self._place = _Place.SHARED

    def _enter(self, module: nn.Module, place: _Place) -> None:
        self._open.append((module, self._place))
        if self._place is _Place.OUTSIDE and in_backward():
            self._draw_again()
            if place is _Place.SHARED:
                return
        if self._place is _Place.OUTSIDE or place is _Place.OWN:
            self._switch(place)

    def _leave(self, module: nn.Module) -> None:
        while any(entered is module for entered, _ in self._open):
            # Where a forward raised, modules inside it may not have been left.
            entered, before = self._open.pop()
            if entered is module:
                self._switch(before)
                return

    def _check_draws(self) -> None:
        now = (source.get() for source in self._sources)
        if all(s.same(a, b) for s, a, b in zip(self._sources, now, self._states[_Place.OWN], strict=True)):
            return
        # Here it might be silenced: torch ends recomputations by an exception.
        queue_backward_callback(_refuse_draws)

    def _switch_states(self, place: _Place) -> None:
        if place is self._place:
            return
        if self._before is not None and self._place is _Place.OWN:
            self._check_draws()
        if self._before is not None and place is _Place.OUTSIDE:
            # The checkpoint has kept the state of what is outside.
            self._states, self._before, self._place = self._before, None, place
            return
        if _Place.OUTSIDE in (self._place, place):
            self._exchange_others()
        self._states[self._place] = [source.get() for source in self._sources]
        for source, state in zip(self._sources, self._states[place], strict=True):
            source.set(state)
        self._place = place

    def _exchange_others(self) -> None:
        """Exchange Python's and NumPy's states, by which models mask inputs or drop layers."""
        sources = python_sources()
        if self._place is _Place.OUTSIDE and len(self._others) < len(sources):
            # NumPy was imported in the meantime.
            self._others += seeded_python_states(self._seed)[len(self._others) :]
        states = [source.get() for source in sources]
        for source, state in zip(sources, self._others, strict=False):
            source.set(state)
        self._others = states
