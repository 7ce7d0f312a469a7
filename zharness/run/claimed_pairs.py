"""Find the pairs that an engine claims and that no cell can have, and say why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from itertools import combinations, product

from zharness.engines.options import find_exclusion
from zharness.run.covering import Pair, pair_kind
from zharness.run.covering_axes import Axes, CoveredLaw, Value

NO_LAW = "no law that the engine supports is stated for both"


def describe_uncoverable_pairs(
    axes: Axes, laws: Sequence[CoveredLaw], coverable: Set[Pair], with_values: bool
) -> list[str]:
    """Return a sentence for each reason why claimed pairs are not in ``coverable``, the most frequent first.

    A pair is a law and a value that the engine claims at some stage; with ``with_values`` also two such values. A law
    has no pairs if it needs a feature that the engine refuses at all stages.
    """
    reasons = Counter[tuple[str, str]]()
    for law in laws:
        if any(frozenset((law.name, ("stage", stage))) in coverable for stage in axes.claims_at):
            for value in axes.values:
                pair = frozenset((law.name, value))
                if pair not in coverable:
                    reasons[pair_kind(pair), explain_law_pair(axes, law, value)] += 1
    for first, second in combinations(axes.values, 2) if with_values else ():
        if (first[0] != second[0] or first[0] == "option") and frozenset((first, second)) not in coverable:
            pair = frozenset((first, second))
            reasons[" x ".join(sorted((first[0], second[0]))), explain_value_pair(axes, first, second)] += 1
    return [f"not coverable: {count} {kind}: {reason}" for (kind, reason), count in reasons.most_common()]


def explain_law_pair(axes: Axes, law: CoveredLaw, value: Value) -> str:
    """Return the reason why no cell of ``law`` has ``value``; try one cell at each stage, with defaults elsewhere."""
    axis, chosen = value
    reasons = [
        axes.find_refusal(law.law, axes.place_values(law, stage, [value]))
        for stage in axes.claims_at
        if (axis != "stage" or stage == chosen) and (axis != "option" or chosen in axes.claims_at[stage].engine_options)
    ]
    # With the law's name in it, each law would have a different reason, and the reasons could not be counted.
    return next(filter(None, reversed(reasons)), "in no cell of the array").replace(law.law.name, "the law")


def explain_value_pair(axes: Axes, first: Value, second: Value) -> str:
    """Return why no cell has the two values."""
    names, fixed = [str(name) for axis, name in (first, second) if axis == "option"], dict((first, second))
    exclusions = []
    for stage, size, dtype in product(axes.claims_at, axes.world_sizes, axes.dtypes):
        place = {"stage": stage, "world size": size, "dtype": dtype}
        if any(fixed.get(axis, value) != value for axis, value in place.items()):
            continue
        if axes.are_compatible(stage, names, size, dtype):
            return NO_LAW
        known = axes.claims_at[stage].engine_options
        exclusions.append(find_exclusion({name: known[name] for name in names if name in known}))
    return "the options exclude each other" if any(exclusions) else "no stage, world size and dtype have both"
