"""Groups of neighbouring ranks: meshes and communicators, each made once."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a group in rows, the fast links, and columns, the slow ones.

    Attributes:
        inside: This rank's row: ranks ``i * P`` to ``i * P + P - 1``.
        across: Its column: ranks ``j``, ``P + j``, ...
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.across.size(), self.inside.size()


class Meshes:
    """The mesh of all data-parallel ranks, and those of its groups; each is made once, by all ranks alike.

    Args:
        world: A mesh with one axis.

    Attributes:
        world: The mesh of all ranks.
    """

    def __init__(self, world: DeviceMesh) -> None:
        self.world = world
        self._grouped: dict[int, DeviceMesh] = {}

    def grouped(self, group_size: int) -> DeviceMesh:
        """All ranks as rows of ``group_size`` neighbours; the axes are called as FSDP2 uses them.

        Raises:
            ValueError: The rows would not be of one length.
        """
        ranks = self.world.mesh
        if ranks.numel() % group_size:
            raise ValueError(f"groups of {group_size} do not divide {ranks.numel()} ranks")
        if group_size not in self._grouped:
            self._grouped[group_size] = DeviceMesh(
                self.world.device_type, ranks.view(-1, group_size), mesh_dim_names=("replicate", "shard")
            )
        return self._grouped[group_size]

    def grid(self, group_size: int) -> Grid:
        """The communicators of such groups."""
        mesh = self.grouped(group_size)
        return Grid(inside=mesh.get_group("shard"), across=mesh.get_group("replicate"))
