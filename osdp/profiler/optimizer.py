"""Time of an optimizer step, measured on the kinds of parameters that the runtime makes."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from osdp.comm.groups import device_of
from osdp.hardware.profile import UNSTABLE, MatrixProfile, OptimizerProfile
from osdp.model.training import OPTIMIZERS, Training
from osdp.profiler.cache import LIFETIME, SPOILT, MeasurementCache, layout
from osdp.profiler.links.machine import hardware
from osdp.profiler.links.timing import relative_spread, time_run, trimmed_mean
from osdp.profiler.stopwatch import SWEPT_BYTES, compute_clock
from osdp.torch_private.dtensor import wrap_like
from osdp.torch_private.local_step import step_local_tensors
from osdp.torch_private.muon import orthogonalize

#: Increased with every change of what is measured, so that older cache files are not read.
_METHOD = 4

#: (number of tensors, elements of each): many small ones for the cost per tensor, a few large ones for the
#: cost per byte. The large ones, with gradients and optimizer states, are several times larger than caches.
_SMALL = (48, 64)
_LARGE = (4, 2**21)

#: Shapes of matrices that are orthogonalized: one for the cost of any, one for that of its products.
_SMALL_MATRIX = (32, 64)
_LARGE_ON_CPU, _LARGE_MATRIX = (256, 512), (2048, 4096)

_VALUES = {"momentum": 0.9, "nesterov": True, "amsgrad": True, "centered": True, "weight_decay": 0.1}


def profile_optimizer(
    training: Training,
    *,
    device: str | torch.device,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype = torch.float32,
    seconds: float = 2.0,
) -> OptimizerProfile:
    """Measure ``torch.optim`` steps with the class and the flags of ``training``.

    The ranks of a mesh step together, as they train: those of one machine share its memory's bandwidth. A
    mesh of a ``fake`` group or of one rank is sufficient where nothing is shared. Without a mesh DTensors are
    assumed to cost as much as plain tensors.

    Args:
        training: The optimizer and its flags.
        device: Device of the parameters.
        mesh: Mesh over which DTensors are sharded, as in the runtime.
        dtype: Dtype of the parameters.
        seconds: Approximate duration of the measurement.
    """
    where = torch.device(device)

    spreads = []

    def each(sizes: tuple[int, int], on: DeviceMesh | None) -> float:
        """Seconds per parameter in a step of ``sizes[0]`` parameters of ``sizes[1]`` elements."""
        steps = _step_seconds(training, _parameters(sizes, where, on, dtype), seconds / 3, mesh)
        spreads.append(relative_spread(steps))
        # The extremes are left out.
        return trimmed_mean(steps) / sizes[0]

    nbytes_large, nbytes_small = _LARGE[1] * dtype.itemsize, _SMALL[1] * dtype.itemsize
    large, small = each(_LARGE, mesh), each(_SMALL, mesh)
    plain = small if mesh is None else each(_SMALL, None)
    # Solve per_tensor + nbytes_small * per_byte = small and per_tensor + nbytes_large * per_byte = large.
    per_byte = max(0.0, (large - small) / (nbytes_large - nbytes_small))
    per_tensor, per_dtensor = (max(0.0, t - nbytes_small * per_byte) for t in (plain, small))
    matrices = None if training.matrix_optimizer is None else profile_matrices(where, mesh, seconds / 3)
    # Large tensors decide how long a step takes.
    return OptimizerProfile(min(per_tensor, per_dtensor), per_dtensor, per_byte, spreads[0], matrices)


def profile_matrices(
    device: torch.device, mesh: DeviceMesh | None = None, seconds: float = 0.6
) -> MatrixProfile:
    """Measure how long Muon orthogonalizes a small and a large matrix, on all ranks at once.

    Args:
        device: Where.
        mesh: The ranks that step together.
        seconds: Approximate duration of the measurement.
    """
    group = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))]).param_groups[0]
    free = MatrixProfile(0.0, 1.0)
    taken, flops = [], []
    for shape in _SMALL_MATRIX, _LARGE_ON_CPU if device.type == "cpu" else _LARGE_MATRIX:
        orthogonalized = partial(orthogonalize, torch.rand(shape, device=device), group)
        steps = _run_together(orthogonalized, device, seconds / 2, mesh)
        taken.append(trimmed_mean(steps))
        flops.append(free.seconds(shape))
    (small, large), (few, many) = taken, flops
    if small >= large:
        # Another process held it up. Matrices of all sizes would cost the same: all time is that of products.
        return MatrixProfile(0.0, large / many)
    per_flop = (large - small) / (many - few)
    return MatrixProfile(max(0.0, small - per_flop * few), per_flop)


def cached_optimizer(
    training: Training,
    *,
    device: str | torch.device,
    mesh: DeviceMesh | None,
    cache: MeasurementCache,
    **options: Any,
) -> OptimizerProfile:
    """As :func:`profile_optimizer`, but measured once for a class, flags, hardware and layout of ranks."""
    flags = [
        getattr(training, name) for name in ("optimizer", "matrix_optimizer", "foreach", "fused", *_VALUES)
    ]
    facts = [_METHOD, flags, hardware(torch.device(device))]
    if mesh is not None and cache.is_on:
        # Those of one machine share its memory's bandwidth.
        facts += [mesh.ndim, layout(mesh.get_group(mesh.ndim - 1), torch.device(device))]
    return cache.get_or_measure(
        "optimizer",
        OptimizerProfile,
        facts,
        lambda: profile_optimizer(training, device=device, mesh=mesh, **options),
        _lifetime,
    )


def _lifetime(found: OptimizerProfile) -> timedelta:
    """How long it may be kept: what other processes disturbed, for the other starts of the same job alone."""
    disturbed = found.matrices is not None and found.matrices.per_matrix == 0
    return SPOILT if disturbed or found.spread > UNSTABLE else LIFETIME


def make_optimizer(
    training: Training, parameters: Sequence[nn.Parameter], lr: float = 1e-3
) -> torch.optim.Optimizer:
    """Make the optimizer that ``training`` describes, with torch's defaults for everything else."""
    arguments: dict[str, Any] = {
        name: value for name, value in _VALUES.items() if getattr(training, name) is True
    }
    if OPTIMIZERS[training.optimizer].fused:
        arguments["fused"] = training.fused
    kind = getattr(torch.optim, training.optimizer)
    optimizer: torch.optim.Optimizer = kind(parameters, lr=lr, foreach=training.foreach, **arguments)
    return optimizer


def _parameters(
    sizes: tuple[int, int], device: torch.device, mesh: DeviceMesh | None, dtype: torch.dtype
) -> list[nn.Parameter]:
    """``sizes[0]`` parameters of ``sizes[1]`` local elements each, with gradients."""
    count, numel = sizes
    parameters = []
    for _ in range(count):
        local = torch.ones(numel // 32, 32, dtype=dtype, device=device)
        if mesh is None:
            parameter = nn.Parameter(local)
        else:
            placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            sharded = DTensor.from_local(local.to(mesh.device_type), mesh, placements, run_check=False)
            # Offloaded parameters are in host memory although their mesh consists of accelerators.
            parameter = nn.Parameter(sharded.to(device))
        parameter.grad = torch.ones_like(parameter)
        parameters.append(parameter)
    return parameters


def _step_seconds(
    training: Training, parameters: list[nn.Parameter], seconds: float, mesh: DeviceMesh | None
) -> list[float]:
    """Seconds of steps, as :func:`_run_together` measures them."""
    optimizer = make_optimizer(training, parameters)

    def step() -> None:
        if not step_local_tensors(optimizer, wrap_like):  # as the runtime does
            optimizer.step()

    # RAdam changes its formula after the fifth step.
    warmup = 6 if training.optimizer == "RAdam" else 2
    return _run_together(step, parameters[0].device, seconds, mesh, warmup)


def _run_together(
    step: Callable[[], object],
    device: torch.device,
    seconds: float,
    mesh: DeviceMesh | None,
    warmup: int = 2,
) -> list[float]:
    """Seconds of runs of ``step``, on the ranks of the last axis of ``mesh`` at once.

    Measures for about ``seconds``, with at least 3 and at most 50 runs. In training a backward comes before
    each, which leaves nothing of the step before in the caches: small tensors take up to twice as long there
    as in a loop of steps (8.7 and 16 us each on an EPYC core, torch 2.13, 2026-11).
    """
    swept = torch.ones(SWEPT_BYTES // 4, dtype=torch.float32, device=device)

    def run() -> float:
        swept.sum()
        return time_run(step, device, group, clock)

    for _ in range(warmup):
        step()
    group = None if mesh is None else mesh.get_group(mesh.ndim - 1)
    clock = compute_clock() if device.type == "cpu" else time.perf_counter
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    if mesh is not None:
        # All ranks take as many steps.
        slowest = torch.tensor(first, dtype=torch.float64, device=device_of(mesh))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        first = float(slowest)
    count = min(50, max(3, int(seconds / max(first, 1e-9))))
    return [run() for _ in range(count)]
