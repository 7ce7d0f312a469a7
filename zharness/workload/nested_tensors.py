"""Find and replace the tensors in nested mappings, tuples and lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(nested: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of ``nested`` in which every tensor is replaced by ``function(tensor)``.

    ``nested`` may contain mappings, tuples, lists and dataclasses; values that are not tensors are kept.
    """
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        return {key: map_tensors(value, function) for key, value in nested.items()}
    if isinstance(nested, (tuple, list)):
        parts = [map_tensors(value, function) for value in nested]
        return type(nested)(*parts) if hasattr(nested, "_fields") else type(nested)(parts)
    if is_dataclass(nested) and not isinstance(nested, type):
        return replace(
            nested, **{each.name: map_tensors(getattr(nested, each.name), function) for each in fields(nested)}
        )
    return nested


def collect_tensors(nested: Any) -> list[Tensor]:
    """Return a list of all tensors in the mappings, tuples and lists of ``nested``, in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(nested, collect)
    return found
