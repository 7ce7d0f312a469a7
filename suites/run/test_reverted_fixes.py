"""The script that reverts fixes counts a failure only if the same cell holds with the fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.reverted_fixes import CheckRun, TierRun, list_failures, list_holding, run_tier

RECORDS = [
    {"case": "a", "verdict": "contract"},
    {"case": "b", "verdict": "crash", "excuse": "an entry"},
    {"case": "c", "verdict": "fail", "excuse": ""},
    {"case": "leaks", "verdict": "pass", "excuse": "", "pool_difference": "fail on ranks that earlier cells had used"},
    {"case": "stale", "verdict": "pass", "excuse": "", "stale": "the law holds, but was expected to fail"},
    {"case": "d", "verdict": "pass"},
]


def test_documented_differences_and_expected_failures_are_no_failures() -> None:
    assert list_failures(RECORDS) == ["c", "leaks", "stale"]
    assert list_holding(RECORDS) == ["a", "b", "d"]


def run_cells(verdicts: Sequence[tuple[str, str]], of_base: Sequence[str], max_seconds: float = 120.0) -> TierRun:
    """Run a tier of cells of 10 seconds each, one at a time, of which ``of_base`` fail on the base too."""
    rest = list(verdicts)

    def run_rest(seconds: float, files: Sequence[Path]) -> tuple[CheckRun, Path]:
        """Run the rest until a cell fails."""
        assert len(files) == len({*files})
        records = list[dict[str, Any]]()
        while rest and len(records) * 10 < seconds:
            cell, verdict = rest.pop(0)
            records.append({"case": cell, "verdict": verdict, "seconds": 10.0})
            if verdict != "pass":
                break
        return CheckRun(records, f"{len(rest)} left"), Path(f"{len(files)}.jsonl")

    return run_tier(run_rest, lambda failures: [each for each in failures if each in of_base], max_seconds, 1)


CELLS = (("a", "pass"), ("b", "fail"), ("c", "pass"), ("d", "crash"), ("e", "fail"))


def test_a_cell_that_fails_with_the_fix_too_does_not_end_the_tier() -> None:
    run = run_cells(CELLS, of_base=["b"])
    assert (run.first_failure, run.failures_of_base) == ("d", ("b",))
    assert [record["case"] for record in run.records] == ["a", "b", "c", "d"]


def test_a_tier_whose_failures_are_all_of_the_base_notices_nothing() -> None:
    run = run_cells(CELLS, of_base=["b", "d", "e"])
    assert (run.first_failure, run.failures_of_base) == ("", ("b", "d", "e"))
    assert (len(run.records), run.last_line) == (5, "0 left")


def test_a_tier_that_goes_on_has_the_seconds_that_are_left() -> None:
    run = run_cells(CELLS, of_base=["b", "d"], max_seconds=40.0)
    assert (run.first_failure, len(run.records), run.last_line) == ("", 4, "1 left")
