"""Render the runs of test files both ways as Markdown tables, and find the outcomes that no exception explains.

An exception has ``tests``, a regular expression, a ``reason``, and a ``kind``. Tests of the kinds in ``WITHOUT_LAW``
state no law about the engine: they read DeepSpeed's internals or files, need a feature that the reference engine lacks,
ask for a limit of DeepSpeed, or refuse this machine themselves. A test of the kind ``decided`` states a law in which
the reference engine differs, and one of the kind ``open`` a law that the stand-in does not follow yet. With
``verdict = "passed"`` an exception names tests that pass without running, for example because they return on a CPU;
they count as tests without law. The list ``uncollectable`` has the files that cannot be imported, and ``below_two``
those of which the drop-in saves less than half of the CPU seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from both_ways.runs import FOLDER_PREFIX, KILLED, FileRun, Way

WITHOUT_LAW = ("internals", "feature", "limit", "machine")
NOT_LISTED = "unexpected"
_TEMPORARY_FOLDER = re.compile(rf"/\S*?/{FOLDER_PREFIX}[^/\s]+/")
_SOURCE_OF_IMPORT = re.compile(r" \(/[^)\s]*\)?$")  # the file of a module that lacks a name, on one machine
Runs = Mapping[tuple[str, Way], FileRun]
Exceptions = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class TimedRow:
    """A row of the files that start ranks: what both ways did, how many tests ended alike, and the (CPU) seconds.

    ``ranks`` is None where the processes were not counted. ``more`` follows the ratio of the CPU seconds if it is a
    lower bound, because the run with the project's own classes was killed.
    """

    path: str
    own: str
    swapped: str
    same: int
    tests: int
    ranks: int | None
    own_seconds: float
    swapped_seconds: float
    own_cpu: float
    swapped_cpu: float
    ratio: float
    more: str = ""

    def to_cells(self) -> list[Any]:
        """Return the cells of the row."""
        outcomes = [self.path, self.own, self.swapped, f"{self.same} of {self.tests}", self.ranks]
        return [*outcomes, *self.times, f"{self.ratio:.1f} x{self.more}"]

    @property
    def times(self) -> tuple[float, float, float, float]:
        """The seconds and the CPU seconds of both ways."""
        return self.own_seconds, self.swapped_seconds, self.own_cpu, self.swapped_cpu


@dataclass(frozen=True)
class Tables:
    """The rows of both tables of the drop-in, by the path of the file as the tables print it.

    ``timed`` has the files that started ranks. ``reasons`` has the cells of those that started none or have no test
    that passes, with the reason.
    """

    timed: Mapping[str, TimedRow]
    reasons: Mapping[str, list[str]]


def compare_ways(runs: Runs) -> Tables:
    """Compare the project's own classes with the drop-in, test by test, for each file that has run both ways."""
    pairs = [(own, runs[path, Way.DROP_IN]) for (path, way), own in sorted(runs.items()) if is_pair(runs, path, way)]
    timed = [compare_times(*pair) for pair in pairs if pair[0].processes != 0]
    reasons = [
        [*compare_outcomes(*pair), find_reason(pair[0])]
        for pair in pairs
        if pair[0].processes == 0 or not pair[0].named("passed")
    ]
    return Tables({row.path: row for row in timed}, {cells[0]: cells for cells in reasons})


def render_both_ways(tables: Tables, classes: str) -> tuple[str, str]:
    """Return the table of the files that started ranks, with ratios of CPU seconds, and that of the reasons.

    ``classes`` is the name of the project's own classes. A table without rows is empty.
    """
    headers = ["file", classes, "drop-in", "same"]
    rows = [tables.timed[path] for path in sorted(tables.timed)]
    times_header = ["ranks", "own s", "drop-in s", "own CPU s", "drop-in CPU s", "ratio"]
    cells = [*(row.to_cells() for row in rows), sum_up(rows)] if rows else []
    reasons = [tables.reasons[path] for path in sorted(tables.reasons)]
    return (
        tabulate(cells, [*headers, *times_header], tablefmt="github", floatfmt=".0f") if cells else "",
        tabulate(reasons, [*headers, "reason"], tablefmt="github") if reasons else "",
    )


def is_pair(runs: Runs, path: str, way: Way) -> bool:
    """Return whether this is the run of a file with its own classes, and the file has run with the drop-in too."""
    return way is Way.OWN and (path, Way.DROP_IN) in runs


def compare_outcomes(own: FileRun, swapped: FileRun) -> list[str]:
    """Return the path, what both ways did, and how many tests ended alike."""
    names = f"{count_same(own, swapped)} of {len(own.outcomes)}"
    return [format_path(own.path), own.describe(), swapped.describe(), names]


def count_same(own: FileRun, swapped: FileRun) -> int:
    """Return the number of tests with the same verdict both ways."""
    return sum(get_verdict(swapped, name) == verdict for name, (verdict, _) in own.outcomes.items())


def compare_times(own: FileRun, swapped: FileRun) -> TimedRow:
    """Return the row of a file that started ranks."""
    path, *descriptions, _ = compare_outcomes(own, swapped)
    times = (own.seconds, swapped.seconds, own.cpu_seconds, swapped.cpu_seconds)
    more = " or more" if own.status == KILLED else ""
    counts = (count_same(own, swapped), len(own.outcomes), own.processes)
    return TimedRow(path, *descriptions, *counts, *times, find_ratio(own, swapped), more)


def sum_up(rows: Sequence[TimedRow]) -> list[Any]:
    """Return the last row: how many files have a ratio of 2 or more, and the sums of the rows as shown."""
    reached = sum(round(row.ratio, 1) >= 2 for row in rows)
    same, tests, ranks = (
        sum(values) for values in zip(*((row.same, row.tests, row.ranks or 0) for row in rows), strict=True)
    )
    sums = [sum(map(round, values)) for values in zip(*(row.times for row in rows), strict=True)]
    summary = f"2 x or more: {reached} of {len(rows)} files"
    return ["all", summary, "", f"{same} of {tests}", ranks, *sums, f"{sums[2] / max(sums[3], 0.1):.1f} x"]


def saves_less_than_half(own: FileRun, swapped: FileRun) -> bool:
    """Return whether the ratio of the CPU seconds, as the table shows it, is below 2."""
    return round(find_ratio(own, swapped), 1) < 2


def find_ratio(own: FileRun, swapped: FileRun) -> float:
    """Return the ratio of the CPU seconds."""
    return own.cpu_seconds / max(swapped.cpu_seconds, 0.1)


def find_reason(run: FileRun) -> str:
    """Return the most frequent reason for which tests of the run were skipped or failed, without paths of a machine."""
    messages = Counter(
        _SOURCE_OF_IMPORT.sub("", _TEMPORARY_FOLDER.sub("", message.removeprefix("Skipped: ")))
        for _, message in run.outcomes.values()
        if message
    )
    return messages.most_common(1)[0][0][:120].replace("|", "/") if messages else "these tests start no rank"


def render_stand_in(runs: Runs, listed: Exceptions) -> Iterator[str]:
    """Yield the table of the files on the reference engine, if any ran, with the share of tests that state a law."""
    rows, total = [], Counter[str]()
    for (path, way), run in sorted(runs.items()):
        if way is Way.STAND_IN:
            kinds = Counter(classify(run, listed, "failed").values())
            passed = list(classify(run, listed, "passed").values()).count(NOT_LISTED)
            with_law = passed + sum(count for kind, count in kinds.items() if kind not in WITHOUT_LAW)
            others = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            rows.append([format_path(path), run.describe(), with_law, passed, others])
            total.update(passed=passed, with_law=with_law)
    if not rows:
        return
    rows.append(["all", "", total["with_law"], total["passed"], f"{total['passed'] / max(total['with_law'], 1):.1%}"])
    yield tabulate(rows, ["file", "outcomes", "state a law", "pass", "failures"], tablefmt="github")


def find_unexpected(
    runs: Runs, listed: Exceptions, differences: Sequence[str], slower: Collection[str]
) -> Iterator[str]:
    """Describe runs that did not end, failures on the reference engine that no exception names, and differences.

    A test may end otherwise with the drop-in if its own message matches one of ``differences``, and the drop-in may
    save less than half of the CPU seconds of the files ``slower``.
    """
    for (path, way), run in runs.items():
        if run.status == KILLED or not run.outcomes:
            yield f"{path} {way.value}: {run.describe()}, exit status {run.status} after {run.seconds} s"
        if way is Way.STAND_IN:
            for name, kind in classify(run, listed, "failed").items():
                if kind == NOT_LISTED:
                    yield f"{path}::{name} failed on the reference engine: {run.outcomes[name][1]}"
        elif way is Way.OWN and (path, Way.DROP_IN) in runs:
            swapped = runs[path, Way.DROP_IN]
            if run.processes != 0 and saves_less_than_half(run, swapped) and path not in slower:
                yield f"{path}: {run.cpu_seconds} CPU s with its own classes, {swapped.cpu_seconds} with the drop-in"
            for name, (verdict, message) in run.outcomes.items():
                other = get_verdict(swapped, name)
                if verdict != other and not any(re.search(pattern, message) for pattern in differences):
                    yield f"{path}::{name}: {verdict} with its own classes, {other} with the drop-in"


def get_verdict(run: FileRun, name: str) -> str:
    """Return the verdict of the test, or ``missing``."""
    return run.outcomes.get(name, ("missing", ""))[0]


def classify(run: FileRun, listed: Exceptions, verdict: str) -> dict[str, str]:
    """Return the kind of each test with this verdict, by name: that of the first exception, or ``NOT_LISTED``.

    An exception for ``verdict`` "passed" says so; all others are for failures.
    """
    exceptions = [entry for entry in listed.get(run.path, []) if entry.get("verdict", "failed") == verdict]
    return {
        name: next((entry["kind"] for entry in exceptions if re.search(entry["tests"], name)), NOT_LISTED)
        for name in run.named(verdict)
    }


def format_path(path: str) -> str:
    """Return the path in code font, without the folder that all files share."""
    return f"`{path.removeprefix('unit/')}`"
