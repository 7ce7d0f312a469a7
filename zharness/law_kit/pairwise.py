"""Choose few sets of engine options such that every pair of compatible engine variants occurs in some set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Any

from zharness.engines.options import Options, are_options_compatible, merge_options


def build_pairwise_rows(
    variants: Mapping[str, Options], exclusions: Collection[frozenset[str]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield sets of engine options such that every variant and every pair of compatible variants occurs in some set.

    Two variants are compatible if no key has different values in them, and ``exclusions`` does not name them both. The
    search is greedy: it starts a set with a pair that has not occurred yet, and then repeatedly adds the compatible
    variant with which the set contains the most such pairs. Fewer sets than the search finds may cover all pairs.
    """
    compatible = {
        frozenset(pair)
        for pair in combinations(variants, 2)
        if frozenset(pair) not in exclusions and are_options_compatible(variants[pair[0]], variants[pair[1]])
    }
    missing = [frozenset({name}) for name in variants]
    missing += [frozenset(pair) for pair in combinations(variants, 2) if frozenset(pair) in compatible]
    while missing:
        row = set(missing[-1])
        while more := [
            name
            for name in variants
            if name not in row and all(frozenset((name, other)) in compatible for other in row)
        ]:
            row.add(max(more, key=lambda name: sum(pair <= row | {name} for pair in missing)))
        missing = [pair for pair in missing if not pair <= row]
        options: dict[str, Any] = {}
        for name in variants:
            if name in row:
                options = merge_options(options, variants[name])
        yield options
