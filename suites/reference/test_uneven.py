"""Ranks that use different parameters inside ``uneven``: no rank hangs, and unused gradients count as zero."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.errors import UsageError
from zharness.reference import Engine, initialize

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Experts(nn.Module):
    """One layer for each rank, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.gate(x)
        for index in chosen:
            x = torch.relu(checkpoint(self.experts[index], x, use_reentrant=index % 2 == 0))
        return x


def pair(stage: int) -> tuple[Engine, nn.Module, Tensor]:
    """Make an engine and its plain model with weights and inputs of -1, 0 and 1, so that all sums are exact."""
    torch.manual_seed(0)
    plain = Experts()
    for p in plain.parameters():
        torch.randint(-1, 2, p.shape, out=p.data)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0, "weight_decay": 0.5}},
        "gradient_allreduce_op": "sum",
    }
    engine, *_ = initialize(model=copy.deepcopy(plain), config=config)
    return engine, plain, torch.randint(-1, 2, (2, 4)).float()


@stages
@pytest.mark.world_size(1, 3)
def test_every_expert_learns_from_the_ranks_that_chose_it_and_an_unused_one_is_not_updated(stage: int) -> None:
    engine, plain, x = pair(stage)
    rank = dist.get_rank()
    for chosen in ([rank], [2, 1, 0][: rank + 1]):
        with engine.uneven():
            engine(x, chosen).sum().backward()
        plain(x, chosen).sum().backward()
    before, grads = engine.full_params(), engine.full_grads()
    for name, p in plain.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(expected)
        if "experts.3" in name:
            assert name not in grads
        elif name in grads:
            assert torch.equal(grads[name], expected), name
        else:
            assert dist.get_world_size() == 1
            assert p.grad is None
    engine.step()
    for name, p in engine.full_params().items():
        assert torch.equal(p, before[name]) == (name not in grads), name
    assert engine.gathered_bytes() == 0
    engine(x, [3]).sum().backward()  # outside the block all ranks use the same parameters
    assert "experts.3.bias" in engine.full_grads()


@stages
@pytest.mark.world_size(3)
def test_if_one_rank_raises_all_do_and_training_continues(stage: int) -> None:
    engine, _, x = pair(stage)
    with pytest.raises((ZeroDivisionError, UsageError), match=r"by zero|rank 1 raised inside uneven"), engine.uneven():
        choose_or_raise(engine, x)
    engine.zero_grad()
    engine(x, [0]).sum().backward()
    engine.step()


def choose_or_raise(engine: Engine, x: Tensor) -> None:
    out = engine(x, [0])
    if dist.get_rank() == 1:
        raise ZeroDivisionError("division by zero")
    out.sum().backward()


@stages
@pytest.mark.world_size(2)
def test_a_step_or_another_block_inside_is_refused(stage: int) -> None:
    engine, _, x = pair(stage)
    with engine.uneven():
        engine(x, [dist.get_rank()]).sum().backward()
        with pytest.raises(UsageError, match=r"a step was requested inside uneven\(\)"):
            engine.step()
        with pytest.raises(UsageError, match=r"another uneven\(\) was requested"), engine.uneven():
            pass
    engine.step()


class Heads(nn.Module):
    """A model with two heads of equal shape that every rank reads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


class OneHead(Heads):
    """A model of which each forward reads one head."""

    def forward(self, x: Tensor) -> list[Tensor]:
        chosen: Tensor = self.heads[dist.get_rank()](x)
        return [chosen, chosen]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("size", [0, 10**6])
@pytest.mark.parametrize("kind", [Heads, OneHead])
def test_ranks_that_use_different_parameters_of_equal_shape_all_raise(kind: type[Heads], size: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": size, "reduce_bucket_size": size},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine, *_ = initialize(model=kind(), config=config)
    before = engine.full_params()
    for boundary in (engine.step, engine.full_grads):
        engine.backward(engine(torch.ones(2, 4))[dist.get_rank()].sum())
        with pytest.raises(UsageError, match=r"rank 1 used different parameters than rank 0.*engine\.uneven\(\)"):
            boundary()
        engine.zero_grad()
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())
    with engine.uneven():
        engine.backward(engine(torch.ones(2, 4))[dist.get_rank()].sum())
    assert len(engine.full_grads()) == 4


@pytest.mark.world_size(2)
def test_bf16_gradients_from_other_ranks_add_up_in_the_master_dtype() -> None:
    terms = [256.0, *[1.0] * 8]  # in bf16 256 + 1 is 256
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_allreduce_op": "sum",
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine, *_ = initialize(model=OneHead(), config=config)
    for term in terms:
        with engine.uneven():
            engine.backward(engine(torch.full((1, 4), term, dtype=torch.bfloat16))[0].float().sum())
    grads = engine.full_grads()
    for rank in range(2):
        assert torch.equal(grads[f"heads.{rank}.weight"], torch.full((4, 4), sum(terms)))
        assert torch.equal(grads[f"heads.{rank}.bias"], torch.full((4,), float(len(terms))))
