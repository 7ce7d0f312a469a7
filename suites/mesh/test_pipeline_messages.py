"""What an observer records of messages between two ranks, and which ranks have the same part of a weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zharness.law_kit.observed_collectives import ACTIVATIONS, SEND, CollectiveObserver, Sent
from zharness.laws.mesh import find_replica
from zharness.mesh import Mesh

WHOLE = ((0, 4),)


@pytest.mark.world_size(4)
def test_a_message_to_one_rank_is_counted_along_the_axes_between_both() -> None:
    rank = dist.get_rank()
    config = SimpleNamespace(mesh=Mesh.parse("pp2"))  # ranks 0 and 1 are the first stage, 2 and 3 the last
    ctx: Any = SimpleNamespace(config=config, world_size=4, rank=rank)
    with CollectiveObserver(ctx, activation_dims=3) as observer:
        if rank == 0:
            dist.send(torch.ones(3, dtype=torch.float64), 2)
            dist.send(torch.ones(5), 1)
            dist.send(torch.ones(7, dtype=torch.int32), 2)
        if rank == 1:
            dist.recv(torch.ones(5), 0)
        if rank == 2:
            dist.recv(torch.ones(3, dtype=torch.float64), 0)
            dist.recv(torch.ones(7, dtype=torch.int32), 0)
    to_the_last_stage = Sent(ACTIVATIONS, SEND, "pp", "float64", "1")
    to_the_replica = Sent(ACTIVATIONS, SEND, "dp_shard", "float32", "1")
    assert observer.elements == ({to_the_last_stage: 3, to_the_replica: 5} if rank == 0 else {})
    assert Sent.parse(to_the_last_stage.name) == to_the_last_stage


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_a_replica_is_compared_with_the_first_rank_that_has_the_same_elements(rank: int, first: int) -> None:
    ctx: Any = SimpleNamespace(mesh=Mesh.parse("pp4"), world_size=4)
    assert find_replica(ctx, "pp", rank, [(), WHOLE, WHOLE, ()]) == first
