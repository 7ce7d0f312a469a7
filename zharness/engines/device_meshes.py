"""Build the DeviceMesh of an engine once for each default process group.

Engines of one process share it, as those of a user's program do. Otherwise every engine would add process groups, each
of which keeps about three threads of gloo until the process ends, and would lose DTensor's cache of splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shape = tuple[str, tuple[int, ...], tuple[str, ...]]

# The meshes of a destroyed process group cannot be used: they go with it.
_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Shape, DeviceMesh]] = WeakKeyDictionary()


def get_device_mesh(device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Return the DeviceMesh of all ranks with these axes; the first call for each shape is a collective."""
    from torch.distributed.device_mesh import init_device_mesh

    assert dist.group.WORLD is not None, "an engine is built in a process group"
    meshes = _MESHES.setdefault(dist.group.WORLD, {})
    shape = (device_type, sizes, axes)
    if shape not in meshes:
        meshes[shape] = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
    return meshes[shape]
