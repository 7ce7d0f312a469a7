"""Test that the engines of one process share a DeviceMesh, as long as the default process group lives."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.tensor_parallel import build_device_mesh
from zharness.mesh import Mesh
from zharness.world import GroupMode, Isolation, RankServer, RankTask
from zharness.world.team import count_threads


@pytest.mark.world_size(4)
def test_engines_of_one_mesh_share_it_and_other_axes_have_another() -> None:
    cpu = torch.device("cpu")
    split = build_device_mesh(Mesh.parse("tp2"), cpu)
    assert build_device_mesh(Mesh.parse("tp2"), cpu) is split
    assert build_device_mesh(Mesh.parse("rep2"), cpu) is not split
    assert get_device_mesh("cpu", (2, 2), ("replicate", "shard")) is not split


def sum_along_tp(data_ranks: int) -> tuple[float, int]:
    """Return a sum over the axis tp, and the number of threads of this process."""
    ones = torch.ones(1)
    dist.all_reduce(ones, group=get_device_mesh("cpu", (data_ranks, 2), ("dp_shard", "tp")).get_group("tp"))
    return float(ones), count_threads(os.getpid())


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_a_new_default_group_gets_meshes_of_its_own_and_ends_the_old_ones(data_ranks: int) -> None:
    # With one data rank the axis tp is the default group itself, which its mesh then keeps alive.
    groups = (
        GroupMode.REUSED,
        GroupMode.REUSED,
        *[GroupMode.DEFAULT] * 6,
        GroupMode.REUSED,
    )
    with RankServer() as server:
        sums, threads = zip(
            *(
                server.submit(
                    RankTask(sum_along_tp, (data_ranks,), 2 * data_ranks, group=group, isolation=Isolation.POOLED)
                ).values()[0]
                for group in groups
            ),
            strict=True,
        )
    assert set(sums) == {2.0}
    assert threads[-1] <= threads[3]
