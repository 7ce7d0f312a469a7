"""Report the records of users' models: a row for each model if there are several, and the changes since a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click
from tabulate import tabulate

from zharness import step_summary
from zharness.report.comparison import DifferenceKind, RunComparison, compare_runs, render_comparison
from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix, render_square
from zharness.report.outputs import Outputs
from zharness.report.sensitivity import render_sensitivity
from zharness.run import Record, Verdict
from zharness.run.outcomes import group_records, records_exit_code
from zharness.run.record_reader import LoadedRecords, load_records

WORSE = (
    DifferenceKind.NEWLY_BROKEN,
    DifferenceKind.NEW_FAILURE,
    DifferenceKind.FAILS_DIFFERENTLY,
    DifferenceKind.INCONCLUSIVE,
)


@dataclass(frozen=True)
class ModelOutputs(Outputs):
    """The files that a run on users' models writes, and the file of the recorded run with which it is compared."""

    against: Path | None = None

    @cached_property
    def recorded(self) -> LoadedRecords | None:
        """Return the records of the recorded run, or None without one. Raises UsageError if they cannot be read."""
        return None if self.against is None else load_records([self.against])

    def require_writable(self) -> None:
        """Raise UsageError if a file cannot be read or written. Call this method before a long run.

        The recorded run is read now, since ``--jsonl`` may name the same file.
        """
        super().require_writable()
        _ = self.recorded

    def render_table(self, records: Sequence[Record], tablefmt: str = "simple") -> str:
        """Render laws x stages, or models x engines if the records have several models or engines."""
        rows = {model_row(record) for record in records}
        engines = {record.cell.engine for record in records}
        return render_matrix(records, tablefmt) if len(rows) * len(engines) == 1 else render_models(records, tablefmt)

    def report_models(self, records: Sequence[Record], seconds: float, unjudged: Sequence[str]) -> int:
        """Print table, sensitivity, failures, what was not judged, and the changes; write the files.

        Returns the exit code. With a recorded run, the exit code is 1 only if a law got worse since that run.
        """
        comparison = self.compare(records)
        parts = [
            self.render_table(records) if records else "",
            render_sensitivity(records),
            render_failures(records),
            "\n".join(unjudged),
            "" if comparison is None else render_comparison(comparison),
            render_summary(records, seconds),
        ]
        click.echo("\n\n".join(part for part in parts if part))
        self.write_reports(records, seconds, () if self.recorded is None else self.recorded.skipped_lines, comparison)
        if unjudged:
            step_summary.append_section("not judged", *unjudged)
        code = records_exit_code(records)
        if comparison is None or any(record.verdict is Verdict.ERROR for record in records):
            return code
        return int(any(difference.kind in WORSE for difference in comparison.differences))

    def compare(self, records: Sequence[Record]) -> RunComparison | None:
        """Compare with those cells of the recorded run that this run had to run, or return None without a recorded run.

        Recorded cells of another model, engine, configuration or law do not count as missing. Raises UsageError if no
        cell is shared.
        """
        if self.recorded is None:
            return None
        asked = {comparison_scope(record) for record in records}
        earlier = [record for record in self.recorded.records if comparison_scope(record) in asked]
        return compare_runs(earlier or self.recorded.records, records)


def comparison_scope(record: Record) -> tuple[str, ...]:
    """Return the values that a run requests: the model, the engine without its release, the options and the law."""
    cell = record.cell
    return cell.model, cell.engine.partition("==")[0], cell.engine_variant, cell.law


def model_row(record: Record) -> tuple[str, str]:
    """Return the row of a record: its model and its configuration file or options."""
    return record.cell.model, record.cell.engine_variant


def render_models(records: Sequence[Record], tablefmt: str = "simple") -> str:
    """Render a row for each model and configuration, and a column for each engine and stage."""
    columns = list(dict.fromkeys((record.cell.engine, record.cell.stage) for record in records))
    configs = any(record.cell.engine_variant for record in records)
    body = []
    for (model, variant), rows in group_records(records, model_row).items():
        squares = [
            render_square([record for record in rows if (record.cell.engine, record.cell.stage) == column])
            for column in columns
        ]
        body.append([model, *([variant] if configs else []), *squares])
    head = ["model", *(["options"] if configs else []), *(f"{engine}, stage {stage}" for engine, stage in columns)]
    return tabulate(body, head, tablefmt=tablefmt)
