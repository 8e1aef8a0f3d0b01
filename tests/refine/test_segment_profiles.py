"""Profiles of segments that take more memory than is traced."""

import torch
from torch import nn

from osdp import DeviceInfo, ModelDesc
from osdp.profiler.roofline import estimate
from osdp.profiler.workspace import convolution_kernels
from osdp.refine.segment_profiles import blocked_weights, with_workspace


class Convolves(nn.Module):
    """A stem of three channels, a depthwise and another convolution, experts and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 2, stride=2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.mixed = nn.Conv2d(32, 32, 3, padding=1)
        self.experts = nn.Parameter(torch.zeros(4, 32, 32))
        self.positions = nn.Parameter(torch.zeros(1, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mixed(self.depthwise(self.stem(x))).flatten(2) + self.positions
        return (self.experts[:, None] @ y).sum()


def test_weights_in_blocks_are_those_of_convolutions() -> None:
    """A mixture of experts has three dims, too: its weights seemed to be copied four times over."""
    model = Convolves()
    desc = ModelDesc.from_module(model, torch.zeros(2, 3, 16, 16))
    kernels = convolution_kernels(model)
    assert kernels == {"stem.weight", "depthwise.weight", "mixed.weight"}
    found = blocked_weights(desc, kernels)
    by_operator = {
        name: found[segment.signature]
        for segment in desc.segments
        for name in segment.operators
        if found.get(segment.signature)
    }
    assert by_operator == {"stem": 4 * 32 * 16 * 4, "mixed": 4 * 32 * 32 * 9}
    profile = estimate(desc, DeviceInfo(memory_limit=2**30, flops=1e10, memory_bandwidth=1e10))
    for before, after in zip(profile.segments, with_workspace(profile, found).segments, strict=True):
        added = found.get(before.signature, 0)
        assert after.forward.peak_bytes == before.forward.peak_bytes + added
        assert after.backward.peak_bytes == before.backward.peak_bytes + added
        assert after.forward.live_bytes == before.forward.live_bytes
