"""Build the DeviceMeshes of torch's engines once for each default process group and shape.

The engines of one process share a DeviceMesh, as the engines of a user's program do. Otherwise every engine would add
process groups and would lose DTensor's cache of splits. Each process group keeps about three threads of gloo until the
process ends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shape = tuple[str, tuple[int, ...], tuple[str, ...] | None]


@lru_cache(maxsize=1)  # a process has one default group; meshes of an earlier group are unusable
def find_meshes(_group: dist.ProcessGroup) -> dict[Shape, DeviceMesh]:
    """Return the meshes of a default process group; the caller adds the meshes that it builds."""
    return {}


def get_device_mesh(device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the DeviceMesh of all ranks with these axes; the first call for each shape is a collective."""
    from torch.distributed.device_mesh import init_device_mesh

    assert dist.group.WORLD is not None, "an engine is built in a process group"
    meshes = find_meshes(dist.group.WORLD)
    shape = (device_type, sizes, axes)
    if shape not in meshes:
        meshes[shape] = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
    return meshes[shape]
