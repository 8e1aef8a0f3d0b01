"""Memory and time of units offloaded to host memory: shards, gradients and optimizer states."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from osdp.arrays import Floats
from osdp.hardware.device_info import DeviceInfo

if TYPE_CHECKING:
    from osdp.cost.sharding.operator_costs import OperatorCosts
    from osdp.cost.sharding.units import UnitCosts


def in_host_memory(units: "UnitCosts", costs: "OperatorCosts", device: DeviceInfo) -> "UnitCosts":
    """``units`` with the costs of the offloaded ones replaced by the costs of offloading.

    Shards are copied to the device for each all-gather, and reduced gradients are copied to the host at once,
    on the streams of the collectives (``torch.distributed.fsdp``); the optimizer runs on the host.

    Raises:
        ValueError: The bandwidths to host memory, or the speed of the optimizer there, are unknown.
    """
    host, optimizer = device.host, costs.host_optimizer
    if host is None or optimizer is None:
        raise ValueError(
            "the cost of offloaded units needs DeviceInfo.host and a profile with a host_optimizer; "
            "DeviceInfo.detect() and a profile on an accelerator measure them"
        )

    def span(prefix: Floats) -> Floats:
        return prefix[units.stop] - prefix[units.start]

    # Shards and gradients are on the host between collectives; copies there and back delay every collective.
    off = units.offloaded
    step = optimizer.per_dtensor * span(costs.num_trainable) + optimizer.per_byte * span(costs.local_sharded)
    step += span(costs.matrices_sharded)  # on the device
    return replace(
        units,
        state=np.where(off, 0.0, units.state),
        gradient_kept=np.where(off, 0.0, units.gradient_kept),
        gather_seconds=units.gather_seconds + np.where(off, span(costs.shard) / host.to_device, 0.0),
        reduce_seconds=units.reduce_seconds + np.where(off, span(costs.gradient_sharded) / host.to_host, 0.0),
        step_seconds=np.where(off, step, units.step_seconds),
    )
