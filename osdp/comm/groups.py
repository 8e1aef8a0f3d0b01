"""Meshes and communicators of groups of neighbouring ranks, each created once."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from osdp.torch_private.distributed import number_of_groups


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device in ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def equalize_group_count(mesh: DeviceMesh, device: torch.device) -> None:
    """Make all ranks of ``mesh`` members of the same number of process groups; a collective call.

    torch derives the name of a group with local synchronization from that number. Where some ranks have
    created groups that others have not (stages with different sharding), the members of the next group would
    wait for each other under different names, forever. Single-rank groups make up the difference.
    """
    most = torch.tensor([number_of_groups()], device=device)
    for axis in range(mesh.ndim):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    backend = dist.get_backend(mesh.get_group(0))
    for _ in range(int(most.item()) - number_of_groups()):
        dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a group as a grid with rows of ``P``: fast links inside a row, slow ones across rows.

    Attributes:
        inside: This rank's row ``i``: ranks ``i * P`` to ``i * P + P - 1``.
        across: This rank's column ``j``: ranks ``j``, ``P + j``, ...
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.across.size(), self.inside.size()


class Meshes:
    """The mesh of all data-parallel ranks, and the meshes of its shard groups.

    All ranks create them in the same order; :meth:`over` returns the existing meshes of the same ranks, so
    that several models share their communicators.

    Args:
        world: A mesh with one axis: all ranks, or the ranks of one data-parallel group of a pipeline.
        grouped: Meshes of groups of these ranks that exist already, by group size; grows.

    Attributes:
        world: The mesh of all ranks.
    """

    def __init__(self, world: DeviceMesh, grouped: dict[int, DeviceMesh] | None = None) -> None:
        self.world = world
        self._grouped = {} if grouped is None else grouped

    @classmethod
    def over(cls, world: DeviceMesh) -> "Meshes":
        """``world`` itself, and meshes of groups of its ranks, each of which is created once.

        Another mesh over the same ranks may be there under other names (the one that links were measured on);
        torch takes the two for different ones.
        """
        return cls(world, _MADE.setdefault(world.get_group(), {}))

    def grouped(self, group_size: int) -> DeviceMesh:
        """All ranks as rows of ``group_size`` neighbours, with FSDP2's axes ("replicate", "shard").

        Raises:
            ValueError: ``group_size`` does not divide the number of ranks.
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
        # Only the group's own ranks take part: other data-parallel meshes may create theirs at another time.
        group: dist.ProcessGroup = dist.new_group(
            ranks.tolist(), backend=dist.get_backend(self.world.get_group()), use_local_synchronization=True
        )
        return group

    def grid(self, group_size: int) -> Grid:
        """The communicators of shard groups of ``group_size`` neighbouring ranks."""
        mesh = self.grouped(group_size)
        return Grid(inside=mesh.get_group("shard"), across=mesh.get_group("replicate"))


#: Communicators are costly and never freed, so each group of ranks creates its own only once while it exists.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = WeakKeyDictionary()
