"""Merge nested options of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]


def merge_options(base: Options, overrides: Options) -> dict[str, Any]:
    """Return a copy of ``base`` updated with ``overrides``, in which nested sections are merged recursively."""
    deep = {
        key: merge_options(base[key], value)
        for key, value in overrides.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **overrides, **deep}
