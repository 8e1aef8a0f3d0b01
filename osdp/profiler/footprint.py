"""Activation bytes of the segments of a whole model, from runs of a reduced one.

In the reduced model some tensors live longer or shorter than in the whole one: what a block leaves behind (a
key-value cache, an input that only the next block saves) is missing where the block is a stub. To correct
that, the whole and the reduced model are both run on fake tensors, and their difference is added to the
measurement::

    whole on the device  =  reduced on the device (measured)  +  whole on fakes  -  reduced on fakes
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from osdp.nn.fake_tensors import FakeTensors
from osdp.profiler.reduced_model import ReducedModel
from osdp.profiler.repeats import Repeat
from osdp.profiler.workspace import CpuWorkspace, CudaWorkspace
from osdp.tracing.memory_ledger import TraceMoment, Usage
from osdp.tracing.op_recorder import NoWorkspace, Recorder, Workspace

Build = Callable[[torch.device, tuple[Repeat, ...]], ReducedModel]
_NONE = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Activation bytes of segments, by index in the description.

    Attributes:
        usage: Live and peak bytes of each pass of those that ran; the ``interval`` of a moment is the index
            of a segment here.
        whole: The same of all segments, on fake tensors.
        saved: Bytes that those that ran newly save for backward.
    """

    usage: Mapping[TraceMoment, Usage]
    whole: Mapping[TraceMoment, Usage]
    saved: Mapping[int, int]

    def uses(self, index: int) -> tuple[Usage, Usage]:
        """What a segment uses on fake tensors: those with the same signature that use alike are equal."""
        found = [self.whole.get(TraceMoment(backward, index), _NONE) for backward in (False, True)]
        return found[0], found[1]

    def of(self, index: int, ran: int, backward: bool) -> Usage:
        """The usage of a segment, from that of another one with its signature that ``ran``."""
        own, other = (self.whole.get(TraceMoment(backward, each), _NONE) for each in (index, ran))
        return _correct(self.usage.get(TraceMoment(backward, ran), _NONE), own, other)


def measure_footprint(reduced: ReducedModel, build: Build, device: torch.device) -> Footprint:
    """Measure the footprint of the whole model on ``device``.

    Args:
        reduced: The reduced model on ``device``.
        build: Builds the reduced model again, on another device and with other blocks left out.
        device: The device of ``reduced``.
    """
    measured = _measure_usage(reduced, CudaWorkspace(device) if device.type == "cuda" else CpuWorkspace())
    with FakeTensors():
        host = torch.device("cpu")
        fake = _measure_usage(build(host, reduced.repeats), NoWorkspace())
        whole = _measure_usage(build(host, ()), NoWorkspace()) if reduced.repeats else fake
    usage = {
        moment: _correct(measured.get(moment, _NONE), whole.get(moment, _NONE), fake.get(moment, _NONE))
        for moment in {*measured, *fake}
    }
    return Footprint(usage, whole, _measure_saved(reduced))


def _correct(measured: Usage, whole: Usage, fake: Usage) -> Usage:
    live = measured.live_bytes + whole.live_bytes - fake.live_bytes
    peak = max(measured.peak_bytes + whole.peak_bytes - fake.peak_bytes, live, 0)
    later = zip(measured.later_peaks, whole.later_peaks, fake.later_peaks, strict=True)
    late, given = (_correct_peak(*peaks, live, peak) for peaks in later)
    made = measured.gradient_bytes + whole.gradient_bytes - fake.gradient_bytes
    return Usage(live, peak, late, given, made)


def _correct_peak(
    measured: int | None, whole: int | None, fake: int | None, least: int, most: int
) -> int | None:
    if measured is None or whole is None or fake is None:
        return None
    return min(max(measured + whole - fake, least), most)


def _measure_usage(reduced: ReducedModel, workspace: Workspace) -> dict[TraceMoment, Usage]:
    recorder, places = _record_run(reduced, workspace, saving=False)
    return recorder.ledger.usage(places)


def _measure_saved(reduced: ReducedModel) -> dict[int, int]:
    recorder, places = _record_run(reduced, NoWorkspace(), saving=True)
    saved: dict[int, int] = defaultdict(int)
    for moment, tally in recorder.tallies.items():
        if not moment.backward:
            saved[places[moment.interval]] += tally.saved_bytes
    return saved


def _seed(devices: Iterable[torch.device]) -> None:
    """Seed the host's generator and those of ``devices``; ``torch.manual_seed`` would seed all GPUs."""
    torch.default_generator.manual_seed(0)
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)


def _record_run(reduced: ReducedModel, workspace: Workspace, *, saving: bool) -> tuple[Recorder, list[int]]:
    """Run once and record every storage; returns the recorder and the segment of each interval."""
    reduced.drop_gradients()
    # Random decisions (dropout, dropped layers) have to be the same in every run that is compared.
    _seed({tensor.device for tensor in reduced.batch.tensors})
    parameters = dict(reduced.model.named_parameters())
    recorder = Recorder(parameters, [*reduced.model.buffers(), *reduced.batch.tensors], workspace)
    with recorder.saving() if saving else nullcontext(), recorder:
        intervals = reduced.walk(recorder)
    recorder.ledger.book_gradients(parameters.values())
    return recorder, reduced.segments(intervals)
