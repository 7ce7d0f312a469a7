"""Cells planned, run and recorded."""

from zharness.run.plan import Planned, Request, plan
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner

__all__ = ["Planned", "Record", "Request", "Runner", "Verdict", "plan"]
