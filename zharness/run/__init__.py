"""Plan cells, run them on ranks, and record the results."""

from zharness.run.cell_planner import PlannedCell
from zharness.run.plan import Request, plan
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner

__all__ = ["PlannedCell", "Record", "Request", "Runner", "Verdict", "plan"]
