"""Run the same tests on ranks and without ranks beside a plugin, and compare what pytest says of both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from suites.world.faults.sessions import Session, SessionResult

WITHOUT_RANKS = "without ranks"
ISOLATIONS = ("fresh", "pooled")
HEAD = """
import pytest, torch, torch.distributed as dist
ranks = {decorator}
"""
ON_RANKS, ALONE = "pytest.mark.world_size(2)", "lambda test: test"


@dataclass(frozen=True)
class Beside:
    """The sessions of one file beside plugins: on fresh ranks, on pooled ranks, and without ranks."""

    by_mode: Mapping[str, SessionResult]

    @property
    def on_ranks(self) -> dict[str, SessionResult]:
        """Return the sessions on ranks by isolation."""
        return {mode: self.by_mode[mode] for mode in ISOLATIONS}

    def assert_same_verdicts(self, *, in_order: bool = True) -> None:
        """Assert that ids, outcomes of reports, counts and exit status on ranks are those without ranks.

        Reports of one test may come in another order if ``in_order`` is False.
        """
        expected = summarize(self.by_mode[WITHOUT_RANKS], in_order)
        for mode, session in self.on_ranks.items():
            found = summarize(session, in_order)
            assert found == expected, f"{mode}: {found}, but without ranks {expected}:\n{session.output}"
            assert not session.leftovers, f"{mode}: {session.leftovers}"


def summarize(session: SessionResult, in_order: bool) -> tuple[object, ...]:
    """Return the outcomes of every test by id without world size, the counts of the last line, and the exit status."""
    outcomes = {
        name.replace("[w2-", "[").replace("[w2]", ""): [(report.when, report.outcome) for report in test.reports]
        for name, test in session.tests.items()
    }
    if not in_order:
        outcomes = {name: sorted(reports) for name, reports in outcomes.items()}
    return outcomes, read_counts(session.output), session.status


def read_counts(output: str) -> dict[str, int]:
    """Return the numbers at the end of a session's output by outcome, such as ``{"passed": 1}``."""
    if "\nResults (" in output:  # pytest-sugar has one line for each
        results = output.rpartition("\nResults (")[2]
        return {name: int(number) for number, name in re.findall(r"^ +(\d+) ([a-z]+)$", results, re.MULTILINE)}
    *_, last = (line for line in output.splitlines() if re.search(r" in [\d.]+s", line))
    return {name: int(number) for number, name in re.findall(r"(\d+) ([a-z][a-z ]*?)(?:,| in )", last)}


def run_beside(
    folder: Path, source: str, *arguments: str, plugins: tuple[str, ...] = (), settings: str = "", without: str = ""
) -> Beside:
    """Run tests that are decorated with ``@ranks`` in three sessions at once, with no plugin but ``plugins``.

    ``without`` replaces ``source`` where there are no ranks. ``settings`` are further lines of pytest.ini.
    """
    started = {
        mode: start_beside(
            folder / mode,
            HEAD.format(decorator=ALONE if mode == WITHOUT_RANKS else ON_RANKS)
            + dedent(without if without and mode == WITHOUT_RANKS else source),
            *(() if mode == WITHOUT_RANKS else (f"--isolation={mode}",)),
            *arguments,
            plugins=plugins,
            settings=settings,
        )
        for mode in (*ISOLATIONS, WITHOUT_RANKS)
    }
    return Beside({mode: session.finish() for mode, session in started.items()})


def start_beside(folder: Path, source: str, *arguments: str, plugins: tuple[str, ...], settings: str = "") -> Session:
    """Start a session with no plugin but this package's and ``plugins``."""
    chosen = [option for plugin in ("zharness.plugin", *plugins) for option in ("-p", plugin)]
    options = (*chosen, "-p", "no:cacheprovider", "--tb=short", "--color=no", *arguments)
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return Session(folder, {"test_it.py": source}, *options, variables=variables, settings=settings)
