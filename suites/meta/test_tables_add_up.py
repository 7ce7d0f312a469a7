"""The tables of DeepSpeed's and PyTorch's files add up, and every file that gains less than 2 x has its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from suites.meta.documents import ROOT
from zharness.toml_text import parse_toml

CELLS = re.compile(r"(?P<equal>\d+) of (?P<tests>\d+) +\| +(?P<ranks>\d*) +\| .*\| +(?P<ratio>[\d.]+) x")


@dataclass(frozen=True)
class TableRow:
    """A file or the last row: how many tests ended alike of how many, processes of ranks (or None), and the ratio."""

    path: str
    equal: int
    tests: int
    ranks: int | None
    ratio: float


@dataclass(frozen=True)
class Table:
    """A table of the files that start ranks: a pattern for it, and the list of the files below 2 x."""

    pattern: str
    exceptions: str
    below_two: str = "below_two"
    folder: str = ""

    def read_text(self) -> str:
        """Return the text of the table."""
        page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
        (text,) = re.findall(self.pattern + r".*?(?=\n\n)", page, re.DOTALL)
        return str(text)

    def read_rows(self) -> list[TableRow]:
        """Return the rows of the files, and the last row, whose path is ``all``."""
        rows = []
        for path, rest in re.findall(r"^\| `?([\w/.]+)`? +\|(.*)$", self.read_text(), re.MULTILINE):
            if found := CELLS.search(rest):
                ranks = int(found["ranks"]) if found["ranks"] else None
                rows.append(TableRow(path, int(found["equal"]), int(found["tests"]), ranks, float(found["ratio"])))
        return rows

    def read_below_two(self) -> list[str]:
        """Return the files of the list of exceptions, as the table has them."""
        file = ROOT / "scripts" / "both_ways" / self.exceptions
        entries = parse_toml(file.read_text(encoding="utf-8"), file.name).get(self.below_two, [])
        return [path.removeprefix(self.folder) for entry in entries for path in entry["paths"]]


SUMMARY = r"<summary>{}'s files that start ranks{}</summary>\s+\|"
DRAWN = ", tests drawn by the seed 25"
TABLES = [
    pytest.param(Table(SUMMARY.format("DeepSpeed", ""), "deepspeed.toml", folder="unit/"), id="deepspeed"),
    pytest.param(
        Table(SUMMARY.format("DeepSpeed", DRAWN), "deepspeed.toml", "below_two_drawn", folder="unit/"), id="drawn"
    ),
    pytest.param(Table(SUMMARY.format("PyTorch", ""), "pytorch.toml"), id="pytorch"),
    pytest.param(Table(SUMMARY.format("PyTorch", DRAWN), "pytorch.toml", "below_two_drawn"), id="pytorch-drawn"),
]


@pytest.mark.parametrize("table", TABLES)
def test_every_file_below_2_x_has_its_reason(table: Table) -> None:
    *rows, _ = table.read_rows()
    assert sorted(table.read_below_two()) == sorted(row.path for row in rows if row.ratio < 2)


@pytest.mark.parametrize("table", TABLES)
def test_the_last_row_is_the_sum(table: Table) -> None:
    *rows, last = table.read_rows()
    assert last.path == "all"
    assert (last.equal, last.tests) == (sum(row.equal for row in rows), sum(row.tests for row in rows))
    assert last.ranks == sum(row.ranks or 0 for row in rows)


@pytest.mark.parametrize("table", TABLES)
def test_the_last_row_counts_the_files_of_2_x(table: Table) -> None:
    *rows, _ = table.read_rows()
    reached = sum(row.ratio >= 2 for row in rows)
    assert f"2 x or more: {reached} of {len(rows)} files" in table.read_text()
