"""Render one row for each engine and mesh: how many laws ran, and how their cells ended."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.report.engine_names import name_engines
from zharness.run.outcomes import group_records
from zharness.run.record import Record, Verdict

HEAD = ["engine", "ranks and mesh", "stages", "laws run", "cells run", "pass", "expected failures", "others", "tier X"]
EXACT = "X"


def render_combinations(records: Sequence[Record]) -> str:
    """Render a Markdown table with a row for each engine and mesh of ``records``, in their order."""
    names = name_engines(records)
    groups = group_records(
        records, lambda record: (names.get(record.cell.engine_label, record.cell.engine_label), record.cell.world_label)
    )
    rows = [[*key, *count_cells_run(group)] for key, group in groups.items()]
    return tabulate(rows, HEAD, tablefmt="github")


def count_cells_run(records: Sequence[Record]) -> list[str]:
    """Return stages, laws, cells, passes, expected failures, other outcomes, and the share of passes at tier X."""
    run = [record for record in records if record.verdict is not Verdict.UNSUPPORTED]
    passed = [record for record in run if record.verdict is Verdict.PASS]
    expected = [record for record in run if record.verdict is Verdict.CONTRACT or record.expected_failure]
    exact = sum(record.tier == EXACT for record in passed)
    return [
        ", ".join(map(str, sorted({record.cell.stage for record in run}))),
        str(len({record.cell.law for record in run})),
        str(len(run)),
        str(len(passed)),
        str(len(expected)),
        str(len(run) - len(passed) - len(expected)),
        f"{exact / len(passed):.0%}" if passed else "-",
    ]
