"""Sort the tests that fail with the drop-in, where it ran alone, choose which tests to compare, and render tables.

A reason has ``message``, a regular expression, a ``reason``, and a ``kind``: ``machine`` for what this machine lacks,
``deepspeed`` for a fault of DeepSpeed or of its test, ``drop-in`` for a fault of the drop-in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from deepspeed_files.recording import draw_names
from deepspeed_files.runs import COLLECTION, FileRun, Way
from deepspeed_files.tables import Runs, format_path

NOT_SORTED = {"kind": "unexpected", "reason": "not sorted yet"}
VERDICTS = ("passed", "skipped", "failed")
_NUMBERS = re.compile(r"\d+")
Reasons = Sequence[Mapping[str, str]]


def choose_rechecks(run: FileRun, passes: int, seed: int) -> tuple[str, ...]:
    """Return the first failed and skipped test of each message, numbers in it apart, and ``passes`` passed by ``seed``.

    A test outside of a class starts no ranks and runs the same in both ways, so that no pass or skip of one is taken.
    """
    first: dict[tuple[str, str], str] = {}
    for verdict in ("failed", "skipped"):
        for name in sorted(run.named(verdict)):
            if verdict == "failed" or "::" in name:
                first.setdefault((verdict, _NUMBERS.sub("", run.outcomes[name][1])), name)
    in_classes = sorted(name for name in run.named("passed") if "::" in name)
    return (*first.values(), *draw_names(in_classes, passes, seed))


def render_whole(runs: Runs, reasons: Reasons) -> list[str]:
    """Return the table of the files with what the drop-in did, that of the reasons if tests failed, and the passes."""
    rows = [run for (_, way), run in sorted(runs.items()) if way is Way.DROP_IN]
    counts = [[len({*run.named(verdict)} - {COLLECTION}) for verdict in VERDICTS] for run in rows]
    cells: list[list[Any]] = [
        [format_path(run.path), run.describe(), sum(found), run.seconds, run.cpu_seconds]
        for run, found in zip(rows, counts, strict=True)
    ]
    passed, skipped, failed = (sum(column) for column in zip(*counts, strict=True))
    total = f"{passed} passed, {skipped} skipped, {failed} failed"
    cells.append(["all", total, passed + skipped + failed, *(sum(round(row[at]) for row in cells) for at in (3, 4))])
    headers = ["file", "drop-in", "tests", "s", "CPU s"]
    files = tabulate(cells, headers, tablefmt="github", floatfmt=".0f")
    return [files, *([render_reasons(runs, reasons)] if failed else []), *iter_comparisons(runs)]


def iter_comparisons(runs: Runs) -> Iterator[str]:
    """Yield a sentence for the passes and one for the skips with the drop-in that ran with own fixtures too."""
    for verdict, action in (("passed", "pass"), ("skipped", "are skipped")):
        own = [found for *_, found in iter_compared(runs, verdict)]
        if own:
            counts = f"{own.count(verdict)} of {len(own)} tests that {action} with the drop-in"
            yield f"{counts} and also ran with DeepSpeed's own fixtures {action} there too."


def render_reasons(runs: Runs, reasons: Reasons) -> str:
    """Return the table of the reasons, and how many of the tests fail that ran with DeepSpeed's own fixtures too."""
    rows: dict[tuple[str, str], list[tuple[FileRun, str]]] = defaultdict(list)
    for (_, way), run in sorted(runs.items()):
        for name in run.named("failed") if way is Way.DROP_IN else ():
            found = find_entry(run, name, reasons)
            rows[found["kind"], found["reason"]].append((run, name))
    cells = []
    for (kind, reason), tests in sorted(rows.items()):
        checked = [verdict for run, name in tests if (verdict := get_recheck(runs, run.path, name))]
        own = f"{checked.count('failed')} of {len(checked)} fail"
        cells.append([kind, reason, len({run.path for run, _ in tests}), len(tests), own])
    return tabulate(cells, ["kind", "reason", "files", "tests", "own fixtures"], tablefmt="github")


def iter_compared(runs: Runs, verdict: str) -> Iterator[tuple[FileRun, str, str]]:
    """Yield run, name and verdict with own fixtures of each test with ``verdict`` with the drop-in that ran so too."""
    for (path, way), run in sorted(runs.items()):
        for name in sorted(run.named(verdict)) if way is Way.DROP_IN else ():
            if own := get_recheck(runs, path, name):
                yield runs[path, Way.RECHECK], name, own


def find_unsorted(runs: Runs, reasons: Reasons, differences: Sequence[str]) -> Iterator[str]:
    """Describe the tests that fail with the drop-in for no listed reason, or that end otherwise without it.

    A test may pass with the drop-in alone if its message without it matches one of ``differences``.
    """
    for (path, way), run in sorted(runs.items()):
        if way is Way.RECHECK and COLLECTION in run.outcomes:
            yield f"{path}: {run.describe()} with its own fixtures: {run.outcomes[COLLECTION][1]}"
        for name in run.named("failed") if way is Way.DROP_IN else ():
            if find_entry(run, name, reasons) is NOT_SORTED:
                yield f"{path}::{name} fails with the drop-in: {run.outcomes[name][1]}"
            elif (own := get_recheck(runs, path, name)) not in {"failed", None}:
                yield f"{path}::{name}: {own} with its own fixtures, failed with the drop-in"
    for verdict in ("passed", "skipped"):
        for run, name, own in iter_compared(runs, verdict):
            if own != verdict and not any(re.search(pattern, run.outcomes[name][1]) for pattern in differences):
                yield f"{run.path}::{name}: {own} with its own fixtures, {verdict} with the drop-in"


def find_entry(run: FileRun, name: str, reasons: Reasons) -> Mapping[str, str]:
    """Return the first reason whose pattern is in the message of the test."""
    return next((entry for entry in reasons if re.search(entry["message"], run.outcomes[name][1])), NOT_SORTED)


def get_recheck(runs: Runs, path: str, name: str) -> str | None:
    """Return the verdict of the test with DeepSpeed's own fixtures, or None if it did not run so."""
    run = runs.get((path, Way.RECHECK))
    return run.outcomes[name][0] if run and name in run.outcomes else None
