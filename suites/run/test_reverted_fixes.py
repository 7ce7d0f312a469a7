"""The script that reverts fixes counts a failure only if the same cell holds with the fix."""

from __future__ import annotations

from scripts.reverted_fixes import Notice, judge_failures, list_failures, list_holding

RECORDS = [
    {"case": "a", "verdict": "contract"},
    {"case": "b", "verdict": "crash", "excuse": "an entry"},
    {"case": "c", "verdict": "fail", "excuse": ""},
    {"case": "d", "verdict": "pass"},
]


def test_documented_differences_and_expected_failures_are_no_failures() -> None:
    assert list_failures(RECORDS) == ["c"]
    assert list_holding(RECORDS) == ["a", "b", "d"]


def test_a_cell_that_fails_with_the_fix_too_does_not_count() -> None:
    assert judge_failures(["c", "d"], ["d"]) == (Notice.NOTICED, "d")
    assert judge_failures(["c"], ["d"]) == (Notice.NOT_COUNTED, "c")
    assert judge_failures([], ["d"]) == (Notice.MISSED, "")
