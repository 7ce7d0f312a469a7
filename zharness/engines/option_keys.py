"""Search nested options of engines by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def iter_keys(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the key of every entry of ``options``; the key of a section's entry is ``section.entry``."""
    for key, value in options.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from iter_keys(value, f"{prefix}{key}.")


def find_reason(options: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the reason for the first key of ``options`` that ``reasons`` has, or an empty string."""
    return next((reasons[key] for key in iter_keys(options) if key in reasons), "")
