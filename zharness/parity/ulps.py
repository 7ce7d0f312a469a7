"""Compute distances in units in the last place (ULPs), the distance between neighbouring numbers of a dtype."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_DISTANCE = 1 << 20  # larger distances share one class
POWERS = [1 << power for power in range(MAX_DISTANCE.bit_length())]
# Classes of distances: 0, 1, 2, 3-4, 5-8 and so on, each twice as wide as the class before, then all larger distances.
CLASS_LABELS = ["0", "1", "2", *(f"{most // 2 + 1}-{most}" for most in POWERS[2:]), ">2^20"]


def ulp_distances(first_tensor: Tensor, second_tensor: Tensor) -> Tensor:
    """Return the distances in ULPs between two tensors of the same dtype, element by element, as float64.

    Infinity is one ULP away from the largest finite number. The distance between two NaNs is 0, and the distance
    between a NaN and a number is infinite.
    """
    distance = (
        (to_ordered_integers(first_tensor) - to_ordered_integers(second_tensor)).abs()
        if first_tensor.dtype != torch.float64
        else ulp_distances_float64(first_tensor, second_tensor)
    )
    both_or_neither_nan = first_tensor.isnan() == second_tensor.isnan()
    return (
        distance.double()
        .where(both_or_neither_nan, torch.inf)
        .where(~(first_tensor.isnan() & second_tensor.isnan()), 0.0)
    )


def to_ordered_integers(numbers: Tensor) -> Tensor:
    """Map floats to int64 such that neighbouring floats differ by one; integers are only converted to int64."""
    width = INTEGER_DTYPES.get(numbers.dtype.itemsize)
    if width is None or not numbers.is_floating_point():
        return numbers.to(torch.int64)
    bits = numbers.contiguous().view(width).to(torch.int64)
    # IEEE floats are sign and magnitude; reflecting the negative ones makes them order as integers.
    lowest = -(1 << (8 * numbers.dtype.itemsize - 1))
    return torch.where(bits >= 0, bits, lowest - bits)


def ulp_distances_float64(first_tensor: Tensor, second_tensor: Tensor) -> Tensor:
    """Return the distances in ULPs between float64 numbers.

    The distance between numbers of different signs is computed in float64, because it would overflow int64.
    """
    first, second = to_ordered_integers(first_tensor), to_ordered_integers(second_tensor)
    across = (first < 0) != (second < 0)
    return torch.where(across, first.double().abs() + second.double().abs(), (first - second).abs().double())


def count_ulp_classes(oracle: Tensor, actual: Tensor) -> list[int]:
    """Count the elements of ``actual`` in each class of ``CLASS_LABELS`` by their distance in ULPs from ``oracle``.

    ``oracle`` is float64 and is rounded to the dtype of ``actual``. If an element of ``actual`` is not finite although
    the oracle is finite, the element is counted in the last class.
    """
    distance = ulp_distances(oracle.to(actual.dtype), actual).flatten()
    distance = distance.where(actual.flatten().isfinite() | (distance == 0), torch.inf)
    limits = torch.tensor([0, *POWERS], dtype=torch.float64)
    counts: list[int] = torch.bincount(torch.bucketize(distance, limits), minlength=len(CLASS_LABELS)).tolist()
    return counts
