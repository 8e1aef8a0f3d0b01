"""Groups of neighbouring ranks: meshes and communicators, each made once."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.comm.torch_private import number_of_groups


def level_groups(mesh: DeviceMesh, device: torch.device) -> None:
    """Let all ranks of ``mesh`` have been members of equally many groups; all of them call it.

    Where some ranks have made groups that others have not (stages that are sharded in other ways), the next
    group with local synchronization would wait for a name that its other members do not use.
    """
    most = torch.tensor([number_of_groups()], device=device)
    for axis in range(mesh.ndim):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    backend = dist.get_backend(mesh.get_group(0))
    for _ in range(int(most.item()) - number_of_groups()):
        dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)


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
    """The mesh of all data-parallel ranks, and those of its groups.

    All ranks make them alike; :meth:`over` gives those of the same ranks again, so that several models share
    their communicators.

    Args:
        world: A mesh with one axis, of all ranks or one of several such (data-parallel groups of a pipeline).

    Attributes:
        world: The mesh of all ranks.
    """

    def __init__(self, world: DeviceMesh) -> None:
        self.world = world
        self._grouped: dict[int, DeviceMesh] = {}

    @classmethod
    def over(cls, world: DeviceMesh) -> "Meshes":
        """The meshes over the ranks of ``world``, made before or new."""
        return _MADE.setdefault(world.get_group(), cls(world))

    def grouped(self, group_size: int) -> DeviceMesh:
        """All ranks as rows of ``group_size`` neighbours; the axes are called as FSDP2 uses them.

        Raises:
            ValueError: The rows would not be of one length.
        """
        ranks = self.world.mesh
        if ranks.numel() % group_size:
            raise ValueError(f"groups of {group_size} do not divide {ranks.numel()} ranks")
        if group_size not in self._grouped:
            rows = ranks.view(-1, group_size)
            row, column = divmod(self.world.get_local_rank(), group_size)
            groups = [self._group(rows[:, column]), self._group(rows[row])]
            self._grouped[group_size] = DeviceMesh.from_group(
                groups, self.world.device_type, mesh=rows, mesh_dim_names=("replicate", "shard")
            )
        return self._grouped[group_size]

    def _group(self, ranks: torch.Tensor) -> dist.ProcessGroup:
        # Only its own ranks take part: those of other data-parallel meshes may make theirs at another time.
        group: dist.ProcessGroup = dist.new_group(
            ranks.tolist(), backend=dist.get_backend(self.world.get_group()), use_local_synchronization=True
        )
        return group

    def grid(self, group_size: int) -> Grid:
        """The communicators of such groups."""
        mesh = self.grouped(group_size)
        return Grid(inside=mesh.get_group("shard"), across=mesh.get_group("replicate"))


#: Communicators are costly and do not go away: those of one group of ranks are made once, while it lives.
_MADE: WeakKeyDictionary[dist.ProcessGroup, Meshes] = WeakKeyDictionary()
