"""Render the runs of DeepSpeed's files as Markdown tables, and find the outcomes that no exception explains.

An exception has ``tests``, a regular expression, a ``reason``, and a ``kind``. Tests of the kinds in ``WITHOUT_LAW``
state no law about the engine: they read DeepSpeed's internals or files, need a feature that the reference engine lacks,
ask for a limit of DeepSpeed, or refuse this machine themselves. A test of the kind ``decided`` states a law in which
the reference engine differs, and one of the kind ``open`` a law that the stand-in does not follow yet. With
``verdict = "passed"`` an exception names tests that pass without running, for example because they return on a CPU;
they count as tests without law. The list ``uncollectable`` has the files that cannot be imported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from deepspeed_files.runs import KILLED, FileRun, Way

WITHOUT_LAW = ("internals", "feature", "limit", "machine")
NOT_LISTED = "unexpected"
Runs = Mapping[tuple[str, Way], FileRun]
Exceptions = Mapping[str, list[dict[str, Any]]]


def render_drop_in(runs: Runs) -> str:
    """Return the table that compares DeepSpeed's own fixtures with the drop-in, test by test."""
    rows = []
    for (path, way), own in sorted(runs.items()):
        swapped = runs.get((path, Way.DROP_IN))
        if way is Way.OWN and swapped is not None:
            same = sum(get_verdict(swapped, name) == get_verdict(own, name) for name in own.outcomes)
            more = " or more" if own.status == KILLED else ""
            ratio, cpu_ratio = (
                f"{before / max(after, 0.1):.1f} x{more}"
                for before, after in ((own.seconds, swapped.seconds), (own.cpu_seconds, swapped.cpu_seconds))
            )
            times = [own.seconds, swapped.seconds, ratio, own.cpu_seconds, swapped.cpu_seconds, cpu_ratio]
            names = f"{same} of {len(own.outcomes)}"
            rows.append([format_path(path), own.describe(), swapped.describe(), names, *times])
    times_header = ["own s", "drop-in s", "ratio", "own CPU s", "drop-in CPU s", "CPU ratio"]
    headers = ["file", "own fixtures", "drop-in", "same", *times_header]
    return tabulate(rows, headers, tablefmt="github", floatfmt=".0f")


def render_stand_in(runs: Runs, listed: Exceptions) -> str:
    """Return the table of the files on the reference engine, with the share of the tests that state a law."""
    rows, total = [], Counter[str]()
    for (path, way), run in sorted(runs.items()):
        if way is Way.STAND_IN:
            kinds = Counter(classify(run, listed, "failed").values())
            passed = list(classify(run, listed, "passed").values()).count(NOT_LISTED)
            with_law = passed + sum(count for kind, count in kinds.items() if kind not in WITHOUT_LAW)
            others = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            rows.append([format_path(path), run.describe(), with_law, passed, others])
            total.update(passed=passed, with_law=with_law)
    rows.append(["all", "", total["with_law"], total["passed"], f"{total['passed'] / max(total['with_law'], 1):.1%}"])
    return tabulate(rows, ["file", "outcomes", "state a law", "pass", "failures"], tablefmt="github")


def find_unexpected(runs: Runs, listed: Exceptions, differences: Sequence[str]) -> Iterator[str]:
    """Describe runs that did not end, failures on the reference engine that no exception names, and differences.

    A test may end otherwise with the drop-in if its own message matches one of ``differences``.
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
            for name, (verdict, message) in run.outcomes.items():
                other = get_verdict(swapped, name)
                if verdict != other and not any(re.search(pattern, message) for pattern in differences):
                    yield f"{path}::{name}: {verdict} with its own fixtures, {other} with the drop-in"


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
