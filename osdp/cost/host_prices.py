"""Bytes and seconds of units whose shards, gradients and optimizer states live in host memory."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from osdp.device_info import DeviceInfo

if TYPE_CHECKING:
    from osdp.cost.prices import OperatorPrices, Units

Floats = NDArray[np.float64]


def in_host_memory(units: "Units", prices: "OperatorPrices", device: DeviceInfo) -> "Units":
    """``units`` with those that are offloaded priced as such.

    Shards come to the device for each gather and reduced gradients leave it at once, on the streams of the
    collectives (``torch.distributed.fsdp``); the optimizer runs on the host.

    Raises:
        ValueError: The way to host memory, or the optimizer there, is unknown.
    """
    host, optimizer = device.host, prices.host_optimizer
    if host is None or optimizer is None:
        raise ValueError(
            "units in host memory can be priced only with DeviceInfo.host and a profile that has a "
            "host_optimizer; DeviceInfo.detect() and a profile on an accelerator measure them"
        )

    def span(prefix: Floats) -> Floats:
        return prefix[units.stop] - prefix[units.start]

    off = units.offloaded
    step = optimizer.per_dtensor * span(prices.num_trainable) + optimizer.per_byte * span(
        prices.local_sharded
    )
    return replace(
        units,
        state=np.where(off, 0.0, units.state),
        gradient_kept=np.where(off, 0.0, units.gradient_kept),
        gather_seconds=units.gather_seconds + np.where(off, span(prices.shard) / host.to_device, 0.0),
        reduce_seconds=units.reduce_seconds
        + np.where(off, span(prices.gradient_sharded) / host.to_host, 0.0),
        step_seconds=np.where(off, step, units.step_seconds),
    )
