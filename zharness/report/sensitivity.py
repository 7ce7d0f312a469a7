"""Render the sensitivity of the comparisons: how close errors came to their bounds, and which errors they find."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from zharness.run.outcomes import count_cells, group_records
from zharness.run.record import Record, Verdict

# The explanation of each tier in the paragraphs; the explanation with the empty name applies to all tiers.
TERMS = {
    "X": "tier X: all sums are exact in this dtype, so engine and plain PyTorch have to be equal bit for bit",
    "S": "tier S: each part of the step is compared within its bound, the largest error that rounding can cause",
    "C": "tier C: the engine has kernels of its own; the bound follows from errors of plain PyTorch's kernels",
    "": "a scale error is a tensor that is wrong by a constant factor: 1e-2 means 1 %",
}
COMPARED_VERDICTS = (Verdict.PASS, Verdict.CONTRACT, Verdict.UNDETERMINED)


def render_sensitivity(records: Iterable[Record]) -> str:
    """Render a paragraph for each engine whose cells were compared, and a line for each note with its cell count."""
    compared = [record for record in records if record.verdict in COMPARED_VERDICTS and record.tier is not None]
    engines = group_records(compared, lambda record: (record.cell.engine, record.engine_version))
    notes = Counter(note for record in compared for note in record.notes)
    lines = [f"{name} {version}: {describe_sensitivity(rows)}" for (name, version), rows in engines.items()]
    tiers = {record.tier for record in compared}
    lines.extend(f"  {text}" for name, text in TERMS.items() if tiers and (not name or name in tiers))
    return "\n".join([*lines, *(f"NOTE {count_cells(count)}: {note}" for note, count in notes.items())])


def describe_sensitivity(records: Sequence[Record]) -> str:
    """Describe the tiers of these records, and the cells that are the least sensitive to errors."""
    tiers = [record.tier for record in records]
    used = [tier for tier in ("X", "S", "C") if tier in tiers]
    tier_counts = ", ".join(f"{count_cells(tiers.count(tier))} by tier {tier}" for tier in used)
    bluntest = max(records, key=smallest_scale_error)
    most_lost = max(records, key=lambda record: record.wrong_elements or 0)
    undetermined = sum(record.undetermined or 0 for record in records)
    elements = sum(record.elements or 0 for record in records)
    return (
        f"{tier_counts}; the largest error is {max(record.ratio or 0.0 for record in records):.2g} of its bound\n"
        f"  every cell would find, in any tensor, a scale error of {smallest_scale_error(bluntest):.1e} (the least "
        f"sensitive: {bluntest.cell.id}) and "
        f"{most_lost.wrong_elements} lost element{'' if most_lost.wrong_elements == 1 else 's'} "
        f"(the least sensitive: {most_lost.cell.id}); "
        f"{undetermined} of {elements} elements are undetermined, that is smaller than their bound"
    )


def smallest_scale_error(record: Record) -> float:
    """Return the smallest scale error that the cell would have found.

    Returns 0 if the cell compares numbers that cannot be scaled, such as counts.
    """
    error = record.smallest_scale_error
    return 0.0 if error is None or math.isinf(error) else error
