"""Compute error bounds that follow from floating-point arithmetic, so that nobody has to choose a tolerance by hand.

Rounding model: the computed result of an operation is the exact result times (1 + d) with |d| <= u, plus an error of at
most one subnormal step. Here u = eps / 2 is the unit roundoff of the dtype (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff u = eps / 2 of ``dtype``."""
    return torch.finfo(dtype).eps / 2


def replay_roundoff(dtype: torch.dtype) -> float:
    """Return the relative distance that one rounding may put between a result in ``dtype`` and its float64 replay.

    A replay of a float64 result rounds as well, so the distance is twice the unit roundoff. For narrower dtypes the
    replay's own rounding is neglected.
    """
    return 2 * unit_roundoff(dtype) if dtype is torch.float64 else unit_roundoff(dtype)


def subnormal(dtype: torch.dtype) -> float:
    """Return the distance between neighbouring subnormal numbers of ``dtype``: the largest error of an underflow."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def gamma(terms: int, dtype: torch.dtype) -> float:
    """Return (n+1)u / (1 - (n+1)u), the relative error bound of a scaled sum of n = ``terms`` terms in any order.

    The bound follows from Higham, lemma 3.1 and section 4.2; u is ``replay_roundoff``. Raises ValueError if
    (n+1)u >= 1, because then no such bound exists.
    """
    nu = (terms + 1) * replay_roundoff(dtype)
    if nu >= 1:
        raise ValueError(f"a sum of {terms} terms in {dtype} has no rounding bound: (n+1)u = {nu:g} is not below 1")
    return nu / (1 - nu)


def gamma_or_probabilistic(terms: int, dtype: torch.dtype) -> float:
    """Return ``gamma(terms, dtype)`` if (n+1)u < 1/2 for n = ``terms``, else a probabilistic bound on the same error.

    The probabilistic bound is nu / (1 - nu) with nu = 8 sqrt(n+1) u. The bound assumes independent rounding errors of
    mean zero. Under this assumption the bound fails with a probability below 2 n exp(-8^2 / 2), which is 1e-5 for 4e8
    terms (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019,
    theorem 2.4).
    """
    if (terms + 1) * unit_roundoff(dtype) < 1 / 2:
        return gamma(terms, dtype)
    nu = 8 * math.sqrt(terms + 1) * unit_roundoff(dtype)
    return nu / (1 - nu)


def float64_mean(terms: list[Tensor]) -> Tensor:
    """Return the float64 mean of ``terms``, which all have the same shape."""
    return torch.stack([term.double() for term in terms]).mean(0)


def means_in_torch_orders(
    terms: Sequence[Sequence[Tensor]], scale: float, reduce_dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield ``scale`` times the mean of ``terms[rank][micro-step]`` in every order in which torch may compute it.

    The orders differ in whether micro-batches are summed before or after ranks, and in whether the division comes
    before or after the sum over ranks. Sums over ranks are computed in ``reduce_dtype``.
    """
    ranks, micros = len(terms), len(terms[0])
    divisor = micros / scale
    sums = [reduce(torch.add, row) for row in terms]
    yield reduce(torch.add, [each.to(reduce_dtype) for each in sums]) / ranks / divisor
    if divisor != 1:
        yield reduce(torch.add, [(each / divisor).to(reduce_dtype) for each in sums]) / ranks
    if micros > 1:
        means = [
            reduce(torch.add, [each.to(reduce_dtype) for each in column]) / ranks for column in zip(*terms, strict=True)
        ]
        yield reduce(torch.add, means) / divisor


def mean_and_bound(
    terms: list[Tensor], dtype: torch.dtype, result_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the float64 mean of ``terms`` (all of one shape) and a bound on the error of a mean computed in ``dtype``.

    In any order of summation, |error| <= gamma(n) * mean|terms|, plus one subnormal step for each operation. The n + 1
    roundings are the conversion of the terms to ``dtype``, n - 1 additions and the division. If the result is stored in
    a ``result_dtype`` narrower than ``dtype``, one more rounding is added.
    """
    stack = torch.stack([term.double() for term in terms])
    bound = gamma(len(terms), dtype) * stack.abs().mean(0) + (len(terms) + 1) * subnormal(dtype)
    mean = stack.mean(0)
    if result_dtype is not None and unit_roundoff(result_dtype) > unit_roundoff(dtype):
        bound = bound + unit_roundoff(result_dtype) * (mean.abs() + bound) + subnormal(result_dtype)
    return mean, bound


def upper_mean_bound(terms: Sequence[Tensor], scale: float, dtype: torch.dtype, mean: Tensor) -> Tensor:
    """Return an upper limit, faster to compute than ``mean_and_bound``, of the error bound of a scaled mean.

    The scaled mean is ``mean``, computed from ``scale`` times each of ``terms``. The limit is in float32. Use this
    function only for numbers that are known to be right, for which the size of the bound is merely reported. The factor
    1.001 covers the rounding of this computation itself.
    """
    count = len(terms)
    total = reduce(torch.add, [term.float().abs() for term in terms])
    bound = 1.001 * (gamma(count, dtype) * scale / count * total + (count + 1) * subnormal(dtype))
    if unit_roundoff(mean.dtype) > unit_roundoff(dtype):
        bound = bound + 1.001 * (unit_roundoff(mean.dtype) * (mean.float().abs() + 2 * bound) + subnormal(mean.dtype))
    return bound


@dataclass(frozen=True)
class BoundedTensor:
    """A float64 value together with an upper bound on the error of the same value computed in ``dtype``.

    ``error`` has the shape of ``value``. Every operation propagates the errors of its operands and adds its own
    rounding (running error analysis, Higham 3.3). The rounding of the float64 value itself counts for a ``dtype`` of
    float64 alone (``replay_roundoff``), because it is 2**-29 of the rounding of float32.
    """

    value: Tensor
    error: Tensor
    dtype: torch.dtype

    @classmethod
    def exact(cls, value: Tensor) -> BoundedTensor:
        """Return a BoundedTensor with the numbers of ``value`` and an error of zero."""
        return cls(value.double(), torch.zeros_like(value, dtype=torch.float64), value.dtype)

    def scalar(self, number: float, roundings: int = 1) -> BoundedTensor:
        """Return ``number`` as a scalar with the error bound of ``roundings`` roundings to ``dtype``."""
        value = torch.tensor(number, dtype=torch.float64)
        return BoundedTensor(value, value.abs() * gamma(roundings - 1, self.dtype), self.dtype)

    def zero(self) -> BoundedTensor:
        """Return zeros of the same shape and dtype, with an error of zero."""
        return BoundedTensor(torch.zeros_like(self.value), torch.zeros_like(self.error), self.dtype)

    def scalar_one(self) -> BoundedTensor:
        """Return a scalar 1 of the same dtype, with an error of zero."""
        return BoundedTensor(torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), self.dtype)

    def maximum(self, other: BoundedTensor) -> BoundedTensor:
        """Return the elementwise maximum, whose error is the larger of the two errors, since nothing is rounded."""
        return BoundedTensor(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error), self.dtype)

    def clamp(self, lower: float, upper: float) -> BoundedTensor:
        """Return the value clamped to [``lower``, ``upper``]; clamped elements also get the limits' rounding error."""
        limits = torch.tensor([lower, upper], dtype=torch.float64).abs().max() * unit_roundoff(self.dtype)
        inside = (self.value > lower) & (self.value < upper)
        return BoundedTensor(self.value.clamp(lower, upper), self.error + limits.where(~inside, 0.0), self.dtype)

    def sign(self) -> BoundedTensor:
        """Return the sign (-1, 0 or 1); its error is 2 for elements whose own error allows the opposite sign."""
        unknown = (self.error > 0) & (self.value.abs() <= self.error)
        return BoundedTensor(self.value.sign(), 2.0 * unknown, self.dtype)

    def times_sign(self, other: BoundedTensor) -> BoundedTensor:
        """Return the product of two signs, whose error is the larger of the two errors, since nothing is rounded."""
        return BoundedTensor(self.value * other.value, torch.maximum(self.error, other.error), self.dtype)

    def __abs__(self) -> BoundedTensor:
        return BoundedTensor(self.value.abs(), self.error, self.dtype)

    def __neg__(self) -> BoundedTensor:
        return BoundedTensor(-self.value, self.error, self.dtype)

    def __add__(self, other: BoundedTensor) -> BoundedTensor:
        return self._with_rounding(self.value + other.value, self.error + other.error)

    def __sub__(self, other: BoundedTensor) -> BoundedTensor:
        return self._with_rounding(self.value - other.value, self.error + other.error)

    def __mul__(self, other: BoundedTensor) -> BoundedTensor:
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return self._with_rounding(self.value * other.value, carried)

    def __truediv__(self, other: BoundedTensor) -> BoundedTensor:
        """Return the quotient, with an infinite error for elements where the error of ``other`` is at least |other|."""
        value = self.value / other.value
        room = (other.value.abs() - other.error).clamp(min=0)
        return self._with_rounding(value, (self.error + value.abs() * other.error) / room)

    def sqrt(self) -> BoundedTensor:
        """Return the square root; the error e of a value a becomes at most e / sqrt(a), or sqrt(e) if a < e."""
        value = self.value.sqrt()
        return self._with_rounding(value, torch.minimum(self.error / value, self.error.sqrt()).nan_to_num(nan=0.0))

    def _with_rounding(self, value: Tensor, carried_error: Tensor) -> BoundedTensor:
        """Return ``value`` with the error ``carried_error`` of the operands, plus one rounding to ``dtype``."""
        error = carried_error + replay_roundoff(self.dtype) * (value.abs() + carried_error) + subnormal(self.dtype)
        return BoundedTensor(value, error, self.dtype)
