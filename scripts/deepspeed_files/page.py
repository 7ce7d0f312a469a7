"""Read the tables of DeepSpeed's files from a page, and put new tables in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deepspeed_files.tables import Tables, TimedRow, render_drop_in

SUMMARIES = (
    "the files that start ranks",
    "the files that start no rank, or of whose sample no test passes on this CPU",
)
RATIO = re.compile(r"(?P<ratio>[\d.]+) x(?P<more>.*)")


def read_tables(page: Path) -> Tables:
    """Return the rows of both tables of the page, whose seconds are whole numbers.

    Raises ValueError unless the page has each table once.
    """
    timed, reasons = (list(iter_rows(match["table"])) for match in find_tables(page.read_text(encoding="utf-8")))
    rows = [parse_timed_row(cells) for cells in timed if cells[0] != "all"]
    return Tables({row.path: row for row in rows}, {cells[0]: cells for cells in reasons})


def merge_tables(earlier: Tables, later: Tables) -> Tables:
    """Return the rows of both; of a file that both have, only those of ``later``."""
    new = {*later.timed, *later.reasons}
    timed = {path: row for path, row in earlier.timed.items() if path not in new}
    reasons = {path: cells for path, cells in earlier.reasons.items() if path not in new}
    return Tables({**timed, **later.timed}, {**reasons, **later.reasons})


def write_tables(page: Path, tables: Tables) -> None:
    """Put ``tables`` in the place of those of the page."""
    text = page.read_text(encoding="utf-8")
    matches = find_tables(text)
    for match, table in reversed([*zip(matches, render_drop_in(tables), strict=True)]):
        text = f"{text[: match.start('table')]}{table}{text[match.end('table') :]}"
    page.write_text(text, encoding="utf-8")


def find_tables(text: str) -> list[re.Match[str]]:
    """Return the place of each table, which stands alone below its summary, as the group ``table``."""
    patterns = (rf"<summary>{summary}</summary>\s+(?P<table>\|.*?\|)\s+</details>" for summary in SUMMARIES)
    found = [[*re.finditer(pattern, text, re.DOTALL)] for pattern in patterns]
    if [len(matches) for matches in found] != [1, 1]:
        raise ValueError(f"the page needs each of these tables once: {'; '.join(SUMMARIES)}")
    return [match for (match,) in found]


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
