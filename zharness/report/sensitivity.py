"""What the passes are worth: how close errors came to their bounds, and which smaller ones would have been caught."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zharness.run.record import Record, Verdict

COMPARED_VERDICTS = (Verdict.PASS, Verdict.CONTRACT, Verdict.UNDETERMINED)


def render_sensitivity(records: Iterable[Record]) -> str:
    """A paragraph for each engine whose cells were compared, and a line for each note, with how many cells carry it."""
    compared = [record for record in records if record.verdict in COMPARED_VERDICTS and record.tier is not None]
    engines: dict[tuple[str, str], list[Record]] = {}
    notes: dict[str, int] = {}
    for record in compared:
        engines.setdefault((record.cell.engine, record.engine_version), []).append(record)
        for note in record.notes:
            notes[note] = notes.get(note, 0) + 1
    lines = [f"{name} {version}: {describe_sensitivity(rows)}" for (name, version), rows in engines.items()]
    return "\n".join([*lines, *(f"NOTE {count} cells: {note}" for note, count in notes.items())])


def describe_sensitivity(records: Sequence[Record]) -> str:
    """The tiers of these cells, and the weakest of them as to what it would have caught."""
    tiers = [record.tier for record in records]
    counted = ", ".join(f"{tiers.count(tier)} cells by tier {tier}" for tier in ("X", "S", "C") if tier in tiers)
    blunt = max(records, key=smallest_scale_error)
    most = max(records, key=lambda record: record.wrong_elements or 0)
    left, all_of_them = (sum(getattr(record, key) or 0 for record in records) for key in ("undetermined", "elements"))
    return (
        f"{counted}; errors reach {max(record.ratio or 0.0 for record in records):.2g} of their bound\n"
        f"  caught in every tensor of every cell: a scale error of {smallest_scale_error(blunt):.1e} (least in "
        f"{blunt.cell.id}), {most.wrong_elements} lost elements ({most.cell.id}); "
        f"{left} of {all_of_them} elements undetermined"
    )


def smallest_scale_error(record: Record) -> float:
    """The smallest one that would have been caught; 0 where nothing is scaled, as where counts are compared."""
    found = record.smallest_scale_error
    return 0.0 if found is None or math.isinf(found) else found
