"""Model description of a pipeline stage: the part of the model's description that belongs to it."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from osdp.model.dataflow import Dataflow, ModuleCall
from osdp.model.description import ModelDesc, Operator, Parameter, Segment
from osdp.model.fqn import is_inside
from osdp.plan.plan import Tie


def step_segments(model_desc: ModelDesc, flow: Dataflow) -> tuple[int, ...]:
    """Index of the first segment of each step.

    Raises:
        ValueError: The flow and the description are of different models.
    """
    found, position = [], 0
    for step in flow.steps:
        start = next(
            (
                index
                for index in range(position, len(model_desc.segments))
                if is_inside(model_desc.segments[index].module, step.module)
            ),
            None,
        )
        if start is None:
            raise ValueError(
                f"the description has no segment of {step.module!r}, call {step.call}: it is of another "
                "model or batch than the flow; describe it again"
            )
        found.append(start)
        position = start + _length(model_desc.segments, start, step)
    return tuple(found)


def segment_bounds(model_desc: ModelDesc, flow: Dataflow) -> tuple[int, ...]:
    """First segment of each step (0 for the first step), and the number of segments."""
    return (0, *step_segments(model_desc, flow)[1:], len(model_desc.segments))


def _length(segments: Sequence[Segment], start: int, step: ModuleCall) -> int:
    """Number of consecutive segments from ``start`` on that are inside the step's module."""
    stop = start
    while stop < len(segments) and is_inside(segments[stop].module, step.module):
        stop += 1
    return stop - start


def stage_modules(model_desc: ModelDesc, flow: Dataflow, start: int, stop: int) -> tuple[str, ...]:
    """FQNs of the modules of a stage with the steps ``start`` to ``stop - 1``, idle modules included.

    A module that is never called stays where one of its parameters is used, or in the first stage.
    """
    own = tuple(dict.fromkeys(step.module for step in flow.steps[start:stop]))
    first_steps = {}
    for module in flow.idle:
        # All names of the parameters that have one in this module.
        ties: list[str] = []
        for parameter in _parameters(model_desc):
            names = (parameter.name, *parameter.aliases)
            if any(is_inside(name, module) for name in names):
                ties += names
        users = [
            index for index, step in enumerate(flow.steps) if any(is_inside(n, step.module) for n in ties)
        ]
        first_steps[module] = min(users, default=0)
    return (*own, *(module for module, step in first_steps.items() if start <= step < stop))


def stage_desc(
    model_desc: ModelDesc,
    segments: tuple[int, int],
    modules: Collection[str],
    loose: Collection[str],
    movable: Collection[str],
) -> ModelDesc:
    """Model description of a stage.

    Args:
        model_desc: Description of the whole model.
        segments: First segment of the stage, and one past its last.
        modules: FQNs of the modules it keeps.
        loose: Names of parameters outside these modules that it keeps.
        movable: FQNs of the modules of all stages.
    """
    # 1. Operators of the stage, named by the first of their modules in it.
    first, last = segments
    gone = set(movable) - set(modules)
    kept = model_desc.segments[first:last]
    renamed: dict[str, str] = {}
    operators = []
    for operator in model_desc.operators:
        own = _restricted(operator, modules, loose, gone)
        if own is not None:
            renamed[operator.name] = own.name
            operators.append((operator, own))
    # 2. Segments, with the operators' new names.
    kept = tuple(
        replace(segment, operators=tuple(renamed[name] for name in segment.operators if name in renamed))
        for segment in kept
    )
    return ModelDesc(
        name=model_desc.name,
        sample=model_desc.sample,
        sample_names=model_desc.sample_names,
        local_batch=model_desc.local_batch,
        batch_is_free=model_desc.batch_is_free,
        segments=kept,
        operators=_placed([own for _, own in operators], kept),
        modules=tuple(
            module for module in model_desc.modules if not any(is_inside(module, other) for other in gone)
        ),
    )


def _parameters(model_desc: ModelDesc) -> list[Parameter]:
    return [parameter for operator in model_desc.operators for parameter in operator.parameters]


def _restricted(
    operator: Operator, modules: Collection[str], loose: Collection[str], gone: Collection[str]
) -> Operator | None:
    """The operator with the parameters and modules that the stage keeps, or ``None``."""
    parameters = []
    for parameter in operator.parameters:
        names = [
            name
            for name in (parameter.name, *parameter.aliases)
            if name in loose or any(is_inside(name, module) for module in modules)
        ]
        if names:
            parameters.append(replace(parameter, name=names[0], aliases=tuple(names[1:])))
    if not parameters:
        return None
    users = tuple(
        module for module in operator.modules if not any(is_inside(module, other) for other in gone)
    )
    # An operator that another stage uses too cannot run in slices.
    cut = operator.cut if users == operator.modules else None
    return replace(
        operator,
        name=users[0] if users else operator.name,
        modules=users,
        parameters=tuple(parameters),
        cut=cut,
    )


def _placed(operators: Sequence[Operator], segments: Sequence[Segment]) -> tuple[Operator, ...]:
    """The operators with their positions among ``segments``, in order of first use."""
    found = []
    for operator in operators:
        inside = [
            index
            for index, segment in enumerate(segments)
            if any(is_inside(segment.module, module) for module in operator.modules)
        ]
        executed = operator.executed and len(inside) > 0
        first, last = (inside[0], inside[-1]) if executed else (-1, -1)
        spanning = any(
            set(segments[index].operators) - {operator.name} for index in range(max(first, 0), last + 1)
        )
        found.append(replace(operator, first=first, last=last, spanning=spanning, executed=executed))
    return tuple(sorted(found, key=lambda op: (not op.executed, op.first, op.last)))


def ties_of(model_desc: ModelDesc, modules_of: Sequence[Collection[str]]) -> tuple[Tie, ...]:
    """Tied parameters that several stages hold.

    Args:
        model_desc: Description of the model.
        modules_of: FQNs of the modules of each stage.
    """
    found = []
    for parameter in _parameters(model_desc):
        names = (parameter.name, *parameter.aliases)
        first = {}
        for stage, modules in enumerate(modules_of):
            # A parameter goes by its first name inside each stage.
            here = [name for name in names if any(is_inside(name, module) for module in modules)]
            if here:
                first[stage] = here[0]
        if len(first) > 1:
            found.append(Tie(tuple(first), tuple(first.values())))
    return tuple(found)
