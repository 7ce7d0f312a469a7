"""Choose few sets of engine options such that every pair of compatible engine variants occurs in some set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from zharness.engines.options import Options, are_options_compatible, merge_options


def build_pairwise_rows(variants: Mapping[str, Options]) -> Iterator[dict[str, Any]]:
    """Yield sets of engine options such that every variant and every pair of compatible variants occurs in some set.

    The search is greedy: it starts a set with a pair that has not occurred yet, and then repeatedly adds the compatible
    variant with which the set contains the most such pairs. A smaller number of sets may exist that covers all pairs.
    """
    missing = [{name} for name in variants]
    missing += [
        {first, second}
        for first, second in combinations(variants, 2)
        if are_options_compatible(variants[first], variants[second])
    ]
    while missing:
        row = set(missing[-1])
        while more := [name for name in variants if name not in row and is_compatible_with_row(name, row, variants)]:
            row.add(max(more, key=lambda name: sum(pair <= row | {name} for pair in missing)))
        missing = [pair for pair in missing if not pair <= row]
        options: dict[str, Any] = {}
        for name in variants:
            if name in row:
                options = merge_options(options, variants[name])
        yield options


def is_compatible_with_row(name: str, row: set[str], variants: Mapping[str, Options]) -> bool:
    """Return whether the variant ``name`` is compatible with every variant in ``row``."""
    return all(are_options_compatible(variants[name], variants[other]) for other in row)
