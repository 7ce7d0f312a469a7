"""The table of DeepSpeed's files adds up, and every file that gains less than 2 x has its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from suites.meta.documents import ROOT
from zharness.toml_text import parse_toml

EXCEPTIONS = ROOT / "scripts" / "deepspeed_tests.toml"
CELLS = re.compile(r"(?P<equal>\d+) of (?P<tests>\d+) +\| +(?P<ranks>\d*) +\| .*\| +(?P<ratio>[\d.]+) x")


@dataclass(frozen=True)
class TableRow:
    """A file or the last row: how many tests ended alike of how many, processes of ranks (or None), and the ratio."""

    path: str
    equal: int
    tests: int
    ranks: int | None
    ratio: float


def read_rows() -> Iterator[TableRow]:
    """Yield the rows of the files that start ranks, and the last row, whose path is ``all``."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<summary>the files that start ranks</summary>(.*?)</details>", text, re.DOTALL)
    for path, rest in re.findall(r"^\| `?([\w/.]+)`? +\|(.*)$", table, re.MULTILINE):
        if found := CELLS.search(rest):
            ranks = int(found["ranks"]) if found["ranks"] else None
            yield TableRow(path, int(found["equal"]), int(found["tests"]), ranks, float(found["ratio"]))


def test_every_file_below_2_x_has_its_reason() -> None:
    *rows, _ = read_rows()
    slower = {f"unit/{row.path}" for row in rows if row.ratio < 2}
    entries = parse_toml(EXCEPTIONS.read_text(encoding="utf-8"), EXCEPTIONS.name)["below_two"]
    listed = [path for entry in entries for path in entry["paths"]]
    assert sorted(listed) == sorted(slower)


def test_the_last_row_is_the_sum() -> None:
    *rows, last = read_rows()
    assert last.path == "all"
    assert (last.equal, last.tests) == (sum(row.equal for row in rows), sum(row.tests for row in rows))
    assert last.ranks == sum(row.ranks or 0 for row in rows)


def test_the_last_row_counts_the_files_of_2_x() -> None:
    *rows, _ = read_rows()
    reached = sum(row.ratio >= 2 for row in rows)
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"2 x or more: {reached} of {len(rows)} files" in text
