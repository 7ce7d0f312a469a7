"""The laws as library functions: what a rank observes, and how a judge that never saw the engine decides."""

from zharness.checks.bench import Bench
from zharness.checks.dtypes import DTYPES, LOSS_SCALES
from zharness.checks.law import Check
from zharness.checks.registry import CHECKS, check_named, find_checks
from zharness.checks.trial import Trial

__all__ = ["CHECKS", "DTYPES", "LOSS_SCALES", "Bench", "Check", "Trial", "check_named", "find_checks"]
