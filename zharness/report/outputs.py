"""Where records go besides the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zharness import step_summary
from zharness.report.comparison import Comparison
from zharness.report.comparison import text as differences
from zharness.report.junit import write_junit
from zharness.report.matrix import matrix
from zharness.report.page import check_page, write_page
from zharness.report.words import failures, summary
from zharness.run import Record
from zharness.run.files import check_writable


@dataclass(frozen=True)
class Outputs:
    """Files: a JSON line for each cell as it comes, and at the end a page and JUnit's XML."""

    jsonl: Path | None = None
    html: Path | None = None
    junitxml: Path | None = None

    def check_writable(self) -> None:
        """Raises UsageError where the page or the XML cannot be written: before a long run, not after it."""
        if self.html is not None:
            check_page(self.html)
        if self.junitxml is not None:
            check_writable(self.junitxml)

    def write(
        self,
        records: Sequence[Record],
        seconds: float,
        skipped: Sequence[str] = (),
        comparison: Comparison | None = None,
    ) -> None:
        """Write what was asked for, and the summary of a GitHub workflow's step where there is one.

        The page comes last: it is the largest, and what keeps it from being written costs none of the others.
        """
        if self.junitxml is not None:
            write_junit(records, seconds, self.junitxml)
        step_summary.append(
            "zharness",
            summary(records, seconds),
            f"{len(skipped)} lines skipped, which are no records" if skipped else "",
            "" if comparison is None else step_summary.block(differences(comparison)),
            matrix(records, "github"),
            step_summary.folded("What did not pass", failures(records)),
        )
        if self.html is not None:
            write_page(records, seconds, self.html, skipped, comparison)
