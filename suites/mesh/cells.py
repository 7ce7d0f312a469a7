"""Run single cells on meshes, and say why a cell cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zharness.cell import Cell
from zharness.engines.registry import capabilities
from zharness.engines.warm_up import build_warm_up_environment
from zharness.laws import get_law
from zharness.run import PlannedCell, Runner, Verdict
from zharness.run.cell_planner import plan_cell


@contextmanager
def start_runner(engine: str, seed: int = 0) -> Iterator[Runner]:
    """Return a context with a runner of cells, whose ranks have imported what ``engine`` needs."""
    with Runner({engine: build_warm_up_environment(engine)}, seed=seed) as runner:
        yield runner


def check_cell(runner: Runner, case: str, verdict: Verdict) -> None:
    """Check that a cell ends with ``verdict``, and that a failure is an expected one."""
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.is_expected, record.cause
    assert record.verdict is verdict, record.cause


def find_refusal(case: str) -> str:
    """Return the reason why no rank starts for a cell, or '' if it can run."""
    cell = Cell.parse(case)
    claims = capabilities(cell.engine, cell.stage)
    assert claims is not None
    return plan_cell(get_law(cell.law), cell, claims).unsupported_reason
