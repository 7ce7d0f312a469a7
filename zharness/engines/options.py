"""Merge and search nested options of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def iter_keys(options: Options, prefix: str = "") -> Iterator[str]:
    """Yield the key of every entry of ``options``; the key of a section's entry is ``section.entry``."""
    for key, value in options.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from iter_keys(value, f"{prefix}{key}.")


def find_reason(options: Options, reasons: Mapping[str, str]) -> str:
    """Return the reason for the first key of ``options`` that ``reasons`` has, or an empty string."""
    return next((reasons[key] for key in iter_keys(options) if key in reasons), "")
