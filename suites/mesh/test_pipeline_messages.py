"""What an observer records of messages, what a layer of tp sends, and which ranks have the same part of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.law_kit.observed_collectives import ACTIVATIONS, BROADCASTS, GRADIENTS, CollectiveObserver, Sent
from zharness.law_kit.wire import Activations, Channel, Range, judge_elements, measure_activations
from zharness.laws.mesh import find_replica
from zharness.mesh import Mesh
from zharness.parity.comparison import TensorLocation
from zharness.workload import Batch

WHOLE = ((0, 4),)


@pytest.mark.world_size(4)
@pytest.mark.isolation("fresh")  # ranks send unequal numbers of messages, which a check of collectives counts
def test_a_message_to_one_rank_is_counted_along_the_axes_between_both() -> None:
    rank = dist.get_rank()
    config = SimpleNamespace(mesh=Mesh.parse("pp2"))  # ranks 0 and 1 are the first stage, 2 and 3 the last
    ctx: Any = SimpleNamespace(config=config, world_size=4, rank=rank)
    with CollectiveObserver(ctx, lambda tensor: tensor.dim() > 2) as observer:
        if rank == 0:
            dist.send(torch.ones(3, dtype=torch.float64), 2)
            dist.send(torch.ones(5), 1)
            dist.send(torch.ones(7, dtype=torch.int32), 2)
        if rank == 1:
            dist.recv(torch.ones(5), 0)
        if rank == 2:
            dist.recv(torch.ones(3, dtype=torch.float64), 0)
            dist.recv(torch.ones(7, dtype=torch.int32), 0)
    to_the_last_stage = Sent(ACTIVATIONS, "c10d::send", "pp", "float64", "1")
    to_the_replica = Sent(ACTIVATIONS, "c10d::send", "dp_shard", "float32", "1")
    assert observer.elements == ({to_the_last_stage: 3, to_the_replica: 5} if rank == 0 else {})
    assert Sent.parse(to_the_last_stage.name) == to_the_last_stage


@pytest.mark.world_size(4)
def test_a_collective_over_two_axes_has_both_and_a_broadcast_is_no_gather_of_weights() -> None:
    config = SimpleNamespace(mesh=Mesh.parse("pp2"))
    ctx: Any = SimpleNamespace(config=config, world_size=4, rank=dist.get_rank())
    replicas = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))][dist.get_rank() // 2]
    with CollectiveObserver(ctx, lambda tensor: tensor.dim() > 2) as observer:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(5), src=dist.get_rank() // 2 * 2, group=replicas)
    over_all = Sent(GRADIENTS, "c10d::allreduce_", "pp,dp_shard", "float32")
    by_the_root = {Sent(BROADCASTS, "c10d::broadcast_", "dp_shard", "float32"): 5}
    assert observer.elements == {over_all: 3} | (by_the_root if dist.get_rank() % 2 == 0 else {})


@pytest.mark.world_size(2)
def test_the_root_of_a_functional_broadcast_is_its_number_in_the_group() -> None:
    ctx: Any = SimpleNamespace(config=SimpleNamespace(mesh=Mesh.parse("pp2")), world_size=2, rank=dist.get_rank())
    group = dist.new_group([1, 0])
    with CollectiveObserver(ctx, lambda tensor: tensor.dim() > 2) as observer:
        found = torch.distributed._functional_collectives.broadcast(torch.full((3,), float(dist.get_rank())), 1, group)
    root = dist.get_process_group_ranks(group)[1]
    assert found.tolist() == [float(root)] * 3
    assert bool(observer.elements) is (dist.get_rank() == root)


def judge_sent(sent: Mapping[Sent, int], ranges: Mapping[Channel, Range]) -> dict[str, str]:
    """Return, by name, the hints of what one rank should not have sent."""
    ctx: Any = SimpleNamespace(location=lambda name, part, step, rank: TensorLocation(name, part, step, rank))
    elements = {message: torch.tensor(number) for message, number in sent.items()}
    mismatches = (each.mismatch for each in judge_elements(ctx, 0, elements, ranges, 0, lambda *_: "too many"))
    return {mismatch.parameter: mismatch.hint for mismatch in mismatches if mismatch is not None}


def test_what_no_formula_has_is_named_with_its_axes_and_operators() -> None:
    own, range_of_own = (
        Sent(GRADIENTS, "c10d::allreduce_", "dp_shard", "float32"),
        {Channel(GRADIENTS, "dp_shard"): (3, 4)},
    )
    assert not judge_sent({own: 3}, range_of_own)
    assert judge_sent({own: 5}, range_of_own) == {"elements of gradients along dp_shard": "too many"}
    assert judge_sent({}, range_of_own) == {"elements of gradients along dp_shard": "too many"}
    other, receiver = replace(own, axes="dp_shard,tp"), Sent(ACTIVATIONS, "c10d::send", "pp,tp", "float32", "1,1")
    assert judge_sent({own: 4, other: 1, receiver: 2}, range_of_own) == {
        "elements of gradients along dp_shard,tp": "no formula allows what c10d::allreduce_ sent",
        "elements of activations to pp,tp 1,1": "no formula allows what c10d::send sent",
    }


class TwoLayers(nn.Module):
    """A layer behind another one, which is called twice; maps (batch, 4) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x)) + self.down(self.up(x))
        return down


@pytest.mark.parametrize(
    ("plan", "size", "expected"),
    [
        ({"up": "colwise", "down": "rowwise"}, 2, {"up": (0, 64), "down": (64, 0)}),
        ({"up": "sequence_to_colwise", "down": "rowwise_to_sequence"}, 2, {"up": (32, 64), "down": (64, 32)}),
        ({"up": "colwise_gather_output", "down": "rowwise_split_input"}, 2, {"up": (48, 64), "down": (64, 48)}),
        ({"up": "colwise", "down": "rowwise"}, 1, {"up": (0, 0), "down": (0, 0)}),
    ],
)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_each_call_of_a_layer_sends_once_in_each_direction(
    plan: Mapping[str, str], size: int, expected: Mapping[str, tuple[int, int]], needs_grad: bool
) -> None:
    batch = Batch(torch.ones(8, 4, requires_grad=needs_grad), torch.ones(8, 4))
    unneeded = 0 if needs_grad or size == 1 else 2 * 8 * 4  # the gradient of the input, in both calls
    found = measure_activations(TwoLayers(), batch, plan, size)
    assert found == {
        name: Activations(forward, backward - unneeded * (name == "up"))
        for name, (forward, backward) in expected.items()
    }
    assert all(each.total == each.forward + each.backward for each in found.values())


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 1), (2, 1), (3, 0)])
def test_a_replica_is_compared_with_the_first_rank_that_has_the_same_elements(rank: int, first: int) -> None:
    ctx: Any = SimpleNamespace(mesh=Mesh.parse("pp4"), world_size=4)
    assert find_replica(ctx, "pp", rank, [(), WHOLE, WHOLE, ()]) == first
