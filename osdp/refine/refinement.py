"""Refinement: what a model under way has found out of its plan, and what that brought."""

from dataclasses import dataclass

from osdp.explain.difference import diff
from osdp.explain.scaling import profile_at_batch
from osdp.hardware.profile import Profile
from osdp.plan.basis import Basis
from osdp.plan.plan import Plan
from osdp.refine.segment_profiles import calls_of
from osdp.text import align, format_bytes, format_seconds


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
        batch: Samples of a microbatch, and microbatches, of the last steps; zeros if none were measured.
        seconds_before: Measured seconds of a step of the first plan, without what the loop does besides; 0
            if it did not run with that batch.
        seconds_after: The same of the last plan; 0 if it was not measured.
        reason: Why it stayed with that.
    """

    before: Plan
    after: Plan
    thought: Basis
    found: Basis
    steps: int
    switches: int
    batch: tuple[int, int]
    seconds_before: float
    seconds_after: float
    reason: str

    def __str__(self) -> str:
        head = f"refined in {self.steps} steps with {self.switches} switches: {self.reason}"
        took = [f"took {format_seconds(self.seconds_before)}{self._predicted}"] * bool(self.seconds_before)
        takes = [f"takes {format_seconds(self.seconds_after)} now"] * bool(self.seconds_after)
        if took or takes:
            head += f". A step {', and '.join(took + takes)}"
        rows = [
            *((format_seconds, *row) for row in self.figures),
            *((format_bytes, *row) for row in self.memory),
        ]
        cells = [
            (name, told(thought), told(found), f"{found / thought:.2f}" if thought else "-")
            for told, name, thought, found in rows
            if found > 0
        ]
        table = align([("", "thought", "measured", "factor"), *cells], right=(1, 2, 3))
        return "\n".join((head, table, *self.changes))

    @property
    def _predicted(self) -> str:
        """What the first plan was to take, if the last steps had its batch."""
        if self.batch != (self.before.local_batch, self.before.training.microbatches):
            return ""
        return f" (predicted: {format_seconds(self.before.predicted.step_seconds)})"

    @property
    def changes(self) -> list[str]:
        """What is decided in another way now, a line for each choice: ``"h.0 and 11 more: A, before B"``."""
        return [
            f"{change.names[0]}{f' and {len(change.names) - 1} more' if change.names[1:] else ''}: "
            f"{change.after}, before {change.before}"
            for change in diff(self.before, self.after).changes
        ]

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Activations that are not what was thought, bytes.

        All together where they are fewer; of opaque modules that keep more, the most of a call's forward.
        """
        thought, found = self._profiles
        desc, rows = self.thought.model_desc, []
        kept, counted = (
            sum(profile.of(s).saved_bytes for s in desc.segments) for profile in (thought, found)
        )
        if counted < kept - len(desc.segments):  # by a batch in between each may be rounded
            rows.append(("activations", kept, counted))
        for module in desc.opaque:
            before, now = (
                max((profile.of(s).forward.peak_bytes for s in calls_of(desc, module.name)), default=0)
                for profile in (thought, found)
            )
            if now > before + 1:  # by a batch in between it may be rounded
                rows.append((f"activations of {module.name or 'the root'}", before, now))
        return rows

    @property
    def _profiles(self) -> tuple[Profile, Profile]:
        """As thought and as found, both at the batch that was found: more samples are no slower compute."""
        batch = self.after.local_batch
        of_batch = (profile for profile in self.found.profiles if profile.local_batch == batch)
        found = next(of_batch, self.found.profiles[0])
        before = self.thought.profile_at(self.before.local_batch)
        return profile_at_batch(before, self.thought.model_desc, found.local_batch), found

    @property
    def figures(self) -> list[tuple[str, float, float]]:
        """What was corrected: its name, and its seconds as they were thought and as they were found."""
        desc, (thought, found) = self.thought.model_desc, self._profiles
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
