"""Gradients with respect to sharded weights: differentiated twice, and batched."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import vmap

from zharness.reference import Engine, initialize

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "gradient_allreduce_op": "sum",
}


def everyones(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def exact_pair(reduction: str = "sum", accumulation_steps: int = 1) -> tuple[Engine, nn.Module, Tensor]:
    """Make an engine and its plain model with weights and inputs of -1, 0 and 1, so that all sums are exact."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for p in plain.parameters():
        torch.randint(-1, 2, p.shape, out=p.data)
    options = {"gradient_allreduce_op": reduction, "gradient_accumulation_steps": accumulation_steps}
    engine, *_ = initialize(model=copy.deepcopy(plain), config={**CONFIG, **options})
    torch.manual_seed(1 + dist.get_rank())
    return engine, plain, torch.randint(-1, 2, (3, 4)).float()


def penalty_on_weights(reduction: str = "sum", divisor: int = 1) -> None:
    """Compare the gradient of a penalty on the weights' gradient with the plain model's on the global batch."""
    engine, plain, x = exact_pair(reduction)
    for model, batch in ((plain, everyones(x)), (engine.module, x)):
        loss = model(batch).pow(2).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        torch.stack([g.pow(2).sum() for g in grads]).sum().backward()
    del loss, grads
    for name, grad in engine.full_grads().items():
        assert torch.equal(grad, plain.get_parameter(name).grad / divisor), name
    assert engine.gathered_bytes() == 0


@pytest.mark.world_size(1, 2, 3)
def test_a_gradient_penalty_uses_the_reduced_gradient() -> None:
    penalty_on_weights()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("steps", [1, 4])
def test_autograd_grad_and_backward_divide_a_weight_gradient_alike(steps: int) -> None:
    engine, plain, x = exact_pair("mean", accumulation_steps=steps)
    shards = list(engine.module.parameters())
    grads = torch.autograd.grad(engine(x).sum(), shards)
    wanted = torch.autograd.grad(plain(everyones(x)).sum(), list(plain.parameters()))
    engine.backward(engine(x).sum())
    for shard, grad, whole in zip(shards, grads, wanted, strict=True):
        assert torch.equal(grad, shard.grad)
        mean = whole.flatten() / (dist.get_world_size() * steps)
        assert torch.equal(everyones(grad.flatten())[: whole.numel()], mean)


@pytest.mark.world_size(2)
def test_every_reduction_of_a_gradient_penalty_divides_by_the_world_size() -> None:
    # The penalty is quadratic in a mean; its gradient is a mean over ranks too, each with the penalty of its shard.
    penalty_on_weights("mean", divisor=2**3)


def batched_weight_gradients() -> None:
    engine, _, x = exact_pair()
    shards = list(engine.module.parameters())
    out = engine(x).sum(1)
    batched = vmap(lambda v: torch.autograd.grad(out, shards, v, retain_graph=True))(torch.eye(3))
    legacy = torch.autograd.grad(out, shards, torch.eye(3), retain_graph=True, is_grads_batched=True)
    for row in range(3):
        alone = torch.autograd.grad(out, shards, torch.eye(3)[row], retain_graph=True)
        assert all(torch.equal(many[row], one) for one, many in zip(alone, batched, strict=True))
        assert all(torch.equal(many[row], one) for one, many in zip(alone, legacy, strict=True))


@pytest.mark.world_size(2)
def test_batched_gradients_of_the_weights_are_reduced_row_by_row() -> None:
    batched_weight_gradients()
