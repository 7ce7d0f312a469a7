"""List the functions and branches of an engine that no draw has reached, the most promising first."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LISTED = 15  # functions, and functions with branches, that the output lists; the file lists all
MAX_BRANCHES = 3  # branches that are named for each function
MAX_FILES = 5  # files that are named


@dataclass(frozen=True)
class SourceFunction:
    """A function of an engine: its file, its name, its statements, and its statements and branches not reached.

    ``line`` is the first statement that was not reached. ``missing_branches`` are pairs of lines; a negative second
    line is the end of the function.
    """

    file: str
    name: str
    line: int
    statement_count: int
    missing_count: int
    missing_branches: tuple[tuple[int, int], ...]

    @property
    def is_entered(self) -> bool:
        """Return whether a draw has called the function."""
        return self.missing_count < self.statement_count

    def describe(self) -> str:
        """Describe the part of the function that was not reached."""
        if not self.is_entered:
            return f"{self.file}:{self.line} {self.name}, {self.statement_count} statements"
        named = [f"{one}->{'end' if other < 0 else other}" for one, other in self.missing_branches[:MAX_BRANCHES]]
        rest = len(self.missing_branches) - len(named)
        more = f" and {rest} more" if rest else ""
        return f"{self.file} {self.name}: {', '.join(named)}{more}"


def read_functions(data_file: Path) -> list[SourceFunction]:
    """Return the functions of all files in ``data_file``, a data file of coverage.py."""
    from coverage import Coverage

    measured = Coverage(data_file=str(data_file), branch=True, config_file=False)
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        measured.json_report(outfile=str(report), ignore_errors=True)
        files: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))["files"]
    return [
        make_function(shorten_path(path), name, region)
        for path, content in files.items()
        for name, region in content["functions"].items()
        if name and region["summary"]["num_statements"]  # the region without a name is the module's own
    ]


def make_function(file: str, name: str, region: Mapping[str, Any]) -> SourceFunction:
    """Return the function that a region of a JSON report of coverage.py describes."""
    missing = region["missing_lines"]
    return SourceFunction(
        file,
        name,
        line=min(missing, default=0),
        statement_count=region["summary"]["num_statements"],
        missing_count=len(missing),
        missing_branches=tuple((one, other) for one, other in region["missing_branches"]),
    )


def shorten_path(path: str) -> str:
    """Return ``path`` from the folder of packages on, or else from the current folder on."""
    _, separator, rest = path.replace("\\", "/").rpartition("/site-packages/")
    return rest if separator else path.removeprefix(f"{Path.cwd()}/")


def sort_functions(functions: Sequence[SourceFunction]) -> list[SourceFunction]:
    """Return the functions that were not reached completely, the most promising first.

    Functions that were never entered come first, ordered by their size times the share of their file's functions that
    were entered, because a further option may lead to them. Then come entered functions, ordered by the number of their
    missing branches.
    """
    by_file: dict[str, list[SourceFunction]] = {}
    for function in functions:
        by_file.setdefault(function.file, []).append(function)
    shares = {file: sum(each.is_entered for each in found) / len(found) for file, found in by_file.items()}

    def get_key(function: SourceFunction) -> tuple[bool, float, str, int]:
        """Return the sort key of a function."""
        promise = float(len(function.missing_branches))
        if not function.is_entered:
            promise = function.statement_count * shares[function.file]
        return function.is_entered, -promise, function.file, function.line

    return sorted((each for each in functions if not each.is_entered or each.missing_branches), key=get_key)


def describe_unreached(functions: Sequence[SourceFunction], limit: int | None = MAX_LISTED) -> str:
    """Describe how much was reached; list up to ``limit`` functions never entered, and with missing branches each."""
    statements = sum(each.statement_count for each in functions)
    reached = statements - sum(each.missing_count for each in functions)
    entered = [each for each in functions if each.is_entered]
    untouched = sorted({each.file for each in functions} - {each.file for each in entered})
    lines = [
        f"the engine's source: {len(entered)} of {len(functions)} functions entered, "
        f"{reached} of {statements} of their statements reached"
    ]
    if untouched:
        named = untouched[:MAX_FILES] if limit else untouched
        more = ", ..." if len(named) < len(untouched) else ""
        lines.append(f"files never entered: {len(untouched)}: {', '.join(named)}{more}")
    ranked = [each for each in sort_functions(functions) if each.file not in untouched]
    for title, found in (
        ("functions never entered", [each for each in ranked if not each.is_entered]),
        ("branches never taken", [each for each in ranked if each.is_entered]),
    ):
        if found:
            shown = found[:limit]
            count = f"{len(shown)} of {len(found)}" if len(shown) < len(found) else str(len(found))
            lines.append(f"{title}, most promising first ({count}):")
            lines += [f"   {each.describe()}" for each in shown]
    return "\n".join(lines)
