"""Take a step of Muon on a whole matrix: as torch.optim.Muon does, and as DeepSpeed does.

Newton-Schulz runs in bf16, where any bound that holds for all matrices is larger than the update. So these functions
are for matrices of which each row and column has at most one element that is not zero. No product of them has a sum of
several terms, so that the order of sums does not matter, and each element x becomes ax + bx^3 + cx^5. What remains is
the norm: an engine that computes it from shards rounds once more, within the bound of ``bound_step``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zharness.parity.bounds import unit_roundoff

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7

MOMENTUM = "momentum_buffer"  # the key of the optimizer state, in torch and in DeepSpeed


@dataclass(frozen=True)
class MuonUpdate:
    """A weight and its momentum after a step."""

    weight: Tensor
    momentum: Tensor


MuonStep = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], MuonUpdate]


def step_like_torch(weight: Tensor, grad: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> MuonUpdate:
    """Take the step of torch.optim.Muon, which adds the momentum and scales the learning rate of a tall matrix."""
    leaf = weight.detach().clone()
    leaf.grad = grad.clone()
    optimizer: torch.optim.Optimizer = torch.optim.Muon([leaf], **options)
    optimizer.state[leaf] = {MOMENTUM: momentum.clone()}
    optimizer.step()
    return MuonUpdate(leaf, optimizer.state[leaf][MOMENTUM])


def step_like_deepspeed(weight: Tensor, grad: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> MuonUpdate:
    """Take the step of DeepSpeed's Muon with ``ns_method: standard``: a tall matrix's update is scaled in bf16."""
    rate, beta = options["lr"], options["momentum"]
    new_momentum = momentum.lerp(grad, 1 - beta)
    update = orthogonalize(grad.lerp(new_momentum, beta))
    rows, columns = weight.shape
    update *= math.sqrt(rows / columns) if rows > columns else 1.0
    decayed = weight * (1 - rate * options["weight_decay"])
    return MuonUpdate(decayed.add(update.to(weight.dtype), alpha=-rate), new_momentum)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the Newton-Schulz iteration of ``matrix`` in bf16, every operation rounded on its own."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    power: Tensor = matrix.to(torch.bfloat16)
    power = power.mT if is_tall else power
    power = power / (power.norm(dim=(-2, -1), keepdim=True) + EPS)
    for _ in range(ITERATIONS):
        gram = power @ power.mT
        power = a * power + (b * gram + c * gram @ gram) @ power
    return power.mT if is_tall else power


def bound_step(weight: Tensor, update: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weight after torch.optim.Muon's step in float64, and a bound on its error.

    ``update`` is the momentum that is orthogonalized. Its norm may be that of the norms of shards, in bf16.
    """
    rate = options["lr"]
    rows, columns = weight.shape
    adjusted_rate = rate * math.sqrt(max(1, rows / columns))
    value, error = bound_orthogonalized(update.double())
    decayed = weight.double() * (1 - rate * options["weight_decay"])
    expected = decayed - adjusted_rate * value
    rounding = unit_roundoff(weight.dtype) * 2 * (decayed.abs() + adjusted_rate * value.abs())
    return expected, adjusted_rate * error + rounding


def bound_orthogonalized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Newton-Schulz iteration of ``matrix`` in float64, and a bound on its error in bf16."""
    _, b, c = COEFFICIENTS
    unit = unit_roundoff(torch.bfloat16) * (1 + 2**-6)  # with the terms of higher order, and products in fp32
    value = matrix / matrix.norm()
    # The matrix, its norms of shards, their norm and the quotient are rounded; the norm of a rounded matrix is as well.
    error = 5 * unit * value.abs()
    for _ in range(ITERATIONS):
        carried = largest_change(value, error)
        size = value.abs() + error
        gram = size.square()
        rounding = unit * (c * 2 * gram.square() - b * gram + largest_factor(gram)) * size
        value = polynomial(value)
        error = carried + rounding
        error = error + unit * (value.abs() + error)
    return value, error


def polynomial(value: Tensor) -> Tensor:
    """Return ax + bx^3 + cx^5 of each element x."""
    a, b, c = COEFFICIENTS
    return a * value + b * value**3 + c * value**5


def largest_change(value: Tensor, error: Tensor) -> Tensor:
    """Return how far ``polynomial`` may be from that of ``value``, at distances up to ``error`` from ``value``."""
    a, b, c = COEFFICIENTS
    right, (least, greatest) = polynomial(value), (value - error, value + error)
    change = torch.maximum((polynomial(least) - right).abs(), (polynomial(greatest) - right).abs())
    for root in (-1, 1):
        turn = math.sqrt((-3 * b + root * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        for at in (turn, -turn):
            there = (polynomial(torch.full_like(value, at)) - right).abs()
            change = torch.where((least < at) & (at < greatest), change.maximum(there), change)
    return change


def largest_factor(gram: Tensor) -> Tensor:
    """Return the largest absolute value of by + cy^2, by which a matrix is multiplied, for y from 0 to ``gram``."""
    _, b, c = COEFFICIENTS
    end, turn = (b * gram + c * gram.square()).abs(), -b / (2 * c)
    return torch.where(gram > turn, end.clamp(min=abs(b * turn / 2)), end)


# The two definitions round differently.
MUON_STEPS: Mapping[str, MuonStep] = {"torch.optim": step_like_torch, "DeepSpeed": step_like_deepspeed}
