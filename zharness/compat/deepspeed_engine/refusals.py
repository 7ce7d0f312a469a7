"""Refuse what DeepSpeed refuses with an ``assert``, with an error that ``python -O`` does not remove."""

from __future__ import annotations

from zharness.errors import UsageError


class AssertionUsageError(UsageError, AssertionError):
    """Raised where DeepSpeed raises AssertionError, so that tests which expect that type pass on the stand-in too."""


def require(condition: object, message: str) -> None:
    """Raise AssertionUsageError with ``message`` unless ``condition`` is true."""
    if not condition:
        raise AssertionUsageError(message)
