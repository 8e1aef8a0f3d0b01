"""Refinement: what a model under way has found out of its plan, and what that brought."""

from dataclasses import dataclass

from osdp.explain.scaling import profile_at_batch
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.text import align, format_seconds


@dataclass(frozen=True)
class Refinement:
    """What refining has changed.

    Attributes:
        before: The plan at the start.
        after: The plan at the end.
        thought: What the first plan was searched from.
        found: The same as measured.
        steps: Optimizer steps until the last decision.
        switches: Switches to another plan until then.
        seconds_before: Measured seconds of a step of the first plan, without what the loop does besides.
        seconds_after: The same of the last plan.
        reason: Why it stayed with that.
    """

    before: Plan
    after: Plan
    thought: Basis
    found: Basis
    steps: int
    switches: int
    seconds_before: float
    seconds_after: float
    reason: str

    def __str__(self) -> str:
        head = (
            f"refined in {self.steps} steps with {self.switches} switches: {self.reason}. A step took "
            f"{format_seconds(self.seconds_before)} (predicted: "
            f"{format_seconds(self.before.predicted.step_seconds)}), and takes "
            f"{format_seconds(self.seconds_after)} now"
        )
        cells = [
            (name, format_seconds(thought), format_seconds(found), f"{found / thought:.2f}")
            for name, thought, found in self.figures
            if thought > 0
        ]
        return f"{head}\n{align([('', 'thought', 'measured', 'factor'), *cells], right=(1, 2, 3))}"

    @property
    def figures(self) -> list[tuple[str, float, float]]:
        """What was corrected: its name, and its seconds as they were thought and as they were found.

        Both at the batch that was found: more samples are no slower compute.
        """
        desc, batch = self.thought.model_desc, self.after.local_batch
        of_batch = (profile for profile in self.found.profiles if profile.local_batch == batch)
        found = next(of_batch, self.found.profiles[0])
        thought = profile_at_batch(self.thought.profile_at(self.before.local_batch), desc, found.local_batch)
        rows: list[tuple[str, float, float]] = []
        for name in ("forward", "backward"):
            sums = [
                sum(getattr(profile.of(s), name).seconds for s in desc.segments)
                for profile in (thought, found)
            ]
            rows.append((f"compute, {name}", sums[0], sums[1]))
        steps = [2**20 * profile.optimizer.per_byte for profile in (thought, found)]
        rows.append(("optimizer, a MiB", steps[0], steps[1]))
        pairs = zip(self.thought.device.links, self.found.device.links, strict=True)
        rows += [(f"{a.collective}, {a.group}, a MiB", a.seconds(2**20), b.seconds(2**20)) for a, b in pairs]
        return rows
