"""Devices that nobody measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from osdp import DeviceInfo, Link
from osdp.hardware.device_info import COLLECTIVES, PointToPointLink


def known_device(
    memory_limit: Any = None, *, mesh: Any = None, group_sizes: Any = None, **_: Any
) -> DeviceInfo:
    """Numbers for what ``DeviceInfo.detect`` would measure in some seconds."""
    size = dist.get_world_size() if mesh is None else mesh.size()
    groups = {"world": size} | {
        f"{kind} {group}": {"inside": group, "across": size // group}.get(kind, size)
        for group in group_sizes or ()
        for kind in ("inside", "across", "two_step")
    }
    links = tuple(
        Link(name, group, count, 1e-4, 1e9) for group, count in groups.items() for name in COLLECTIVES
    )
    alone = DeviceInfo(memory_limit=2**33, devices_per_node=size, flops=1e10, memory_bandwidth=1e10)
    tensor_links = tuple(Link(name, "world", 2, 1e-4, 1e9) for name in COLLECTIVES)
    return replace(
        alone,
        links=links if size > 1 else (),
        stage_link=PointToPointLink(1e-4, 1e9),
        tensor_links=tensor_links if size < dist.get_world_size() else (),
    )


@contextmanager
def known_devices() -> Iterator[None]:
    """Whoever would measure devices is given :func:`known_device` instead."""
    with (
        mock.patch.object(DeviceInfo, "detect", known_device),
        mock.patch("osdp.inputs.detect", known_device),
    ):
        yield
