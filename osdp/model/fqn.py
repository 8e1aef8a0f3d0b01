"""Names of modules and parameters: which is inside which, and the modules of a unit."""

from collections.abc import Collection, Iterable, Sequence

from osdp.model.description import Operator


def unit_modules(
    operators: Sequence[Operator], all_operators: Iterable[Operator], callable_modules: Collection[str]
) -> tuple[str, ...]:
    """Modules to wrap as one unit: the fewest that hold the parameters of ``operators`` and of no others.

    Climbs from each operator's modules to the highest ancestor whose own forward ran and under which every
    operator belongs to the unit.

    Args:
        operators: The unit's operators, in trace order.
        all_operators: All operators of the model.
        callable_modules: FQNs of modules whose forward runs.

    Returns:
        FQNs, in trace order, none inside another.
    """
    inside = {module for operator in operators for module in operator.modules}
    outside = [module for op in all_operators for module in op.modules if module not in inside]
    found: list[str] = []
    for operator in operators:
        for module in operator.modules:
            # Climb until an ancestor would contain an operator of another unit. Ancestors without a forward
            # of their own (nn.ModuleList) have no hooks to wrap: they are skipped.
            best = module
            parts = module.split(".") if module else []
            for length in range(len(parts) - 1, 0, -1):
                ancestor = ".".join(parts[:length])
                if any(is_inside(other, ancestor) for other in outside):
                    break
                if ancestor in callable_modules:
                    best = ancestor
            found.append(best)
    unique = list(dict.fromkeys(found))
    return tuple(m for m in unique if not any(m != other and is_inside(m, other) for other in unique))


def is_inside(fqn: str, ancestor: str) -> bool:
    """Whether ``fqn`` is ``ancestor`` or one of its descendants.

    >>> is_inside("h.1.attn", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", "")
    (True, False, True)
    """
    return not ancestor or fqn == ancestor or fqn.startswith(ancestor + ".")


def is_compiled_as_one(fqn: str) -> bool:
    """Whether ``fqn`` is what ``torch.compile(module)`` wraps.

    The wrapper keeps running that module, whatever is registered in its place.
    """
    return fqn.rpartition(".")[2] == "_orig_mod"
