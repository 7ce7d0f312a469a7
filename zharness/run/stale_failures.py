"""Find expected failures that name options, none of whose cells in a run failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zharness.laws.registry import find_laws
from zharness.run.expected_failures import ExpectedFailure, expected_failures_for
from zharness.run.record import Record, Verdict


def describe_stale_failures(records: Sequence[Record], user_failures: Sequence[ExpectedFailure] = ()) -> list[str]:
    """Describe each expected failure that names options, if every cell with one of them passed, and name the entry.

    An entry is described only if the run has all of its laws, stages, world sizes and dtypes, and each law variant that
    ran also ran with one of the options, because another variant may fail. One that is stale on a cell of its own is
    not described, because the record of that cell says so. The key ``unless_engine_variants`` of an entry excludes
    cells that pass under further options.
    """
    return [
        f"{entry.location}: {entry.check} holds in all cells of {engine} that set {' or '.join(entry.engine_variants)} "
        f"({len(covered)}, for example {covered[0].cell.id}), but was expected to fail ({entry.upstream}); narrow or "
        "delete this entry"
        for engine in dict.fromkeys(record.cell.engine for record in records)
        for entry, covered in iter_passing_entries([r for r in records if r.cell.engine == engine], user_failures)
    ]


def iter_passing_entries(
    records: Sequence[Record], user_failures: Sequence[ExpectedFailure]
) -> Iterator[tuple[ExpectedFailure, list[Record]]]:
    """Yield each entry for options all of whose cells in the run of one engine passed, with these cells."""
    ran = [record for record in records if record.verdict is not Verdict.UNSUPPORTED]
    for entry in expected_failures_for(records[0].cell.engine, user_failures) if ran else ():
        if not entry.engine_variants or entry.isolation or not has_all_values(entry, ran):
            continue
        any_options = replace(entry, engine_variants=(), unless_engine_variants=())
        wanted = {spelling(record) for record in ran if any_options.covers_cell(record.cell, record.engine_version)}
        covered = [record for record in ran if entry.covers_cell(record.cell, record.engine_version)]
        has_passed = all(record.verdict is Verdict.PASS and not record.stale_reason for record in covered)
        if covered and has_passed and wanted == set(map(spelling, covered)):
            yield entry, covered


def spelling(record: Record) -> tuple[str, str]:
    """Return the law and the law variant of a record."""
    return record.cell.law, record.cell.variant


def has_all_values(entry: ExpectedFailure, records: Sequence[Record]) -> bool:
    """Return whether ``records`` have each law, stage, world size and dtype that ``entry`` names, with any options."""
    cells = [record.cell for record in records]
    return (
        {law.name for law in find_laws((entry.check,)) if law.models} <= {cell.law for cell in cells}
        and {*entry.stages} <= {cell.stage for cell in cells}
        and {*entry.world_sizes} <= {cell.world_size for cell in cells}
        and {*entry.dtypes} <= {cell.dtype for cell in cells}
    )
