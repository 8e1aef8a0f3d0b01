"""Groups a model's parameters into operators, by the modules that used them in one forward.

A parameter belongs to the deepest module that contains it and whose forward was running when the parameter
was used: that module's own hooks can gather it in time. Modules that share a parameter are one operator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from osdp.model.description import Operator, Parameter
from osdp.tracing.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class Use:
    """Parameters used by one segment, and the modules whose forward was running, outermost first."""

    stack: tuple[str, ...]
    parameters: tuple[str, ...]


class _Groups:
    """Union-find over modules; the root of a group is the first of its modules."""

    def __init__(self) -> None:
        self.order: dict[str, int] = {}
        self._parent: dict[str, str] = {}

    def add(self, module: str) -> None:
        self.order.setdefault(module, len(self.order))
        self._parent.setdefault(module, module)

    def find(self, module: str) -> str:
        while self._parent[module] != module:
            module = self._parent[module]
        return module

    def join(self, one: str, other: str) -> None:
        first, second = sorted((self.find(one), self.find(other)), key=self.order.__getitem__)
        self._parent[second] = first

    def members(self) -> dict[str, list[str]]:
        """The modules of each group, by its root."""
        found: dict[str, list[str]] = {}
        for module in self.order:
            found.setdefault(self.find(module), []).append(module)
        return found


def find_parameters(model: nn.Module) -> tuple[Parameter, ...]:
    """All parameters of ``model``, each tied one once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(
        Parameter(
            name=first,
            shape=tuple(tensors[key].shape),
            dtype=dtype_name(tensors[key].dtype),
            trainable=tensors[key].requires_grad,
            aliases=tuple(aliases),
        )
        for key, (first, *aliases) in names.items()
    )


def find_operators(
    parameters: Sequence[Parameter],
    uses: Sequence[Use],
    blocks: Mapping[str, str],
    atoms: Sequence[str] = (),
) -> tuple[Operator, ...]:
    """Find the operators of a trace, in order of first use; operators that were not used come last.

    Args:
        parameters: All parameters.
        uses: The parameters used by each segment, in order.
        blocks: The block of each module that is inside one.
        atoms: Modules each of which is to be exactly one operator.

    Raises:
        ValueError: The forward of an atom did not run.
    """
    # 1. The module that owns each parameter, and the modules that share an operator.
    ran = {frame for use in uses for frame in use.stack}
    missing = [atom for atom in atoms if atom not in ran]
    if missing:
        raise ValueError(f"atoms must be modules whose forward runs; these do not: {', '.join(missing)}")
    groups, owners = _owners(parameters, uses, frozenset(atoms))
    _join_into_ancestors(groups, {*blocks.values(), *atoms})
    # 2. The parameters of each group; those that no segment used are operators by their parent module.
    by_group: dict[str, list[Parameter]] = {}
    unreached: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        owner = owners.get(parameter.name)
        if owner is None:
            unreached.setdefault(_parent(parameter.name), []).append(parameter)
        else:
            by_group.setdefault(groups.find(owner), []).append(parameter)
    # 3. The operators, in order of first use.
    members, spans = groups.members(), _spans(uses)
    executed = [_operator(members[root], held, spans, blocks) for root, held in by_group.items()]
    executed.sort(key=lambda operator: (operator.first, operator.last, groups.order[operator.modules[0]]))
    return (
        *_with_spanning(executed, uses),
        *(
            Operator(name, (name,), tuple(held), blocks.get(name), first=-1, last=-1, executed=False)
            for name, held in unreached.items()
        ),
    )


def _owners(
    parameters: Sequence[Parameter], uses: Sequence[Use], atoms: frozenset[str]
) -> tuple[_Groups, dict[str, str]]:
    names = {parameter.name: (parameter.name, *parameter.aliases) for parameter in parameters}
    groups = _Groups()
    owners: dict[str, str] = {}
    for use in uses:
        for name in use.parameters:
            owner = _owner(names[name], use.stack, atoms)
            groups.add(owner)
            groups.join(owners.setdefault(name, owner), owner)
    for parameter in parameters:
        # An unused parameter of a module that did run is gathered and resharded with the used ones.
        holders = [_parent(name) for name in names[parameter.name]]
        holders += [atom for atom in atoms for name in names[parameter.name] if _contains(atom, name)]
        holder = next((holder for holder in holders if holder in groups.order), None)
        if parameter.name not in owners and holder is not None:
            owners[parameter.name] = holder
    return groups, owners


def _owner(names: Iterable[str], stack: Sequence[str], atoms: frozenset[str]) -> str:
    holders = [frame for frame in stack if any(_contains(frame, name) for name in names)]
    chosen = [frame for frame in holders if frame in atoms]
    # The loss may use parameters while no module's forward runs: these belong to the root.
    return (chosen or holders or [""])[-1]


def _join_into_ancestors(groups: _Groups, separate: set[str]) -> None:
    """Join each module into its outermost ancestor that owns parameters, except ancestors of blocks."""
    containers = {ancestor for module in separate for ancestor in _ancestors(module)}
    for module in groups.order:
        for ancestor in _ancestors(module):
            if ancestor and ancestor in groups.order and ancestor not in containers:
                groups.join(ancestor, module)


def _spans(uses: Sequence[Use]) -> dict[str, tuple[int, int]]:
    """The first and the last use in which the forward of each module runs."""
    spans: dict[str, tuple[int, int]] = {}
    for index, use in enumerate(uses):
        for module in use.stack:
            first, _ = spans.get(module, (index, index))
            spans[module] = first, index
    return spans


def _operator(
    members: Sequence[str],
    parameters: Sequence[Parameter],
    spans: Mapping[str, tuple[int, int]],
    blocks: Mapping[str, str],
) -> Operator:
    group = set(members)
    modules = [module for module in members if group.isdisjoint(_ancestors(module))]
    # The root has parameters of its own where the loss uses them, while no module's forward runs.
    never = max((last for _, last in spans.values()), default=-1) + 1, -1
    modules.sort(key=lambda module: spans.get(module, never)[0])
    homes = {blocks.get(module) for module in modules}
    return Operator(
        name=modules[0],
        modules=tuple(modules),
        parameters=tuple(parameters),
        block=homes.pop() if len(homes) == 1 else None,
        first=min(spans.get(module, never)[0] for module in modules),
        last=max(spans.get(module, never)[1] for module in modules),
    )


def _with_spanning(operators: Sequence[Operator], uses: Sequence[Use]) -> list[Operator]:
    """Mark the operators within whose span a segment uses parameters of another operator."""
    held = {parameter.name: op.name for op in operators for parameter in op.parameters}
    users = [{held[name] for name in use.parameters} for use in uses]
    return [
        Operator(
            op.name,
            op.modules,
            op.parameters,
            op.block,
            op.first,
            op.last,
            spanning=any(users[index] - {op.name} for index in range(op.first, op.last + 1)),
        )
        for op in operators
    ]


def _contains(module: str, name: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _ancestors(module: str) -> list[str]:
    """FQNs of the modules around ``module``, outermost (the root, empty) first."""
    if not module:
        return []
    parts = module.split(".")
    return ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]
