"""Sort the tests that fail with the drop-in, where it ran alone, choose which tests to compare, and render tables.

A reason has ``message``, a regular expression, a ``reason``, and a ``kind``: ``machine`` for what this machine lacks,
``engine`` for a fault of the project or of its test, ``drop-in`` for a fault of the drop-in.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from both_ways.recording import draw_names
from both_ways.runs import COLLECTION, FileRun, Way
from both_ways.tables import Runs, format_path

NOT_SORTED = {"kind": "unexpected", "reason": "not sorted yet"}
VERDICTS = ("passed", "skipped", "failed")
ACTIONS = {"passed": "pass", "skipped": "are skipped"}  # of the tests whose verdicts are compared in a sentence
_NUMBERS = re.compile(r"\d+")
_COUNT = re.compile(rf"(\d+) ({'|'.join(VERDICTS)})")
Reasons = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class WholeRow:
    """What the drop-in did with all tests of a file, and the (CPU) seconds."""

    outcome: str
    tests: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class WholeTables:
    """The files that the drop-in ran alone, by path, why tests failed, and the tests that ran with own classes too.

    ``reasons`` has, by kind and reason, the numbers of files and of tests, and of tests that also fail, and that ran,
    with own classes. ``compared`` has, by verdict with the drop-in, the numbers of tests that end alike and that ran.
    """

    rows: Mapping[str, WholeRow]
    reasons: Mapping[tuple[str, str], tuple[int, int, int, int]]
    compared: Mapping[str, tuple[int, int]]

    def __add__(self, other: WholeTables) -> WholeTables:
        """Return the tables of both; no file may be in both."""
        return WholeTables(
            {**self.rows, **other.rows},
            add_counts(self.reasons, other.reasons),
            add_counts(self.compared, other.compared),
        )


def add_counts(one: Mapping[Any, tuple[int, ...]], other: Mapping[Any, tuple[int, ...]]) -> dict[Any, Any]:
    """Return the sums of the numbers that both have by the same key."""
    both = {key: [counts[key] for counts in (one, other) if key in counts] for key in {**one, **other}}
    return {key: tuple(map(sum, zip(*counts, strict=True))) for key, counts in both.items()}


def choose_rechecks(run: FileRun, passes: int, seed: int) -> tuple[str, ...]:
    """Return the first failed and skipped test of each message, numbers in it apart, and ``passes`` passed by ``seed``.

    A test that starts no ranks runs the same in both ways, so that no pass or skip of one is taken.
    """
    first: dict[tuple[str, str], str] = {}
    on_ranks = set(run.on_ranks or ())
    for verdict in ("failed", "skipped"):
        for name in sorted(run.named(verdict)):
            if verdict == "failed" or name in on_ranks:
                first.setdefault((verdict, _NUMBERS.sub("", run.outcomes[name][1])), name)
    return (*first.values(), *draw_names(sorted(on_ranks.intersection(run.named("passed"))), passes, seed))


def summarize_whole(runs: Runs, reasons: Reasons) -> WholeTables:
    """Return the tables of the runs with the drop-in."""
    alone = [run for (_, way), run in sorted(runs.items()) if way is Way.DROP_IN]
    rows = {
        format_path(run.path): WholeRow(
            run.describe(), len(run.outcomes.keys() - {COLLECTION}), run.seconds, run.cpu_seconds
        )
        for run in alone
    }
    failures: dict[tuple[str, str], list[tuple[FileRun, str]]] = defaultdict(list)
    for run in alone:
        for name in run.named("failed"):
            found = find_entry(run, name, reasons)
            failures[found["kind"], found["reason"]].append((run, name))
    counts = {}
    for key, tests in failures.items():
        checked = [verdict for run, name in tests if (verdict := get_recheck(runs, run.path, name))]
        counts[key] = (len({run.path for run, _ in tests}), len(tests), checked.count("failed"), len(checked))
    own = {verdict: [found for *_, found in iter_compared(runs, verdict)] for verdict in ACTIONS}
    compared = {verdict: (found.count(verdict), len(found)) for verdict, found in own.items() if found}
    return WholeTables(rows, counts, compared)


def render_whole(tables: WholeTables, owner: str) -> list[str]:
    """Return the table of the files, that of the reasons if tests failed, and a sentence for each verdict compared."""
    if not tables.rows:
        return []
    rows = sorted(tables.rows.items())
    cells: list[list[Any]] = [[path, *vars(row).values()] for path, row in rows]
    totals = Counter[str]()
    for _, row in rows:
        totals.update({verdict: int(number) for number, verdict in _COUNT.findall(row.outcome)})
    total = ", ".join(f"{totals[verdict]} {verdict}" for verdict in VERDICTS)
    sums = [sum(round(getattr(row, name)) for _, row in rows) for name in ("tests", "seconds", "cpu_seconds")]
    files = tabulate(
        [*cells, ["all", total, *sums]], ["file", "drop-in", "tests", "s", "CPU s"], tablefmt="github", floatfmt=".0f"
    )
    reasons = [
        [*key, number, tests, f"{failed} of {checked} fail"]
        for key, (number, tests, failed, checked) in sorted(tables.reasons.items())
    ]
    headers = ["kind", "reason", "files", "tests", "own classes"]
    return [
        files,
        *([tabulate(reasons, headers, tablefmt="github")] if reasons else []),
        *(describe_compared(verdict, *numbers, owner) for verdict, numbers in sorted(tables.compared.items())),
    ]


def describe_compared(verdict: str, same: int, tests: int, owner: str) -> str:
    """Say of how many tests with this verdict with the drop-in the verdict is the same with the project's classes."""
    return (
        f"{same} of {tests} tests that {ACTIONS[verdict]} with the drop-in, and ran with {owner}'s own classes too,"
        f" {ACTIONS[verdict]} there."
    )


def iter_compared(runs: Runs, verdict: str) -> Iterator[tuple[FileRun, str, str]]:
    """Yield run, name and verdict with own classes of each test on ranks with ``verdict`` that ran both ways."""
    for (path, way), run in sorted(runs.items()):
        for name in sorted({*run.named(verdict)}.intersection(run.on_ranks or ())) if way is Way.DROP_IN else ():
            if own := get_recheck(runs, path, name):
                yield runs[path, Way.RECHECK], name, own


def find_unsorted(runs: Runs, reasons: Reasons, differences: Sequence[str]) -> Iterator[str]:
    """Describe the tests that fail with the drop-in for no listed reason, or that end otherwise without it.

    A test may end otherwise with the drop-in alone if its message without it matches one of ``differences``.
    """
    for (path, way), run in sorted(runs.items()):
        if way is Way.RECHECK and COLLECTION in run.outcomes:
            yield f"{path}: {run.describe()} with its own classes: {run.outcomes[COLLECTION][1]}"
        for name in run.named("failed") if way is Way.DROP_IN else ():
            if find_entry(run, name, reasons) is NOT_SORTED:
                yield f"{path}::{name} fails with the drop-in: {run.outcomes[name][1]}"
            elif (own := get_recheck(runs, path, name)) not in {"failed", None}:
                yield f"{path}::{name}: {own} with its own classes, failed with the drop-in"
    for verdict in ACTIONS:
        for run, name, own in iter_compared(runs, verdict):
            if own != verdict and not any(re.search(pattern, run.outcomes[name][1]) for pattern in differences):
                yield f"{run.path}::{name}: {own} with its own classes, {verdict} with the drop-in"


def find_entry(run: FileRun, name: str, reasons: Reasons) -> Mapping[str, str]:
    """Return the first reason whose pattern is in the message of the test."""
    return next((entry for entry in reasons if re.search(entry["message"], run.outcomes[name][1])), NOT_SORTED)


def get_recheck(runs: Runs, path: str, name: str) -> str | None:
    """Return the verdict of the test with the project's own classes, or None if it did not run so."""
    run = runs.get((path, Way.RECHECK))
    return run.outcomes[name][0] if run and name in run.outcomes else None
