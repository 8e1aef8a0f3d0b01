"""The description of a model with many equal blocks, from that of the same model with few of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from osdp.model.description import ModelDesc, Operator, Segment
from osdp.model.fqn import is_inside

#: Blocks without which none is in the middle of others like it.
LEAST_BLOCKS = 4


def with_more_blocks(desc: ModelDesc, count: int) -> ModelDesc:
    """The description of the model that ``desc`` describes, with ``count`` blocks instead of its own.

    Copies of a block in the middle are inserted after it; what comes later moves on. The first block and the
    last may differ from the others, as those do that keep a mask for all, or that feed the head.

    Args:
        desc: Description of the model with few blocks, at least :data:`LEAST_BLOCKS`, which have no buffers.
        count: Number of blocks of the model, at least as many.

    Raises:
        ValueError: There are too few blocks or too many, they are not one chain, some are described as one,
            share parameters with others, or those in the middle differ.
    """
    blocks = [*desc.block_segments]
    home = blocks[0].rpartition(".")[0] if blocks else ""
    numbered = [f"{home}.{index}" for index in range(max(len(blocks), LEAST_BLOCKS))]
    if blocks != numbered:
        raise ValueError(
            f"to describe {count} blocks of {desc.name} takes at least {LEAST_BLOCKS} in one list that is "
            f"not the model itself, numbered from 0; got {', '.join(blocks) or 'none'}"
        )
    if count < len(blocks):
        raise ValueError(f"{desc.name} has {len(blocks)} blocks, more than the {count} to describe")
    if any(is_inside(each.name, home) for each in desc.opaque):
        raise ValueError(f"{desc.name} has blocks with modules that are described as one: trace it whole")
    middle = len(blocks) // 2
    copied = _block_of(desc, blocks[middle])
    if any(
        copied.renamed(name, index - middle) != _block_of(desc, name)
        for index, name in enumerate(blocks[1:-1], start=1)
    ):
        raise ValueError(f"the blocks {blocks[1]} to {blocks[-2]} of {desc.name} are not alike")
    extra, span = count - len(blocks), len(copied.segments)
    end = desc.block_segments[blocks[middle]][-1] + 1
    # The module that calls the blocks has a part after each: those after the copies are numbered on.
    caller = max((name for name in desc.modules if is_inside(home, name)), key=len)

    def later(name: str) -> str:
        """The name of what a block has that comes after the copies."""
        for index in range(middle + 1, len(blocks)):
            if is_inside(name, blocks[index]):
                return f"{home}.{index + extra}{name[len(blocks[index]) :]}"
        return name

    def moved(segment: Segment) -> Segment:
        part = segment.part + extra * (segment.module == caller and segment.call == 0)
        return _renamed_segment(replace(segment, part=part), later)

    def shifted(operator: Operator) -> Operator:
        first, last = (index + extra * span * (index >= end) for index in (operator.first, operator.last))
        return _renamed(replace(operator, first=first, last=last), later)

    copies = [copied.renamed(f"{home}.{middle + copy}", copy) for copy in range(1, extra + 1)]
    at = 1 + max(index for index, op in enumerate(desc.operators) if op.block == blocks[middle])
    name_at = 1 + max(index for index, name in enumerate(desc.modules) if is_inside(name, blocks[middle]))
    return replace(
        desc,
        segments=(
            *desc.segments[:end],
            *(segment for copy in copies for segment in copy.segments),
            *map(moved, desc.segments[end:]),
        ),
        operators=(
            *map(shifted, desc.operators[:at]),
            *(operator for copy in copies for operator in copy.operators),
            *map(shifted, desc.operators[at:]),
        ),
        modules=(
            *desc.modules[:name_at],
            *(name for copy in copies for name in copy.modules),
            *map(later, desc.modules[name_at:]),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """What a description says of one block."""

    name: str
    segments: tuple[Segment, ...]
    operators: tuple[Operator, ...]
    modules: tuple[str, ...]

    def renamed(self, name: str, distance: int) -> "_Block":
        """What is said of the block ``name``, which comes ``distance`` blocks later and is like this one."""

        def of(old: str) -> str:
            return f"{name}{old[len(self.name) :]}" if is_inside(old, self.name) else old

        def placed(operator: Operator) -> Operator:
            first, last = (index + distance * len(self.segments) for index in (operator.first, operator.last))
            return _renamed(replace(operator, first=first, last=last), of)

        return _Block(
            name,
            tuple(_renamed_segment(segment, of) for segment in self.segments),
            tuple(map(placed, self.operators)),
            tuple(map(of, self.modules)),
        )


def _block_of(desc: ModelDesc, name: str) -> _Block:
    """One block of a description.

    Raises:
        ValueError: Something runs within it that is not of it, or it shares parameters with others.
    """
    indices = desc.block_segments[name]
    operators = tuple(op for op in desc.operators if op.block == name)
    alone = all(is_inside(module, name) for op in operators for module in op.modules) and not any(
        is_inside(module, name) for op in desc.operators if op.block != name for module in op.modules
    )
    if len(indices) != indices[-1] - indices[0] + 1 or not alone:
        raise ValueError(f"the block {name} of {desc.name} shares parameters or segments with others")
    segments = desc.segments[indices[0] : indices[-1] + 1]
    return _Block(name, segments, operators, tuple(each for each in desc.modules if is_inside(each, name)))


def _renamed_segment(segment: Segment, name_of: Callable[[str], str]) -> Segment:
    operators = tuple(map(name_of, segment.operators))
    return replace(segment, module=name_of(segment.module), operators=operators)


def _renamed(operator: Operator, name_of: Callable[[str], str]) -> Operator:
    parameters = tuple(
        replace(each, name=name_of(each.name), aliases=tuple(map(name_of, each.aliases)))
        for each in operator.parameters
    )
    cut = operator.cut and replace(operator.cut, weight=name_of(operator.cut.weight))
    return replace(
        operator,
        name=name_of(operator.name),
        modules=tuple(map(name_of, operator.modules)),
        parameters=parameters,
        block=operator.block and name_of(operator.block),
        cut=cut,
    )
