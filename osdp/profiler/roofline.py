"""Estimated profile without a device: the roofline model of each segment's traced work.

A pass takes the longer of computing its FLOPs and moving its bytes (Williams, Waterman and Patterson,
Communications of the ACM 52(4), 2009), plus the launch of a kernel. Memory is as traced on fake tensors, in
the traced dtype: with a narrower ``param_dtype`` it is an upper bound.
"""

import math
from dataclasses import replace

from osdp.hardware.device_info import DeviceInfo
from osdp.hardware.profile import (
    ITERATIONS,
    MatrixProfile,
    OptimizerProfile,
    PassProfile,
    Profile,
    SegmentProfile,
)
from osdp.model.description import DTYPE_BYTES, ModelDesc, Segment, Work
from osdp.model.training import FOR_LOOP, FUSED, Training

#: Seconds to call one small kernel from eager PyTorch: an ``nn.Linear(8, 8)`` forward took 10 to 12 us on one
#: core of an AMD EPYC with torch 2.13 in 2026-11 (``python -m timeit`` measures it again).
LAUNCH_SECONDS = 1e-5

#: Seconds to give an optimizer the local tensors of one DTensor and its states: steps of AdamW and SGD took 4
#: to 7 us a tensor more than on plain ones, on the same machine
#: (:func:`osdp.profiler.optimizer.profile_optimizer`).
LOCAL_STEP_SECONDS = 6e-6

#: Tensors that a kernel of an optimizer step reads and writes: the eight of AdamW 20.
_TENSORS_PER_KERNEL = 2.5


def estimate(model_desc: ModelDesc, device_info: DeviceInfo, training: Training | None = None) -> Profile:
    """Estimate the profile of a model on a device that is not at hand.

    Args:
        model_desc: The traced model.
        device_info: Must have ``flops`` and ``memory_bandwidth``: the values that kernels reach, not the peak
            of a data sheet, with which the times would be too short by the same factor.
        training: Local batch and optimizer; by default the traced batch and AdamW.

    Returns:
        A profile with ``measured=False``.

    Raises:
        ValueError: ``device_info`` lacks a speed, or the model accepts only the traced batch size.
    """
    missing = [name for name in ("flops", "memory_bandwidth") if getattr(device_info, name) <= 0]
    if missing:
        given = ", ".join(f"{name}=..." for name in missing)
        raise ValueError(
            f"an estimate needs {' and '.join(missing)} of the device {device_info.kind!r}: give "
            f"DeviceInfo({given}), or measure with DeviceInfo.detect()"
        )
    training = training or Training(local_batch=model_desc.local_batch)
    batch = training.local_batch or model_desc.local_batch
    if batch != model_desc.local_batch and not model_desc.batch_is_free:
        raise ValueError(
            f"{model_desc.name} accepts only the traced batch of {model_desc.local_batch}, not {batch}; "
            f"trace it again with a sample batch of {batch}"
        )
    narrowing = _narrow_factor(model_desc, training)
    return Profile(
        device=device_info.kind,
        local_batch=batch,
        segments=tuple(
            _estimate_segment(segment, device_info, batch, narrowing)
            for segment in model_desc.distinct_segments
        ),
        optimizer=replace(
            estimate_optimizer(training, device_info.kind, device_info.memory_bandwidth),
            matrices=_estimate_matrices(training, device_info),
        ),
        resident_bytes=_sample_bytes(model_desc, training, batch) + model_desc.buffer_bytes,
        measured=False,
        model=model_desc.fingerprint,
        host_optimizer=_estimate_host_optimizer(training, device_info),
    )


def _estimate_matrices(training: Training, device_info: DeviceInfo) -> MatrixProfile | None:
    if training.matrix_optimizer is None:
        return None
    # Three products an iteration, and a few kernels before them.
    return MatrixProfile((3 * ITERATIONS + 5) * LAUNCH_SECONDS, 1 / device_info.flops)


def _estimate_host_optimizer(training: Training, device_info: DeviceInfo) -> OptimizerProfile | None:
    host = device_info.host
    if host is None or not host.memory_bandwidth:
        return None
    if training.foreach is None and not training.fused:
        # As it is measured, and as a plan with units in host memory asks for it.
        training = replace(training, foreach=True)
    return estimate_optimizer(training, "cpu", host.memory_bandwidth)


def estimate_optimizer(training: Training, kind: str, memory_bandwidth: float) -> OptimizerProfile:
    """Estimate the optimizer step on a device of ``kind``, bound by memory bandwidth and kernel launches."""
    implementation = training.implementation(kind)
    # Two, and three for each state: AdamW's are decay, lerp, mul, addcmul, sqrt, div, add and addcdiv.
    kernels = 2 + 3 * training.num_states
    # A fused one touches the parameter and its states twice, and the gradient once.
    traffic = 2 * (1 + training.num_states) + 1 if implementation == FUSED else _TENSORS_PER_KERNEL * kernels
    launches = kernels if implementation == FOR_LOOP else 1
    return OptimizerProfile(
        per_tensor=launches * LAUNCH_SECONDS,
        per_dtensor=launches * LAUNCH_SECONDS + LOCAL_STEP_SECONDS,
        per_byte=traffic / memory_bandwidth,
    )


def _estimate_segment(
    segment: Segment, device_info: DeviceInfo, batch: int, narrowing: float
) -> SegmentProfile:
    return SegmentProfile(
        signature=segment.signature,
        forward=_estimate_pass(segment.forward, device_info, batch, narrowing),
        backward=_estimate_pass(segment.backward, device_info, batch, narrowing),
        saved_bytes=_round_up(segment.saved_bytes(batch)),
    )


def _estimate_pass(work: Work, device_info: DeviceInfo, batch: int, narrowing: float) -> PassProfile:
    computing = work.flops(batch) / device_info.flops
    moving = work.moved_bytes(batch) * narrowing / device_info.memory_bandwidth
    busy = max(computing, moving)
    return PassProfile(
        # A pass without any work, such as a view, launches nothing.
        seconds=busy + LAUNCH_SECONDS if busy > 0 else 0.0,
        live_bytes=_round_up(work.live_bytes(batch)),
        peak_bytes=_round_up(work.peak_bytes(batch)),
    )


def _round_up(nbytes: float) -> int:
    """``nbytes`` rounded up to whole bytes: predicted memory must not be too small."""
    return math.ceil(nbytes)


def _narrow_factor(model_desc: ModelDesc, training: Training) -> float:
    """Fraction of the traced bytes that kernels move when they compute in ``param_dtype``; at most 1."""
    stored = (parameter.dtype for op in model_desc.operators for parameter in op.parameters)
    dtypes = (model_desc.computed_in,) if model_desc.computed_in else stored
    own = max((DTYPE_BYTES[dtype] for dtype in dtypes), default=0)
    if training.param_dtype is None or own == 0:
        return 1.0
    return min(1.0, DTYPE_BYTES[training.param_dtype] / own)


def _sample_bytes(model_desc: ModelDesc, training: Training, batch: int) -> int:
    traced = sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in model_desc.sample)
    traced += training.cast_bytes(model_desc.sample)
    return math.ceil(traced * batch / model_desc.local_batch)
