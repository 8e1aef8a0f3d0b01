"""MemoryReport: what a run measured of its steps, beside what its plan predicts."""

from dataclasses import dataclass

from osdp.codec import Savable
from osdp.text import format_bytes, format_seconds


@dataclass(frozen=True)
class MemoryReport(Savable):
    """Measured and predicted time and memory of a rank.

    Attributes:
        step_seconds: Median of the latest steps, from one optimizer step to the next; ``None`` before there
            are some.
        predicted_step_seconds: The same as planned.
        peak_bytes: Most bytes that the device's allocator had given out at once since the model was wrapped,
            or switched to its plan; ``None`` on CPUs, whose allocator does not count.
        reserved_bytes: Most bytes that it had taken from the device since then.
        resident_bytes: Most memory that the process had in RAM, all its libraries among it.
        predicted_peak_bytes: The plan's peak, above what was there before the model was wrapped.
        memory_limit: The limit that was planned for.
    """

    step_seconds: float | None
    predicted_step_seconds: float
    peak_bytes: int | None
    reserved_bytes: int | None
    resident_bytes: int
    predicted_peak_bytes: int
    memory_limit: int

    def __str__(self) -> str:
        seconds = (
            "no step yet" if self.step_seconds is None else f"{format_seconds(self.step_seconds)} a step"
        )
        memory = (
            f"{format_bytes(self.resident_bytes)} of RAM in the process"
            if self.peak_bytes is None or self.reserved_bytes is None
            else f"a peak of {format_bytes(self.peak_bytes)} ({format_bytes(self.reserved_bytes)} reserved)"
        )
        return (
            f"{seconds} (planned: {format_seconds(self.predicted_step_seconds)}), {memory} (planned: "
            f"{format_bytes(self.predicted_peak_bytes)} for the model, of a limit of "
            f"{format_bytes(self.memory_limit)})"
        )
