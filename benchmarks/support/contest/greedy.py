"""The greedy choice of modes: shard next whatever loses the fewest seconds for each byte saved.

DeepCompile chooses what to keep unsharded so (Tanaka et al., arXiv 2504.09983, section 4). Both costs and the
result are priced by OSDP's own cost model, so that only the choice differs.
"""

from collections.abc import Iterator
from dataclasses import replace

from osdp import DeviceInfo, Mode, ModelDesc, Plan, Training
from osdp.cost.evaluate import evaluate
from osdp.hardware.profile import Profile
from osdp.plan.sharding import Decision, Prediction, ShardingPlan, Unit


def greedy_prediction(
    replicated: Plan, model_desc: ModelDesc, profile: Profile, device: DeviceInfo, training: Training
) -> Prediction | None:
    """What the greedy choice takes; ``None`` if it does not fit.

    Args:
        replicated: A plan that replicates everything; its limit is the one to keep.
        model_desc: The model.
        profile: Its profile.
        device: The devices.
        training: The training.
    """

    def price(modes: dict[str, Mode]) -> Prediction:
        plan = _with_modes(replicated, modes)
        return evaluate(plan, profile, device, training, model_desc)

    modes = {group: Mode.NO_SHARD for group in _groups(replicated.sharding)}
    now = price(modes)
    while now.peak_bytes > replicated.memory_limit:
        best: tuple[float, dict[str, Mode], Prediction] | None = None
        for group, mode in modes.items():
            for stronger in _stronger(mode):
                tried = modes | {group: stronger}
                found = price(tried)
                saved = now.peak_bytes - found.peak_bytes
                if saved > 0:
                    cost = (found.step_seconds - now.step_seconds) / saved
                    if best is None or cost < best[0]:
                        best = (cost, tried, found)
        if best is None:
            return None
        _, modes, now = best
    return now


def _stronger(mode: Mode) -> Iterator[Mode]:
    order = (Mode.NO_SHARD, Mode.SHARD_GRAD_OP, Mode.FULL_SHARD)
    yield from order[order.index(mode) + 1 :]


def _groups(sharding: ShardingPlan) -> dict[str, list[Decision]]:
    """Operators by the block that they are in, or by themselves, in trace order."""
    found: dict[str, list[Decision]] = {}
    for decision in sharding.decisions:
        words = decision.modules[0].split(".")
        numbered = [index for index, word in enumerate(words) if word.isdigit()]
        found.setdefault(".".join(words[: numbered[0] + 1]) if numbered else decision.operator, []).append(
            decision
        )
    return found


def _with_modes(plan: Plan, modes: dict[str, Mode]) -> Plan:
    """``plan`` with a unit for each group."""
    units = []
    decisions = []
    for group, members in _groups(plan.sharding).items():
        mode = modes[group]
        modules = tuple(dict.fromkeys(name for decision in members for name in decision.modules))
        units.append(Unit(mode, tuple(decision.operator for decision in members), modules))
        decisions += [replace(decision, mode=mode) for decision in members]
    sharding = replace(plan.sharding, units=tuple(units), decisions=tuple(decisions))
    return replace(plan, stages=(replace(plan.stages[0], sharding=sharding),))
