"""The roofline against hand-computed passes."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from osdp.hardware.device_info import DeviceInfo, HostLink
from osdp.model.description import Affine, ModelDesc, Operator, Parameter, Segment, TensorSpec, Work
from osdp.model.training import Training
from osdp.profiler.roofline import LAUNCH_SECONDS, LOCAL_STEP_SECONDS, estimate

DEVICE = DeviceInfo(memory_limit=2**30, kind="toy", flops=1e9, memory_bandwidth=1e8)


def work(flops: float, moved: float, live: float = 0.0, peak: float = 0.0) -> Work:
    return Work(*(Affine(0.0, value) for value in (flops, moved, live, peak)))


def segment(module: str, signature: str, forward: Work, backward: Work) -> Segment:
    spec = TensorSpec((1, 4), "float32")
    return Segment(module, 0, 0, (module,), signature, (spec,), forward, backward, Affine(0.5, 10.0))


def model(**changes) -> ModelDesc:
    compute, move = work(2e6, 1e3, 8.25, 16.5), work(1e3, 4e5, -8.0, 4.0)
    nothing = work(0.0, 0.0)
    parameter = Parameter("a.weight", (4, 4), "float32")
    desc = ModelDesc(
        name="Toy",
        sample=(TensorSpec((2, 3), "int64"),),
        sample_names=("",),
        local_batch=2,
        batch_is_free=True,
        segments=(
            segment("a", "one", compute, move),
            segment("b", "two", nothing, nothing),
            segment("c", "one", compute, move),
        ),
        operators=(Operator("a", ("a",), (parameter,), None, 0, 0),),
        modules=("a", "b", "c"),
    )
    return dataclasses.replace(desc, **changes)


def test_a_pass_takes_the_longer_of_computing_and_moving() -> None:
    profile = estimate(model(), DEVICE)
    one, two = profile.segments
    assert one.forward.seconds == pytest.approx(2 * 2e6 / 1e9 + LAUNCH_SECONDS)
    assert one.backward.seconds == pytest.approx(2 * 4e5 / 1e8 + LAUNCH_SECONDS)
    assert (two.forward.seconds, two.backward.seconds) == (0.0, 0.0)


def test_bytes_are_at_the_local_batch_and_round_up() -> None:
    profile = estimate(model(), DEVICE, Training(local_batch=3))
    one = profile.by_signature["one"]
    assert (one.forward.live_bytes, one.forward.peak_bytes) == (math.ceil(24.75), math.ceil(49.5))
    assert (one.backward.live_bytes, one.saved_bytes) == (-24, math.ceil(30.5))
    assert profile.resident_bytes == 2 * 3 * 8 * 3 // 2
    assert profile.local_batch == 3


def test_says_what_it_is() -> None:
    profile = estimate(model(), DEVICE)
    assert (profile.device, profile.measured, profile.model) == ("toy", False, model().fingerprint)
    assert list(profile.by_signature) == ["one", "two"]


def test_narrower_dtype_moves_fewer_bytes() -> None:
    wide, narrow = (
        estimate(model(), DEVICE, Training(local_batch=2, param_dtype=dtype)).by_signature["one"]
        for dtype in (None, "bfloat16")
    )
    assert narrow.backward.seconds - LAUNCH_SECONDS == pytest.approx(
        (wide.backward.seconds - LAUNCH_SECONDS) / 2
    )
    assert narrow.forward.peak_bytes == wide.forward.peak_bytes


def test_optimizer_steps_by_implementation() -> None:
    loop, foreach, fused = (
        estimate(model(), DEVICE, Training(local_batch=2, **flags)).optimizer
        for flags in ({"foreach": False}, {}, {"fused": True})
    )
    assert fused.per_byte == pytest.approx(7 / 1e8)
    assert foreach.per_byte == loop.per_byte == pytest.approx(20 / 1e8)
    assert loop.per_tensor > foreach.per_tensor == fused.per_tensor == LAUNCH_SECONDS
    for each in (loop, foreach, fused):
        assert each.per_dtensor == each.per_tensor + LOCAL_STEP_SECONDS


def test_the_hosts_optimizer_is_the_one_that_plans_ask_for() -> None:
    """It was taken for a fused kernel, whose step of AdamW passes over memory a third as often."""
    device = dataclasses.replace(DEVICE, host=HostLink(1e9, 1e9, 2**40, memory_bandwidth=1e8))
    usual, foreach, fused = (
        estimate(model(), device, Training(local_batch=2, **flags)).host_optimizer
        for flags in ({}, {"foreach": True}, {"fused": True})
    )
    assert usual == foreach and usual is not None and fused is not None
    assert usual.per_byte == pytest.approx(20 / 1e8) and fused.per_byte == pytest.approx(7 / 1e8)


def test_missing_speeds_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"needs flops and memory_bandwidth of the device 'cpu'.*flops=\.\.\."
    ):
        estimate(model(), DeviceInfo(memory_limit=1))
    with pytest.raises(ValueError, match="needs memory_bandwidth of"):
        estimate(model(), DeviceInfo(memory_limit=1, flops=1.0))


def test_a_fixed_batch_cannot_be_changed() -> None:
    fixed = model(batch_is_free=False)
    assert estimate(fixed, DEVICE).local_batch == 2
    with pytest.raises(ValueError, match="traced batch of 2, not 3"):
        estimate(fixed, DEVICE, Training(local_batch=3))


def test_bytes_that_were_traced_narrow_are_not_narrowed_again() -> None:
    """Plans for devices that are not at hand had passes that took half of their time."""
    wide, training = model(), Training(param_dtype="bfloat16")
    narrow = dataclasses.replace(wide, computed_in="bfloat16")
    backward = [
        estimate(desc, DEVICE, training).by_signature["one"].backward.seconds for desc in (wide, narrow)
    ]
    assert backward[0] - LAUNCH_SECONDS == pytest.approx((backward[1] - LAUNCH_SECONDS) / 2)


def test_buffers_are_resident() -> None:
    """A causal mask of 64 MiB in each layer was counted nowhere."""
    model = nn.Linear(4, 4)
    before = ModelDesc.from_module(model, torch.ones(2, 4))
    model.register_buffer("mask", torch.ones(16, 16))
    after = ModelDesc.from_module(model, torch.ones(2, 4))
    device = DeviceInfo(memory_limit=2**30, flops=1e9, memory_bandwidth=1e9)
    small, large = (estimate(desc, device, Training()).resident_bytes for desc in (before, after))
    assert large - small == 16 * 16 * 4
