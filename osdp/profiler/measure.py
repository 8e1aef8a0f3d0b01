"""A measured Profile: segments, optimizer step and what is resident, on this device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp.allocator import keep_freed_memory
from osdp.hardware.profile import OptimizerProfile, Profile
from osdp.model.description import ModelDesc
from osdp.model.training import Training
from osdp.nn.random_states import preserve_random_states
from osdp.profiler.cache import MeasurementCache
from osdp.profiler.links.machine import device_kind
from osdp.profiler.optimizer import cached_optimizer
from osdp.profiler.segments import cached_batches, default_device
from osdp.profiler.workspace import convolution_scratchpad, library_workspace
from osdp.tracing.loss import LossFn
from osdp.tracing.sample_batch import SampleBatch

#: Seconds that the host's optimizer is measured; plans rarely need it.
_HOST_SECONDS = 0.5


def profile_model(
    model: nn.Module,
    model_desc: ModelDesc,
    sample_inputs: Any = None,
    *,
    training: Training | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    loss_fn: LossFn | None = None,
    cache: MeasurementCache | None = None,
    progress: bool = True,
) -> Profile:
    """Measure ``model`` on this device, one instance of each distinct segment.

    Args:
        model: The model that was described; it is neither run nor changed.
        model_desc: Its description.
        sample_inputs: A batch to measure with; by default zeros like the one it was described with.
        training: Local batch, optimizer and dtypes; by default the described batch and AdamW.
        device: Where; by default the current CUDA device, else the CPU.
        mesh: The ranks that train together, along its last axis: they measure at once, and the segments of
            the slowest count, as in :func:`osdp.profiler.segments.profile_batches`. The optimizer's DTensors
            are sharded over it, as they are when a plan runs; without one they are taken to cost what plain
            tensors cost.
        loss_fn: As for the description.
        cache: Where measurements are looked up and kept; nowhere if ``None``. All of its ranks call this.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The batch cannot be made from the description, or the model takes no other batch size.
    """
    (found,) = profile_trainings(
        model,
        model_desc,
        sample_inputs,
        trainings=[training or Training()],
        device=device,
        mesh=mesh,
        loss_fn=loss_fn,
        cache=cache,
        progress=progress,
    )
    return found


def profile_trainings(
    model: nn.Module,
    model_desc: ModelDesc,
    sample_inputs: Any = None,
    *,
    trainings: Sequence[Training],
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    loss_fn: LossFn | None = None,
    cache: MeasurementCache | None = None,
    progress: bool = True,
) -> list[Profile]:
    """The same for several trainings that differ in their batches, which are measured in turns.

    Raises:
        ValueError: As there, or they differ in more than that.
    """
    if len({replace(training, local_batch=None, microbatches=1) for training in trainings}) > 1:
        raise ValueError("trainings that are profiled together may differ in their batches alone")
    sizes = [training.local_batch or model_desc.local_batch for training in trainings]
    for local_batch in sizes:
        if local_batch != model_desc.local_batch and not model_desc.batch_is_free:
            raise ValueError(
                f"{model_desc.name} takes only the traced batch of {model_desc.local_batch}, not "
                f"{local_batch}; trace it again with a sample batch of {local_batch}"
            )
    if sample_inputs is None and model_desc.opaque:
        first = model_desc.opaque[0]
        raise ValueError(
            f"module {first.name or 'the root'!r} {first.reason}{first.place}: how long it takes depends on "
            "the values of the batch, which a description does not hold. Pass the batch itself in its place, "
            "or as sample_inputs="
        )
    given = SampleBatch.from_desc(model_desc) if sample_inputs is None else SampleBatch.of(sample_inputs)
    samples = [given.resized(local_batch) for local_batch in sizes]
    target = torch.device(device) if device is not None else default_device()
    if target.type == "cpu":
        keep_freed_memory()
    training, cache = trainings[0], cache or MeasurementCache(None)
    segments = cached_batches(
        model,
        samples,
        model_desc,
        cache=cache,
        device=target,
        loss_fn=loss_fn,
        param_dtype=training.param_dtype,
        group=None if mesh is None else mesh.get_group(mesh.ndim - 1),
        progress=progress,
    )
    # cuBLAS is asked by a layer, whose weights are drawn and whose backward needs gradients.
    with preserve_random_states(target), torch.enable_grad():
        resident = library_workspace(target) + convolution_scratchpad(model, target)
    optimizer = cached_optimizer(training, device=target, mesh=mesh, cache=cache)
    on_host = None if target.type == "cpu" else _profile_host_optimizer(training, mesh, cache)
    return [
        Profile(
            device=device_kind(target),
            local_batch=local_batch,
            segments=measured,
            optimizer=optimizer,
            resident_bytes=resident
            + sum(t.nbytes for t in (*model.buffers(), *sample.tensors))
            + training.cast_bytes(sample.specs),
            measured=True,
            model=model_desc.fingerprint,
            host_optimizer=on_host,
        )
        for local_batch, sample, measured in zip(sizes, samples, segments, strict=True)
    ]


def _profile_host_optimizer(
    training: Training, mesh: DeviceMesh | None, cache: MeasurementCache
) -> OptimizerProfile:
    """The optimizer step of parameters in host memory, as a plan that has such runs it."""
    if training.foreach is None and not training.fused:
        training = replace(training, foreach=True)
    return cached_optimizer(training, device="cpu", mesh=mesh, cache=cache, seconds=_HOST_SECONDS)
