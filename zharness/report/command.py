"""The command ``zharness report``: render records of earlier runs, alone or compared with another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from zharness.report import overview
from zharness.report.combinations import render_combinations
from zharness.report.comparison import compare_runs, render_comparison
from zharness.report.outputs import Outputs
from zharness.run.outcomes import records_exit_code
from zharness.run.record_reader import load_records

TABLES = {
    "": overview.render_overview,
    "contracts": overview.render_contracts,
    "combinations": render_combinations,
}


def run_report(files: Sequence[Path], against: Path | None, table: str, outputs: Outputs) -> int:
    """Load records, print a table, write the requested files, and return the exit code.

    ``against`` is the file of an earlier run: the differences from it are printed first. ``table`` names the table of
    TABLES that is printed; the default is the overview. Lines that are not records are skipped and listed. If lines of
    ``files`` were skipped, the exit code is 2 even if all records are as expected, because a skipped line may be a
    failure. Raises UsageError for files that cannot be read or written.
    """
    outputs.require_writable()
    current = load_records(files)
    earlier = load_records([against]) if against is not None else None
    comparison = None if earlier is None else compare_runs(earlier.records, current.records)
    parts = [
        "" if comparison is None else render_comparison(comparison),
        TABLES[table](current.records),
        current.describe_skipped(),
        "" if earlier is None else earlier.describe_skipped(),
    ]
    click.echo("\n\n".join(part for part in parts if part))
    skipped = (*current.skipped_lines, *(() if earlier is None else earlier.skipped_lines))
    outputs.write_reports(current.records, sum(record.seconds for record in current.records), skipped, comparison)
    code = records_exit_code(current.records)
    if current.skipped_lines and code == 0:
        click.echo(
            f"\nexit code 2: every record is as expected, but {len(current.skipped_lines)} lines could not be read"
        )
        return 2
    return code
