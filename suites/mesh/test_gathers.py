"""Test that gathering many DTensors at once returns what ``DTensor.full_tensor`` returns for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import torch_gathers
from zharness.engines.torch_gathers import find_splits, gather_full_tensors
from zharness.errors import EngineContractError

SHAPES = ((), (1,), (3,), (5,), (19,), (0, 4), (19, 12), (12, 1), (7, 3, 2))


def build_tensors(mesh: Any, placements: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return DTensors of every shape that has the dimensions that ``placements`` split."""
    from torch.distributed.tensor import distribute_tensor

    dimensions = 1 + max((placement.dim for placement in placements if placement.is_shard()), default=-1)
    return [
        distribute_tensor(torch.arange(math.prod(shape)).to(dtype).reshape(shape) + 1, mesh, placements)
        for shape in SHAPES
        if len(shape) >= dimensions
    ]


def require_full(tensors: Sequence[Any], expected: Sequence[Tensor] = ()) -> None:
    """Compare the tensors that are gathered at once with ``expected``, or with those that torch gathers one by one."""
    wanted = expected or [tensor.full_tensor() for tensor in tensors]
    for full, one in zip(gather_full_tensors(tensors), wanted, strict=True):
        assert full.shape == one.shape
        assert full.dtype is one.dtype
        assert torch.equal(full, one)


@pytest.mark.world_size(4)
def test_every_split_over_two_axes_is_gathered() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    placements = [(first, second) for first in (Replicate(), Shard(0), Shard(1)) for second in (Replicate(), Shard(0))]
    tensors = [tensor for pair in placements for tensor in build_tensors(mesh, pair, torch.float32)]
    tensors += build_tensors(mesh, (Shard(0), Shard(1)), torch.bfloat16) + build_tensors(
        mesh["tp"], (Shard(0),), torch.int64
    )
    assert len(tensors) > 40
    require_full(tensors)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 19])
def test_fsdp_over_tensor_parallelism_is_gathered(rows: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 5))
    whole = [param.detach().clone() for param in model.parameters()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for module in (*model, model):
        fully_shard(module, mesh=mesh["dp_shard"])
    params = list(model.parameters())
    assert any(hasattr(placement, "split_factor") for param in params for placement in param.placements)
    require_full(params, whole)
    if rows > 1:  # torch 2.13 hangs in full_tensor of one row, whose second half is empty
        require_full(params)


@pytest.mark.world_size(4)
def test_many_tensors_are_gathered_in_one_collective_of_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    calls: list[int] = []
    gather = torch_gathers.all_gather_rows

    def counted(row: Tensor, comm: Any) -> Tensor:
        calls.append(comm.world_size)
        return gather(row, comm)

    monkeypatch.setattr(torch_gathers, "all_gather_rows", counted)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    require_full(build_tensors(mesh, (Shard(0), Shard(1)), torch.float32))
    assert calls == [2, 2]


@pytest.mark.world_size(2)
def test_partial_sums_are_summed_and_other_tensors_are_left() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    sums = DTensor.from_local(torch.ones(3) + dist.get_rank(), mesh, [Partial()])
    plain = torch.ones(2)
    full, left = gather_full_tensors([sums, plain])
    assert full.tolist() == [3, 3, 3]
    assert left is plain


@pytest.mark.world_size(2)
def test_a_part_of_another_size_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    wrong = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
    with pytest.raises(EngineContractError, match="has 2 elements on this rank, expected 3"):
        gather_full_tensors([wrong])


def test_parts_that_are_no_blocks_have_no_splits() -> None:
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert find_splits((2, 2), (Shard(0), Partial())) is None
    assert find_splits((2, 2), (_StridedShard(0, split_factor=4), Shard(0))) is None
    assert find_splits((2, 2), (_StridedShard(0, split_factor=2), Shard(1))) is None
    assert find_splits((2, 2), (_StridedShard(0, split_factor=2), Shard(0))) is not None
