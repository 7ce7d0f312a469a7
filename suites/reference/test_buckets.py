"""Buckets: one collective for several parameters gives right results, whatever each rank used. All sums are exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from suites.reference.helpers import Breaking, assert_same
from zharness.comm import Comm
from zharness.reference import Engine, initialize
from zharness.reference.buckets import assign_buckets
from zharness.reference.layout import ParamDtypes, all_gather_rows, collect_model_params

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

FP32 = ParamDtypes(torch.float32, torch.float32, torch.float32)


class Odd(nn.Module):
    """Parameters of odd sizes, an empty and a transposed one, and two branches of which each forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.unused = nn.Linear(2, 2)
        self.turned = nn.Parameter(torch.ones(4, 5).t())
        self.empty = nn.Parameter(torch.ones(0, 3))
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 3 - (at % 2))

    def forward(self, x: Tensor, branch: str, reentrant: bool = False) -> Tensor:
        hidden = self.first(x)
        layer = getattr(self, branch)
        hidden = checkpoint(layer, hidden, use_reentrant=True) if reentrant else layer(hidden)
        return hidden @ self.turned


def pair(stage: int, **zero: int) -> tuple[Engine, nn.Module]:
    plain = Odd()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_allreduce_op": "sum",
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, **zero},
    }
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config)
    return engine, plain


def batch() -> Tensor:
    return torch.tensor([[1.0, -1.0, 2.0], [0.0, 1.0, 1.0]]) * (1 + dist.get_rank())


def sum_local_grads(plain: nn.Module) -> dict[str, Tensor]:
    """Sum the plain model's gradients over the ranks; a parameter that no rank used has none."""
    found = {}
    for name, parameter in plain.named_parameters():
        used = torch.tensor([parameter.grad is not None], dtype=torch.uint8)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        total = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.contiguous()
        dist.all_reduce(total)
        if used:
            found[name] = total
    return found


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("size", [1, 30, 10**6])
def test_a_bucket_is_summed_sharded_and_gathered_correctly(size: int) -> None:
    comm, net = Comm(), Odd()
    found = list(collect_model_params(net, comm, dict.fromkeys(net.parameters(), FP32)).values())
    travelling = assign_buckets(found, size)
    assert sorted(o.name for bucket in travelling for o in bucket.members) == sorted(o.name for o in found)
    for bucket in travelling:
        assert len(bucket.members) == 1 or sum(o.layout.numel for o in bucket.members) <= size
        fulls = [original.parameter.detach() * (1 + comm.rank) for original in bucket.members]
        row = bucket.reduce_scatter(fulls, comm)
        joined = bucket.pack_shards(bucket.split_shards(row, comm.rank))
        bucket.unpack_rows(all_gather_rows(joined, comm), fulls)
        for full, original in zip(fulls, bucket.members, strict=True):
            assert torch.equal(full, original.parameter.detach() * sum(range(1, comm.world_size + 1))), original.name


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 30, 10**6])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_ranks_may_use_different_parameters_with_any_bucket_size(stage: int, size: int, reentrant: bool) -> None:
    engine, plain = pair(stage, reduce_bucket_size=size)
    branch = "right" if dist.get_rank() == 1 else "left"
    for _ in range(2):  # two backwards before one step
        plain(batch(), branch).sum().backward()
        engine(batch(), branch, reentrant).sum().backward()
    wanted, before = sum_local_grads(plain), engine.full_params()
    assert_same(engine.full_grads(), wanted)
    engine.step()
    assert_same(engine.full_params(), {name: p - wanted.get(name, 0) for name, p in before.items()})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("size", [0, 30, 10**6])
def test_stage_3_gathers_and_reduces_the_same_with_any_bucket_size(size: int) -> None:
    engine, plain = pair(3, reduce_bucket_size=size, stage3_prefetch_bucket_size=size)
    for reentrant in (False, True):
        plain(batch(), "left").sum().backward()
        engine(batch(), "left", reentrant).sum().backward()
        assert engine.gathered_bytes() == 0
    wanted, before = sum_local_grads(plain), engine.full_params()
    assert_same(engine.full_grads(), wanted)
    engine.step()
    assert_same(engine.full_params(), {name: p - wanted.get(name, 0) for name, p in before.items()})


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_runs_one_collective_for_each_bucket_and_not_for_each_parameter(stage: int) -> None:
    calls = []
    for depth in (3, 30):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = initialize(model=Deep(depth), config=config)
        engine.comm.reset()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        calls.append(sum(tally.calls for tally in engine.comm.tallies.values()))
    assert calls[0] == calls[1]


class Checkpointed(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Interleaved(Deep):
    """A model that reads its parameters in another order than it registers them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[::2], *self.layers[1::2]):
            x = layer(x)
        return x


@pytest.mark.world_size(2)
@pytest.mark.parametrize("size", [12, 24, 10**6])
@pytest.mark.parametrize("net", [Deep, Checkpointed, Interleaved])
def test_stage_3_sends_the_model_three_times_in_any_order_of_reads(net: type[Deep], size: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": size},
    }
    engine, *_ = initialize(model=net(10), config=config)
    psi = sum(value.numel() for value in engine.full_params().values())
    for allowed in (4, 3):  # in the first step some buckets are gathered without being used
        engine.comm.reset()
        engine.backward(engine(torch.ones(1, 2, requires_grad=True)).sum())
        sent = sum(t.elements for (_, dtype), t in engine.comm.tallies.items() if dtype == torch.float32)
        assert sent <= allowed * psi
        assert engine.gathered_bytes() == 0


@pytest.mark.world_size(2)
def test_zero_grad_drops_what_a_backward_that_raised_had_prefetched() -> None:
    engine, plain = pair(3)
    hidden = Breaking.apply(batch().requires_grad_())
    with pytest.raises(ValueError, match="broken on purpose"):
        engine(hidden, "left").sum().backward()
    engine.zero_grad()
    assert engine.gathered_bytes() == 0
    plain(batch(), "left").sum().backward()
    engine(batch(), "left").sum().backward()
    assert_same(engine.full_grads(), sum_local_grads(plain))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_grad_drops_buckets_that_were_reduced_before_a_backward_raised(stage: int) -> None:
    engine, plain = pair(stage, reduce_bucket_size=1)
    hidden = Breaking.apply(batch().requires_grad_())
    with pytest.raises(ValueError, match="broken on purpose"):
        engine(hidden, "left").sum().backward()
    engine.zero_grad()
    plain(batch(), "right").sum().backward()
    engine(batch(), "right").sum().backward()
    assert_same(engine.full_grads(), sum_local_grads(plain))
