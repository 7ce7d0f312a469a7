"""Signatures of expected failures, which may leave the numbers of a seed open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zharness.run.expected_failures import ExpectedFailure

ENTRY = ExpectedFailure("reference", "training.grads", "x", "y", "fail", ("z",))


@pytest.mark.parametrize(
    ("cause", "matches"),
    [
        ("shift[7] (owned by rank 1); it is -0.5 x the right one", True),
        ("shift[0] (owned by rank 1); it is 1.5e-07 x the right one", True),
        ("shift[0] (owned by rank 1); it is x the right one", False),
        ("shift[a] (owned by rank 1); it is 2 x the right one", False),
        ("shift[7] (owned by rank 0); it is 2 x the right one", False),
    ],
)
def test_a_signature_may_leave_numbers_open(cause: str, matches: bool) -> None:
    signature = "shift[{number}] (owned by rank 1); it is {number} x the right one"
    entry = replace(ENTRY, signatures=(signature,))
    assert entry.describes_failure("fail", cause, "") is matches
    assert entry.subsumes(replace(entry, signatures=(cause,))) is matches
    assert entry.subsumes(entry)
