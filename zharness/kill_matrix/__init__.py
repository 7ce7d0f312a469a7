"""The kill matrix: which law kills which mutant, and what that says about both."""

from zharness.kill_matrix.cells import KillAttempts, make_target_cell, plan_kill_attempts
from zharness.kill_matrix.mutant_runner import MutantRunner

__all__ = ["KillAttempts", "MutantRunner", "make_target_cell", "plan_kill_attempts"]
