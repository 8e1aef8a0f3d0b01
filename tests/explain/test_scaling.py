"""Profiles at batches that were not measured, beside what is measured there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from osdp.explain.scaling import profile_at_batch, profile_with_optimizer
from osdp.hardware.profile import OptimizerProfile, Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.profiler.measure import profile_model


@given(seconds=st.floats(1e-7, 1e-2), overhead=st.sampled_from([0.0, 1e-20, 1e-6]))
def test_steps_of_another_optimizer_are_scaled_whatever_the_rounding(seconds: float, overhead: float) -> None:
    """Where plain tensors and DTensors had taken equally long, the latter took less in the last bit."""
    step = OptimizerProfile(seconds, seconds + overhead, 1e-10)
    profile = Profile("cpu", 1, (), step, 0, True, "")
    for optimizer in ("SGD", "RMSprop", "Adagrad"):
        found = profile_with_optimizer(profile, Training(), Training(optimizer=optimizer), "cpu").optimizer
        assert found.per_dtensor - found.per_tensor == pytest.approx(overhead, rel=1e-3, abs=1e-18)


class Depthwise(nn.Module):
    """The beginning of a block of ConvNeXt, whose images have their channels last, or first."""

    def __init__(self, channels_last: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.channels_last = channels_last
        self.before, self.depthwise = nn.Linear(96, 96), nn.Conv2d(96, 96, 7, padding=3, groups=96)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images`` are of shape (samples, height, width, channels)."""
        images = self.before(images).permute(0, 3, 1, 2)
        return self.depthwise(images if self.channels_last else images.contiguous()).square().mean()


@pytest.mark.parametrize("channels_last", [False, True])
def test_workspace_of_padded_weights_does_not_grow_and_all_else_does(channels_last: bool) -> None:
    model, sample = Depthwise(channels_last), torch.randn(4, 14, 14, 96)
    desc = ModelDesc.from_module(model, sample)
    small, large = (
        profile_model(model, desc, sample.repeat(times, 1, 1, 1), training=Training(local_batch=4 * times))
        for times in (1, 4)
    )
    peaks = [
        [
            getattr(segment, name).peak_bytes
            for segment in profile.segments
            for name in ("forward", "backward")
        ]
        for profile in (profile_at_batch(small, desc, 16), large)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1, abs=2**17)
    block = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8
    padded = block**2 * model.depthwise.weight.nbytes
    assert (max(segment.backward.peak_bytes for segment in small.segments) > padded) == channels_last
