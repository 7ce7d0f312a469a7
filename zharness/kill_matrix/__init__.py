"""The kill matrix: which law kills which mutant, and which laws and mutants it calls into question."""

from zharness.kill_matrix.cells import KillAttempts, make_target_cell, plan_kill_attempts
from zharness.kill_matrix.mutant_runner import MutantRunner

__all__ = ["KillAttempts", "MutantRunner", "make_target_cell", "plan_kill_attempts"]
