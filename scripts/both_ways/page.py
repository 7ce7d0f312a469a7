"""Read the tables of both ways from a page, and put new tables in their place.

Each table stands alone in a block ``<details>`` below a summary that names the family, so that the page is the record
of the runs that made it. Where runs are added, the rows of other files stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from both_ways.family import Family
from both_ways.tables import Tables, TimedRow, render_both_ways
from both_ways.whole import ACTIONS, WholeRow, WholeTables, render_whole

RATIO = re.compile(r"(?P<ratio>[\d.]+) x(?P<more>.*)")


@dataclass(frozen=True)
class Page:
    """The blocks of a family on a page: of samples spread evenly, or of those drawn by ``seed``, and of whole files."""

    path: Path
    family: Family
    seed: int | None = None

    @property
    def summaries(self) -> tuple[str, str]:
        """The summaries above both tables of the samples."""
        drawn = "" if self.seed is None else f", tests drawn by the seed {self.seed}"
        owner = self.family.owner
        return (
            f"{owner}'s files that start ranks{drawn}",
            f"{owner}'s files that start no rank, or of whose sample no test passes on this CPU{drawn}",
        )

    @property
    def whole_summary(self) -> str:
        """The summary above the tables of whole files with the drop-in."""
        return f"{self.family.owner}'s files whole, with the drop-in"

    def read_tables(self) -> Tables:
        """Return the rows of both tables of the samples, whose seconds are whole numbers."""
        timed, reasons = (list(iter_rows(self.read_block(summary))) for summary in self.summaries)
        rows = [parse_timed_row(cells) for cells in timed if cells[0] != "all"]
        return Tables({row.path: row for row in rows}, {cells[0]: cells for cells in reasons})

    def write_tables(self, tables: Tables) -> None:
        """Put ``tables`` in the place of those of the samples."""
        for summary, table in zip(self.summaries, render_both_ways(tables, self.family.classes), strict=True):
            self.write_block(summary, table)

    def read_whole(self) -> WholeTables:
        """Return the tables of whole files."""
        rows, reasons, compared = {}, {}, {}
        for text in filter(None, self.read_block(self.whole_summary).split("\n\n")):
            cells = [*iter_rows(text)]
            if text.startswith("| file"):
                rows = {
                    path: WholeRow(said, int(tests), *map(float, times)) for path, said, tests, *times in cells[:-1]
                }
            elif text.startswith("| kind"):
                for kind, reason, *numbers, own in cells:
                    failed, checked = map(int, re.findall(r"\d+", own))
                    files, tests = map(int, numbers)
                    reasons[kind, reason] = (files, tests, failed, checked)
            else:
                same, tests = map(int, re.findall(r"\d+", text))
                verdict = next(verdict for verdict, action in ACTIONS.items() if f" {action} there" in text)
                compared[verdict] = (same, tests)
        return WholeTables(rows, reasons, compared)

    def write_whole(self, tables: WholeTables) -> None:
        """Put ``tables`` in the place of those of whole files."""
        self.write_block(self.whole_summary, "\n\n".join(render_whole(tables, self.family.owner)))

    def read_block(self, summary: str) -> str:
        """Return the text of the block below ``summary``."""
        return self.find_block(self.path.read_text(encoding="utf-8"), summary)["block"].strip()

    def write_block(self, summary: str, block: str) -> None:
        """Put ``block`` below ``summary``."""
        text = self.path.read_text(encoding="utf-8")
        match = self.find_block(text, summary)
        inner = f"\n\n{block}\n\n" if block else "\n\n"
        self.path.write_text(f"{text[: match.start('block')]}{inner}{text[match.end('block') :]}", encoding="utf-8")

    def find_block(self, text: str, summary: str) -> re.Match[str]:
        """Return the place of a block as the group ``block``. Raises ValueError unless the page has it once."""
        pattern = rf"<summary>{re.escape(summary)}</summary>(?P<block>[^<]*)</details>"
        found = [*re.finditer(pattern, text)]
        if len(found) != 1:
            raise ValueError(f"{self.path.name} needs this block once, and has it {len(found)} times: {summary}")
        return found[0]


def merge_tables(earlier: Tables, later: Tables) -> Tables:
    """Return the rows of both; of a file that both have, only those of ``later``."""
    new = {*later.timed, *later.reasons}
    timed = {path: row for path, row in earlier.timed.items() if path not in new}
    reasons = {path: cells for path, cells in earlier.reasons.items() if path not in new}
    return Tables({**timed, **later.timed}, {**reasons, **later.reasons})


def iter_rows(table: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a Markdown table, without its header."""
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def parse_timed_row(cells: list[str]) -> TimedRow:
    """Return the row of a file that started ranks. Raises ValueError if a cell is not what ``to_cells`` writes."""
    path, own, swapped, same, ranks, *times, ratio = cells
    equal, tests = (int(number) for number in same.split(" of "))
    seconds = [float(value) for value in times]
    match = RATIO.fullmatch(ratio)
    if match is None or len(seconds) != 4:
        raise ValueError(f"not a row of the table: {' | '.join(cells)}")
    return TimedRow(
        path, own, swapped, equal, tests, int(ranks) if ranks else None, *seconds, float(match["ratio"]), match["more"]
    )
