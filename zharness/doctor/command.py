"""The doctor's visit: ranks first, since none can be forked from a process that has run a tensor operation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from zharness.doctor.finding import Finding, State
from zharness.doctor.machine import machine
from zharness.doctor.process import can_fork, settings, versions
from zharness.doctor.ranks import two_ranks

WIDEST = 60  # characters of a column


def doctor(cache: Path, as_json: bool) -> int:
    """Print every finding; 1 where one is a problem. ``cache`` is where releases of engines are kept."""
    ranks = two_ranks()
    findings = [*versions(), *machine(cache), *can_fork(), ranks, *settings()]
    click.echo(json.dumps([finding.as_json() for finding in findings], indent=2) if as_json else told(findings))
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where something keeps the harness from running or from proving anything; warnings do not."""
    return int(any(finding.state is State.PROBLEM for finding in findings))


def told(findings: Sequence[Finding]) -> str:
    """A table, what to do behind what is amiss, and one line to end it."""
    rows = [
        (finding.state.value, finding.what, finding.found + (f"\n-> {finding.remedy}" if finding.remedy else ""))
        for finding in findings
    ]
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    table = tabulate(rows, tablefmt="plain", maxcolwidths=[None, None, WIDEST], disable_numparse=True)
    return f"{table}\n\n{counts[State.PROBLEM]} problems, {counts[State.WARNING]} warnings"
