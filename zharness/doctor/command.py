"""Run all inspections of ``zharness doctor`` and print their findings."""

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
    """Run every inspection, print the findings as a table or as JSON, and return the exit code.

    ``cache`` is the folder in which engine releases are cached.
    """
    ranks = inspect_two_ranks()  # first: no rank can be forked once this process has run a tensor operation
    findings = [*inspect_versions(), *inspect_machine(cache), *inspect_fork_support(), ranks, *inspect_torch_settings()]
    click.echo(
        json.dumps([finding.as_json() for finding in findings], indent=2) if as_json else render_findings(findings)
    )
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if any finding has severity PROBLEM, else 0; warnings do not change the exit code."""
    return int(any(finding.severity is Severity.PROBLEM for finding in findings))


def render_findings(findings: Sequence[Finding]) -> str:
    """Return a table of the findings with a remedy for each warning and problem, then the numbers of both."""
    rows = [
        (
            finding.severity.value,
            finding.title,
            finding.observation + (f"\n-> {finding.remedy}" if finding.remedy else ""),
        )
        for finding in findings
    ]
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    table = tabulate(rows, tablefmt="plain", maxcolwidths=[None, None, MAX_COLUMN_WIDTH], disable_numparse=True)
    return f"{table}\n\n{counts[Severity.PROBLEM]} problems, {counts[Severity.WARNING]} warnings"
