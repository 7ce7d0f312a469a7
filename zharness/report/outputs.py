"""Print the report of a run, and write its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from zharness import step_summary
from zharness.errors import UsageError
from zharness.report.comparison import RunComparison, render_comparison
from zharness.report.failures import render_failures, render_rank_costs, render_summary
from zharness.report.junit import write_junit
from zharness.report.matrix import render_matrix
from zharness.report.page import require_page_writable, write_page
from zharness.report.sensitivity import render_sensitivity
from zharness.run import Record
from zharness.run.files import require_writable
from zharness.run.outcomes import records_exit_code


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes: JSON lines while cells run; an HTML page and JUnit XML at the end of the run."""

    jsonl: Path | None = None
    html: Path | None = None
    junitxml: Path | None = None

    def require_writable(self) -> None:
        """Raise UsageError if two files are the same, or if the page or the XML file cannot be written.

        Call this method before a long run.
        """
        paths = [path.resolve() for path in (self.jsonl, self.html, self.junitxml) if path is not None]
        for path in paths:
            if paths.count(path) > 1 and (path.is_file() or not path.exists()):  # several may be /dev/null
                raise UsageError(f"got {str(path)!r} twice; expected a file of its own for each of the outputs")
        if self.html is not None:
            require_page_writable(self.html)
        if self.junitxml is not None:
            require_writable(self.junitxml)

    def render_table(self, records: Sequence[Record], tablefmt: str = "simple") -> str:
        """Render the table of verdicts, in a table format of the package tabulate."""
        return render_matrix(records, tablefmt)

    def report_run(
        self,
        records: Sequence[Record],
        seconds: float,
        unmatched_failures: Sequence[str] = (),
        coverage: Sequence[str] = (),
    ) -> int:
        """Print the matrix, sensitivity, coverage, failures and summary, write the files, and return the exit code.

        ``coverage`` has sentences that say how many pairs the cells cover. ``unmatched_failures`` describe expected
        failures that matched no cell; if there is such an expected failure, the exit code is not 0.
        """
        parts = [
            self.render_table(records),
            render_sensitivity(records),
            "\n".join(coverage),
            render_failures(records),
            "\n".join(f"UNMATCHED {description}" for description in unmatched_failures),
            render_rank_costs(records),
            render_summary(records, seconds),
        ]
        click.echo("\n\n".join(part for part in parts if part))
        self.write_reports(records, seconds, notes=(*coverage, *unmatched_failures))
        return records_exit_code(records) or int(bool(unmatched_failures))

    def write_reports(
        self,
        records: Sequence[Record],
        seconds: float,
        skipped: Sequence[str] = (),
        comparison: RunComparison | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Write the requested files: the XML file, the summary of a GitHub workflow's step, and the page.

        ``skipped`` describe lines of a record file that are not records. ``notes`` describe what the run covered or
        left out, and go to the summary of the step. The page is written last, since it is the largest file: an error in
        writing the page does not lose the other files.
        """
        if self.junitxml is not None:
            write_junit(records, seconds, self.junitxml)
        step_summary.append_section(
            "zharness",
            render_summary(records, seconds),
            step_summary.render_code_block("\n".join(notes)),
            f"{len(skipped)} lines skipped: they are not records" if skipped else "",
            "" if comparison is None else step_summary.render_code_block(render_comparison(comparison)),
            self.render_table(records, "github"),
            step_summary.render_details("Cells that did not pass", render_failures(records)),
        )
        if self.html is not None:
            write_page(records, seconds, self.html, skipped, comparison)
