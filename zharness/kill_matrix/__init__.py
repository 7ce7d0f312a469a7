"""The kill matrix, a table of which law kills which mutant, with checks for laws and mutants that have no use."""

from zharness.kill_matrix.cells import KillAttempts, make_target_cell, plan_kill_attempts
from zharness.kill_matrix.mutant_runner import MutantRunner

__all__ = ["KillAttempts", "MutantRunner", "make_target_cell", "plan_kill_attempts"]
