"""Test that the engines of one process share a DeviceMesh, as long as the default process group lives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.tensor_parallel import build_device_mesh
from zharness.mesh import Mesh
from zharness.world import Group, Isolation, RankServer, RankTask


@pytest.mark.world_size(4)
def test_engines_of_one_mesh_share_it_and_other_axes_have_another() -> None:
    cpu = torch.device("cpu")
    split = build_device_mesh(Mesh.parse("tp2"), cpu)
    assert build_device_mesh(Mesh.parse("tp2"), cpu) is split
    assert build_device_mesh(Mesh.parse("rep2"), cpu) is not split
    assert get_device_mesh("cpu", (2, 2), ("replicate", "shard")) is not split


def sum_along_tp() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones, group=get_device_mesh("cpu", (2, 2), ("dp_shard", "tp")).get_group("tp"))
    return float(ones)


def test_a_new_default_group_gets_meshes_of_its_own() -> None:
    with RankServer() as server:
        for group in (Group.REUSED, Group.REUSED, Group.DEFAULT, Group.REUSED):
            task = RankTask(sum_along_tp, (), 4, group=group, isolation=Isolation.POOLED)
            assert server.submit(task).values() == [2.0] * 4
