"""Merge nested options of engines, and find options that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from zharness.engines.capabilities import EngineOption

Options = Mapping[str, Any]


def merge_options(base: Options, overrides: Options) -> dict[str, Any]:
    """Return a copy of ``base`` updated with ``overrides``, in which nested sections are merged recursively."""
    deep = {
        key: merge_options(base[key], value)
        for key, value in overrides.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **overrides, **deep}


def find_exclusion(options: Mapping[str, EngineOption]) -> str:
    """Return the reason why some pair of ``options`` cannot be set together, or '' if all of them can."""
    for first, second in combinations(options, 2):
        stated = options[first].excludes.get(second) or options[second].excludes.get(first)
        if stated:
            return f"{first} excludes {second}: {stated}"
        if not are_options_compatible(options[first].options, options[second].options):
            return f"{first} and {second} give different values to one key"
    return ""


def are_options_compatible(first: Options, second: Options) -> bool:
    """Return whether the two sets of options are compatible, which means that no key has different values in them."""
    return all(
        are_options_compatible(first[key], second[key])
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping)
        else first[key] == second[key]
        for key in first.keys() & second.keys()
    )
