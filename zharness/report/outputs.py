"""Where records go besides the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zharness import step_summary
from zharness.report.comparison import RunComparison
from zharness.report.comparison import render_comparison as differences
from zharness.report.failures import render_failures, render_summary
from zharness.report.junit import write_junit
from zharness.report.matrix import render_matrix
from zharness.report.page import require_page_writable, write_page
from zharness.run import Record
from zharness.run.files import require_writable


@dataclass(frozen=True)
class Outputs:
    """Files: a JSON line for each cell as it comes, and at the end a page and JUnit's XML."""

    jsonl: Path | None = None
    html: Path | None = None
    junitxml: Path | None = None

    def require_writable(self) -> None:
        """Raises UsageError where the page or the XML cannot be written: before a long run, not after it."""
        if self.html is not None:
            require_page_writable(self.html)
        if self.junitxml is not None:
            require_writable(self.junitxml)

    def write_reports(
        self,
        records: Sequence[Record],
        seconds: float,
        skipped: Sequence[str] = (),
        comparison: RunComparison | None = None,
    ) -> None:
        """Write what was asked for, and the summary of a GitHub workflow's step where there is one.

        The page comes last: it is the largest, and what keeps it from being written costs none of the others.
        """
        if self.junitxml is not None:
            write_junit(records, seconds, self.junitxml)
        step_summary.append_section(
            "zharness",
            render_summary(records, seconds),
            f"{len(skipped)} lines skipped, which are no records" if skipped else "",
            "" if comparison is None else step_summary.render_code_block(differences(comparison)),
            render_matrix(records, "github"),
            step_summary.render_details("What did not pass", render_failures(records)),
        )
        if self.html is not None:
            write_page(records, seconds, self.html, skipped, comparison)
