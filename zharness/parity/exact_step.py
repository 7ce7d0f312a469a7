"""Decide whether a step of SGD rounds nothing, in any order of its operations.

All inputs are multiples of a power of two, the grid, as in exact models. If the learning rate, the momentum and the
other factors are powers of two as well, every product and sum is a multiple of a finer grid. A number of a
floating-point type with p bits is exact if it is such a multiple, below 2^p times the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zharness.parity.replay import optimizer_defaults

MANTISSA_BITS = 53  # of float64, in which the grid is found
USES = 2  # a factor is applied at most twice to a number: momentum to the old buffer, and to the new one by Nesterov


def is_exact_step(
    optimizer: str, weight: Tensor, grad: Tensor, momentum: Tensor | None, hyperparameters: Mapping[str, Any]
) -> bool:
    """Return whether a step of ``optimizer`` from these numbers rounds nothing in the weight's dtype.

    ``momentum`` is the momentum buffer before the step, or None. Returns False for every optimizer except SGD.
    """
    if optimizer != "sgd":
        return False
    options = {**optimizer_defaults(optimizer), **hyperparameters}
    factors = [float(options[key]) for key in ("lr", "momentum", "weight_decay")] + [1 - float(options["dampening"])]
    nonzero = [abs(factor) for factor in factors if factor]  # 1 - dampening may be negative
    inputs = [weight, grad] if momentum is None else [weight, grad, momentum]
    grid = find_grid(inputs)
    if not math.isfinite(grid) or any(math.frexp(factor)[0] != 0.5 for factor in nonzero):
        return False
    info = torch.finfo(weight.dtype)
    finest = grid + sum(USES * min(0.0, math.log2(factor)) for factor in nonzero)
    largest = sum(float(tensor.abs().max()) for tensor in inputs if tensor.numel())
    bound = largest * math.prod((1 + factor) ** USES for factor in nonzero)
    bits = 1 - math.log2(info.eps)
    return finest >= math.log2(info.smallest_normal) and bound <= 2.0 ** (finest + bits)


def find_grid(tensors: Sequence[Tensor]) -> float:
    """Return the exponent of the largest power of two, at most 1, that divides every element.

    It is NaN if an element is not finite.
    """
    exponents = [0.0]
    for tensor in tensors:
        numbers = tensor.detach().double().flatten()
        if not bool(numbers.isfinite().all()):
            return math.nan
        numbers = numbers[numbers != 0]
        mantissas, powers = torch.frexp(numbers)
        whole = (mantissas * 2.0**MANTISSA_BITS).long()
        lowest = torch.frexp((whole & -whole).double()).exponent - 1
        exponents.extend((powers - MANTISSA_BITS + lowest).double().min().reshape(-1).tolist() if len(numbers) else [])
    return min(exponents)
