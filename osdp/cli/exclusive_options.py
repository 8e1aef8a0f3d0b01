"""Options of ``osdp plan`` that one of its two ways has, and the other has not."""

import typer

#: Parameters of ``plan`` for a folder that was described only, and those for a cluster as well.
_OF_DESCRIBED = {
    "described", "memory_limit", "device", "microbatches", "strategy", "slices", "recompute", "offload",
}  # fmt: skip
_OF_BOTH = {"cluster", "pp", "dp", "tp", "schedule", "out", "trust_code"}


def refuse_others(context: typer.Context, *, on_cluster: bool) -> None:
    """Refuse options that the other way to plan has."""
    wrong = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name not in _OF_BOTH and (parameter.name in _OF_DESCRIBED) == on_cluster:
            wrong.append(parameter.opts[0])
    if wrong:
        kind = "--model and --cluster" if on_cluster else "a folder that osdp profile wrote"
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be said of {kind}; see osdp plan --help")
