"""The doctor's visit: ranks first, since none can be forked from a process that has run a tensor operation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from zharness.doctor.finding import Finding, Severity
from zharness.doctor.machine import inspect_machine
from zharness.doctor.process import inspect_fork_support, inspect_torch_settings, inspect_versions
from zharness.doctor.ranks import inspect_two_ranks

MAX_COLUMN_WIDTH = 60  # characters of a column


def run_doctor(cache: Path, as_json: bool) -> int:
    """Print every finding; 1 where one is a problem. ``cache`` is where releases of engines are kept."""
    ranks = inspect_two_ranks()
    findings = [*inspect_versions(), *inspect_machine(cache), *inspect_fork_support(), ranks, *inspect_torch_settings()]
    click.echo(
        json.dumps([finding.as_json() for finding in findings], indent=2) if as_json else render_findings(findings)
    )
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where something keeps the harness from running or from proving anything; warnings do not."""
    return int(any(finding.severity is Severity.PROBLEM for finding in findings))


def render_findings(findings: Sequence[Finding]) -> str:
    """A table, what to do behind what is amiss, and one line to end it."""
    rows = [
        (
            finding.severity.value,
            finding.title,
            finding.observation + (f"\n-> {finding.remedy}" if finding.remedy else ""),
        )
        for finding in findings
    ]
    counts = {state: sum(finding.severity is state for finding in findings) for state in Severity}
    table = tabulate(rows, tablefmt="plain", maxcolwidths=[None, None, MAX_COLUMN_WIDTH], disable_numparse=True)
    return f"{table}\n\n{counts[Severity.PROBLEM]} problems, {counts[Severity.WARNING]} warnings"
