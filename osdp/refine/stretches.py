"""Stretches: the parts of a trace that can be timed apart, cut where modules return.

::

    segments    embed . | h.0 ......... | . h.1 ......... | . norm | head
    cuts                ^               ^                 ^        ^
"""

from dataclasses import dataclass

from osdp.model.description import ModelDesc
from osdp.model.fqn import is_inside


@dataclass(frozen=True, slots=True)
class Stretch:
    """Segments ``start`` up to ``stop`` of a trace.

    Attributes:
        module: FQN of the module that ends it; empty for what follows the last one.
        start: Index of its first segment.
        stop: One past its last segment.
    """

    module: str
    start: int
    stop: int


def stretches_of(model_desc: ModelDesc) -> tuple[Stretch, ...]:
    """The stretches of a trace, in order; the loss, which runs outside of the model, is in none.

    They end with blocks and with modules outside of blocks whose parameters are an operator. Modules that are
    called several times, or around which others run, cut nothing.
    """
    names = [*model_desc.block_segments]
    names += [op.modules[0] for op in model_desc.operators if op.block is None and len(op.modules) == 1]
    end = end_of_model(model_desc)
    cuts: dict[int, str] = {}
    for name in names:
        inside = [i for i, segment in enumerate(model_desc.segments) if is_inside(segment.module, name)]
        called_once = bool(inside) and inside[-1] - inside[0] + 1 == len(inside)
        calls = {segment.call for segment in model_desc.segments if segment.module == name}
        if name and called_once and len(calls) <= 1 and inside[-1] < end:
            cuts.setdefault(inside[-1] + 1, name)
    found, start = [], 0
    for stop in sorted(cuts):
        found.append(Stretch(cuts[stop], start, stop))
        start = stop
    if start < end:
        found.append(Stretch("", start, end))
    return tuple(found)


def end_of_model(model_desc: ModelDesc) -> int:
    """One past the last segment before the loss, which is a second call of the root."""
    end = len(model_desc.segments)
    while end and model_desc.segments[end - 1].module == "" and model_desc.segments[end - 1].call > 0:
        end -= 1
    return end
