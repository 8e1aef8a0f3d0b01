"""Repeated blocks of a trace that need not run for every distinct segment to be measured."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from osdp.model.description import ModelDesc


@dataclass(frozen=True, slots=True)
class Repeat:
    """A block that need not run, since segments with the same signatures run elsewhere.

    Attributes:
        block: Its FQN.
        exemplar: FQN of the last similar block before it that does run.
        inside: Number of calls of each module in its forward.
    """

    block: str
    exemplar: str
    inside: Mapping[str, int]


def find_repeats(model_desc: ModelDesc) -> tuple[Repeat, ...]:
    """Find the blocks that can be left out of a run, in trace order.

    A block has to run if one of its segments has a signature that no segment before it, and none outside
    blocks, has.
    """
    spans = _spans(model_desc)
    inside = {index for start, stop in spans.values() for index in range(start, stop)}
    covered = {s.signature for index, s in enumerate(model_desc.segments) if index not in inside}
    exemplars: dict[tuple[object, ...], str] = {}
    repeats = []
    for block, (start, stop) in spans.items():
        segments = model_desc.segments[start:stop]
        inner = tuple(s.module.removeprefix(block) for s in segments)
        kind = (block.rpartition(".")[0], inner, segments[-1].outputs)
        if kind in exemplars and covered.issuperset(s.signature for s in segments):
            calls = {(s.module, s.call) for s in segments}
            repeats.append(Repeat(block, exemplars[kind], Counter(module for module, _ in calls)))
        else:
            exemplars[kind] = block
            covered |= {s.signature for s in segments}
    return tuple(repeats)


def _spans(model_desc: ModelDesc) -> dict[str, tuple[int, int]]:
    """Segment range (start, stop) of each block that runs once and without interruption."""
    blocks = dict.fromkeys(op.block for op in model_desc.operators if op.block is not None and op.executed)
    spans = {}
    for block in blocks:
        own = [i for i, s in enumerate(model_desc.segments) if _within(s.module, block)]
        start, stop = own[0], own[-1] + 1
        between = {s.module for s in model_desc.segments[start:stop]}
        # If a module around the block runs in between, the block was left and called again.
        if not any(_within(block, module) and module != block for module in between):
            spans[block] = (start, stop)
    return dict(sorted(spans.items(), key=lambda item: item[1]))


def _within(module: str, block: str) -> bool:
    return not block or module == block or module.startswith(f"{block}.")
