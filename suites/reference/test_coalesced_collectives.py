"""Coalesced collectives: ranks group tensors of any sizes in the same way, and all values arrive."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.reference import initialize
from zharness.reference.inspection import coalesced_collectives
from zharness.reference.layout import ShardLayout

SHAPES = [(5,), (3,), (0,), (1,), (7, 2), (), (2, 1), (4,)]
DTYPES = [torch.float32, torch.bfloat16]


def numbered(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape).to(dtype)


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("size", [1, 6, 2**20])
def test_every_full_tensor_is_gathered_with_any_group_size(size: int) -> None:
    comm, expected, shards = Comm(), {}, {}
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            full = numbered(shape, dtype, 10 * number)
            layout = ShardLayout(full.shape, full.stride(), comm.world_size)
            start, stop = layout.shard_bounds(comm.rank)
            expected[number, dtype] = full
            shards[number, dtype] = (full.reshape(-1)[start:stop], layout)
    with patch.object(coalesced_collectives, "DEFAULT_BUCKET_SIZE", size):
        found = coalesced_collectives.all_gather_full_tensors(shards, comm)
    assert list(found) == list(expected)
    for key, full in expected.items():
        assert found[key].dtype == full.dtype
        assert found[key].is_contiguous()
        assert found[key].equal(full), key


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("size", [1, 6, 2**20])
def test_rank_0s_values_are_broadcast_with_any_group_size(size: int) -> None:
    comm = Comm()
    wanted = [numbered(shape, dtype, 1) for shape in SHAPES for dtype in (*DTYPES, torch.int64)]
    wanted += [torch.tensor([True, False]), numbered((3, 2), torch.float32, 1).t()]
    mine = [torch.empty_like(tensor).copy_(tensor if comm.rank == 0 else torch.zeros_like(tensor)) for tensor in wanted]
    with patch.object(coalesced_collectives, "DEFAULT_BUCKET_SIZE", size):
        coalesced_collectives.broadcast_tensors(mine, comm)
    for found, tensor in zip(mine, wanted, strict=True):
        assert found.equal(tensor)
        assert found.stride() == tensor.stride()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_with_shards_of_different_lengths_group_their_gradients_in_the_same_way(stage: int) -> None:
    """The last rank owns fewer elements, so groups that follow from owned elements would differ between ranks."""
    module = nn.ParameterDict({str(n): nn.Parameter(torch.ones(n)) for n in (14, 3, 5, 1)})
    engine, *_ = initialize(
        model=module,
        optimizer=lambda leaves: torch.optim.Adam(leaves.values()),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
    )
    sum(float(name) * weight.sum() for name, weight in module.items()).backward()  # type: ignore[union-attr]
    for size in range(2, 16):
        with patch.object(coalesced_collectives, "DEFAULT_BUCKET_SIZE", size * dist.get_world_size()):
            for name, grad in engine.full_grads().items():
                assert grad.equal(torch.full_like(grad, float(name)))
    engine.step()
    with patch.object(coalesced_collectives, "DEFAULT_BUCKET_SIZE", 8 * dist.get_world_size()):
        assert {name: state["exp_avg"].shape for name, state in engine.full_optimizer_state().items()} == {
            name: (int(name),) for name in ("14", "3", "5", "1")
        }
