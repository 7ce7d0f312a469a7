"""Note what a pytest plugin hears that has the hooks by which VS Code and other editors follow a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def note(text: str) -> None:
    """Append a line to ``heard.txt`` in the working directory of the session."""
    with Path("heard.txt").open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the start of a test."""
    note(f"start {item.name}")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(report: pytest.TestReport) -> Iterator[None]:
    """Note the outcome of a phase, as VS Code does when the terminal asks for it."""
    note(f"{report.when} {report.outcome} {report.nodeid}")
    return (yield)


def pytest_exception_interact(node: pytest.Item, report: pytest.TestReport) -> None:
    """Note a failure, by which VS Code hears about set-up."""
    note(f"failure in {report.when} of {node.name}")
