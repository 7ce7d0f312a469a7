"""A file of expected failures for tests, with one entry."""

from __future__ import annotations

from pathlib import Path

from zharness.run.expected_failures import ExpectedFailure
from zharness.run.user_failures import read_expected_failures

ENTRY = """
[[expected_failure]]
law = "training.grads"
upstream = "ours#1"
reason = "because"
verdict = "fail"
signatures = ["reduction"]
"""


def load_entries(folder: Path, text: str) -> tuple[ExpectedFailure, ...]:
    """Write ``text`` to a file in ``folder``, and return the expected failures that are read from it."""
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return read_expected_failures([path])
