"""Two plans beside each other: which operators are decided differently, and what that does."""

from osdp.hardware.device_info import DeviceInfo
from osdp.model.training import Training
from osdp.plan.choices import choice_of_operators
from osdp.plan.explanation import OperatorChange, PlanDifference
from osdp.plan.plan import Plan
from osdp.text import format_bytes


def diff(before: Plan, after: Plan) -> PlanDifference:
    """What changes from one plan to another of the same model.

    Args:
        before: The first plan.
        after: The second plan.

    Raises:
        ValueError: They are plans of different models, or one has stages.
    """
    if before.model != after.model:
        raise ValueError(
            f"these are plans of two models, with fingerprints {before.model} and {after.model}: only plans "
            "of one model can be compared"
        )
    first, second = choice_of_operators(before.sharding), choice_of_operators(after.sharding)
    sizes = {d.operator: d.nbytes for plan in (before, after) for d in plan.decisions}
    changed: dict[tuple[str, str], list[str]] = {}
    names = list(dict.fromkeys([*first, *second]))
    for name in names:
        pair = first.get(name, ""), second.get(name, "")
        if pair[0] != pair[1]:
            changed.setdefault(pair, []).append(name)
    return PlanDifference(
        before,
        after,
        settings=tuple(row for row in _settings(before, after) if row[1] != row[2]),
        changes=tuple(
            OperatorChange(
                tuple(operators), _blocks(before, operators), sum(sizes[name] for name in operators), *pair
            )
            for pair, operators in changed.items()
        ),
        same_operators=len(names) - sum(map(len, changed.values())),
    )


def _blocks(plan: Plan, operators: list[str]) -> tuple[str, ...]:
    """``operators``, with the name of a block in place of all of its operators."""
    if plan.basis is None:
        return tuple(operators)
    members: dict[str, set[str]] = {}
    for operator in plan.basis.model_desc.operators:
        if operator.block is not None:
            members.setdefault(operator.block, set()).add(operator.name)
    whole = {name: block for block, names in members.items() if names <= set(operators) for name in names}
    return tuple(dict.fromkeys(whole.get(name, name) for name in operators))


def _settings(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    def row(name: str, of_before: object, of_after: object) -> tuple[str, str, str]:
        return name, str(of_before), str(of_after)

    return [
        row("memory limit", format_bytes(before.memory_limit), format_bytes(after.memory_limit)),
        row("ranks", before.dp, after.dp),
        row("tensor-parallel ranks", before.tp, after.tp),
        row("samples a step", *(_samples(plan) for plan in (before, after))),
        row("local batch", before.local_batch, after.local_batch),
        row("microbatches", before.training.microbatches, after.training.microbatches),
        row("optimizer", before.training.optimizers, after.training.optimizers),
        row("  its options", *(_options(plan.training) for plan in (before, after))),
        row("computed in", before.training.param_dtype, after.training.param_dtype),
        row("reduced in", before.training.reduce_dtype, after.training.reduce_dtype),
        *_devices(before, after),
        row(
            "gradients reduced",
            _reduced(before.reduce_each_microbatch),
            _reduced(after.reduce_each_microbatch),
        ),
    ]


def _devices(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    """Kind and network of the devices; where a plan does not have them, nothing."""
    if before.basis is None or after.basis is None:
        return []
    first, second = before.basis.device, after.basis.device

    def gathered(device: DeviceInfo) -> str:
        known = [link for link in device.links if (link.collective, link.group) == ("all_gather", "world")]
        return f"{known[0].bandwidth / 1e9:.3g} GB/s" if known else "none"

    return [("kind", first.kind, second.kind), ("all-gather", gathered(first), gathered(second))]


def _samples(plan: Plan) -> int:
    return plan.local_batch * plan.training.microbatches * plan.dp


def _options(training: Training) -> str:
    """Options of the optimizer that decide what a step takes."""
    names = ("momentum", "nesterov", "amsgrad", "centered", "weight_decay", "foreach", "fused")
    return ", ".join(name for name in names if getattr(training, name)) or "default"


def _reduced(each: bool) -> str:
    return "each microbatch" if each else "once a step"
