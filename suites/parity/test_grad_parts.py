"""The parts of a gradient that a reentrant checkpoint adds, and the bound of adding them in another order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.parity.baseline import LocalResult, run_backward
from zharness.parity.bounds import gamma
from zharness.parity.grad_parts import bound_orders, run_backward_by_parts


class SharedLayer(nn.Module):
    """A model that uses one layer once by itself and ``regions`` times in a reentrant checkpoint."""

    def __init__(self, regions: int) -> None:
        super().__init__()
        self.layer, self.regions = nn.Linear(3, 3), regions

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for _ in range(self.regions):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def compute_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.arange(6.0).reshape(2, 3) / 7).square().mean()
    return loss


@pytest.mark.parametrize("regions", [0, 1, 3])
@pytest.mark.parametrize("loss_scale", [1.0, 16.0])
def test_the_parts_are_those_of_the_caller_s_backward_and_of_each_checkpoint(regions: int, loss_scale: float) -> None:
    torch.manual_seed(0)
    model = SharedLayer(regions)
    result = run_backward_by_parts(model, compute_loss(model), loss_scale)
    model.zero_grad()
    plain = run_backward(model, compute_loss(model), loss_scale)
    assert {name: len(parts) for name, parts in result.parts.items()} == (
        {"layer.weight": regions + 1, "layer.bias": regions + 1} if regions else {}
    )
    for name, grad in plain.grads.items():
        assert torch.equal(result.grads[name], grad)
        if regions:
            assert torch.equal(reduce(torch.add, result.parts[name]), grad), "autograd adds them up in this order"


def test_every_order_is_within_the_bound() -> None:
    parts = [torch.tensor([value]) for value in (1.0, 3e-8, 4e-8, -1.0, 7e-8)]
    whole = LocalResult(torch.zeros(()), {"w": reduce(torch.add, parts)}, {"w": parts})
    orders = {float(reduce(torch.add, order)) for order in itertools.permutations(parts)}
    assert len(orders) > 2
    bound = float(bound_orders("w", [[whole]]))
    assert max(orders) - min(orders) <= bound
    assert bound <= 2.01 * gamma(len(parts), torch.float32) * sum(float(part.abs()) for part in parts)


def test_the_bound_is_that_of_a_mean_over_ranks_and_micro_batches() -> None:
    parts = [torch.tensor([2.0]), torch.tensor([-1.0])]
    whole = LocalResult(torch.zeros(()), {"w": parts[0] + parts[1]}, {"w": parts})
    simple = replace(whole, parts={})
    unused = LocalResult(torch.zeros(()), {})
    assert bound_orders("w", [[simple, simple], [simple, unused]]) == 0
    # Of the four gradients those of rank 0 have parts: 2, 1 and the 1 of the other micro-batch.
    assert float(bound_orders("w", [[whole, simple], [simple, unused]])) == 2 * gamma(3, torch.float32) * 4 / 4
