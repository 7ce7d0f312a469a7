"""Take a step of Muon on a whole matrix: as torch.optim.Muon does, and as DeepSpeed does.

Newton-Schulz runs in bf16, where any bound that holds for all matrices is larger than the update. So these functions
take special matrices only. The vectors of a matrix (its columns, or its rows if it has more columns) are orthogonal,
and the elements of one vector are 0 or of one size. Then a sum of a product rounds nothing in any order, or all of its
terms are equal. So an iteration replaces the length x of each vector by ax + bx^3 + cx^5. An engine that computes from
shards rounds two more things: the norm, and the products of vectors that ranks share. ``bound_step`` bounds these
errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zharness.parity.bounds import unit_roundoff

A, B, C = 3.4445, -4.7750, 2.0315  # the coefficients of Newton-Schulz
ITERATIONS = 5
EPS = 1e-7
UNIT = unit_roundoff(torch.bfloat16) * (1 + 2**-6)  # with the terms of higher order, and products in fp32

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
    is_tall = matrix.size(0) > matrix.size(1)
    power: Tensor = matrix.to(torch.bfloat16)
    power = power.mT if is_tall else power
    power = power / (power.norm(dim=(-2, -1), keepdim=True) + EPS)
    for _ in range(ITERATIONS):
        gram = power @ power.mT
        power = A * power + (B * gram + C * gram @ gram) @ power
    return power.mT if is_tall else power


def bound_step(weight: Tensor, update: Tensor, options: Mapping[str, Any], ranks: int) -> tuple[Tensor, Tensor]:
    """Return the weight after torch.optim.Muon's step in float64, and a bound on its error.

    ``update`` is the momentum that is orthogonalized. Its norm, and its products, may be sums over the shards of
    ``ranks`` ranks, in bf16.
    """
    rate = options["lr"]
    rows, columns = weight.shape
    adjusted_rate = rate * math.sqrt(max(1, rows / columns))
    value, error = bound_orthogonalized(update.double(), ranks)
    decayed = weight.double() * (1 - rate * options["weight_decay"])
    expected = decayed - adjusted_rate * value
    rounding = unit_roundoff(weight.dtype) * 2 * (decayed.abs() + adjusted_rate * value.abs())
    return expected, adjusted_rate * error + rounding


def bound_orthogonalized(matrix: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the Newton-Schulz iteration of ``matrix`` in float64, and a bound on its error in bf16.

    Each vector of ``matrix`` along its longer side is orthogonal to the others, and the elements of a vector that are
    not zero have one size. So each iteration replaces the length of a vector by ``polynomial`` of this length.
    """
    terms = torch.count_nonzero(matrix, dim=0 if matrix.size(0) > matrix.size(1) else 1)
    terms = (terms.unsqueeze(0) if matrix.size(0) > matrix.size(1) else terms.unsqueeze(1)).double()
    length = (matrix / matrix.norm()).abs() * terms.sqrt()
    interval = Interval(length, length)
    # The matrix and the quotient are rounded. The norm has several roundings: the norm of the rounded matrix on each
    # rank, its square, the sum of the squares over ranks, and the root of the sum. The root halves the errors before
    # it.
    interval = interval.widen((3 + 1 + (3 + ranks - 1) / 2) * UNIT * length)
    # A product of two vectors is rounded on each rank. The terms are equal, so the sum of two ranks' products is exact.
    roundings = torch.where(terms > 1, 1.0 + max(0, ranks - 2), 1.0)
    for _ in range(ITERATIONS):
        size = interval.size
        gram = size.square()
        gram_rounding = roundings * (2 * C * gram.square() - B * gram)
        interval = interval.map_polynomial().widen(UNIT * (gram_rounding + largest_factor(gram)) * size)
        interval = interval.widen(UNIT * interval.size)
        length = polynomial(length)
    error = torch.maximum(interval.upper - length, length - interval.lower)
    scale = matrix.sign() / terms.sqrt().clamp(min=1)
    return length * scale, error * scale.abs()


@dataclass(frozen=True)
class Interval:
    """The numbers between two tensors, element by element."""

    lower: Tensor
    upper: Tensor

    @property
    def size(self) -> Tensor:
        """The largest absolute value."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    def widen(self, distance: Tensor) -> Interval:
        """Return the interval of all numbers that are within ``distance`` of a number of this interval."""
        return Interval(self.lower - distance, self.upper + distance)

    def map_polynomial(self) -> Interval:
        """Return the range of ``polynomial`` on this interval, from its values at both ends and at turns between."""
        ends = polynomial(self.lower), polynomial(self.upper)
        lower, upper = torch.minimum(*ends), torch.maximum(*ends)
        for root in (-1, 1):
            turn = math.sqrt((-3 * B + root * math.sqrt(9 * B * B - 20 * A * C)) / (10 * C))
            for at in (turn, -turn):
                there = polynomial(torch.full_like(lower, at))
                inside = (self.lower < at) & (at < self.upper)
                lower, upper = (
                    torch.where(inside, lower.minimum(there), lower),
                    torch.where(inside, upper.maximum(there), upper),
                )
        return Interval(lower, upper)


def polynomial(value: Tensor) -> Tensor:
    """Return ax + bx^3 + cx^5 of each element x."""
    return A * value + B * value**3 + C * value**5


def largest_factor(gram: Tensor) -> Tensor:
    """Return the largest absolute value of by + cy^2, by which a matrix is multiplied, for y from 0 to ``gram``."""
    end, turn = (B * gram + C * gram.square()).abs(), -B / (2 * C)
    return torch.where(gram > turn, end.clamp(min=abs(B * turn / 2)), end)


# The two definitions round differently.
MUON_STEPS: Mapping[str, MuonStep] = {"torch.optim": step_like_torch, "DeepSpeed": step_like_deepspeed}
