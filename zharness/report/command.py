"""Records of earlier runs as tables, a page and XML, alone or held against another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from zharness.report import overview
from zharness.report.comparison import compare_runs, render_comparison
from zharness.report.matrix import records_exit_code
from zharness.report.outputs import Outputs
from zharness.run.record_reader import load_records


def run_report(files: Sequence[Path], against: Path | None, contracts: bool, outputs: Outputs) -> int:
    """Print one table and write what was asked for; the exit code is that of the run. Raises UsageError.

    With ``against``, what differs from that earlier run comes first. Lines that are no records are skipped and told;
    where the rest is as expected the exit code is 2, since such a line may have been the failure.
    """
    outputs.require_writable()
    found = load_records(files)
    before = load_records([against]) if against is not None else None
    comparison = None if before is None else compare_runs(before.records, found.records)
    skipped = (*found.skipped_lines, *(before.skipped_lines if before is not None else ()))
    parts = [
        overview.render_contracts(found.records) if contracts else overview.render_overview(found.records),
        "\n\n".join(
            words
            for words in (found.describe_skipped(), before.describe_skipped() if before is not None else "")
            if words
        ),
    ]
    if comparison is not None:
        parts.insert(0, render_comparison(comparison))
    click.echo("\n\n".join(part for part in parts if part))
    outputs.write_reports(found.records, sum(record.seconds for record in found.records), skipped, comparison)
    code = records_exit_code(found.records)
    if found.skipped_lines and code == 0:
        click.echo(
            f"\nexit code 2: every record is as expected, but {len(found.skipped_lines)} lines could not be read"
        )
        return 2
    return code
