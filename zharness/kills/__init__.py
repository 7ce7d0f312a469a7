"""The kill matrix: mutants x checks, and what follows from it for both."""

from zharness.kills.cells import Attempts, attempts, target_case
from zharness.kills.runner import MutantRunner

__all__ = ["Attempts", "MutantRunner", "attempts", "target_case"]
