"""Describe one Hypothesis example on one rank: its status, its error and its drawn values, as short texts."""

from __future__ import annotations

import hashlib
import re
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from zharness.pytest_ranks.rank_text import format_ranks

MAX_TEXT_LENGTH = 200  # characters of an error or an example that ranks exchange; the rest is replaced by a digest

RETURNED = "had returned from the test"  # a rank that ended an example without an exception


class ExampleStatus(Enum):
    """The status of one Hypothesis example on one rank; ENDED means that the rank runs no further example."""

    PASSED = "passed"
    REJECTED = "rejected"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    FAILED = "failed"
    STOPPED = "stopped"  # Hypothesis stopped the example in the middle of a draw
    BLOCKED = "blocked"  # the rank waited for a rank that had left the example
    ENDED = "ended"


@dataclass(frozen=True)
class ExampleVerdict:
    """The verdict of one rank on one Hypothesis example.

    ``origin`` is the key by which Hypothesis identifies the failure, and ``traceback`` its traceback. ``arguments`` is
    the text of the drawn arguments. ``choices`` is the text of all drawn values, including those of ``data()``.
    ``scores`` contains the values that the test passed to ``target()``.
    """

    status: ExampleStatus
    text: str = ""
    origin: object = None
    arguments: str = ""
    choices: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    traceback: str = ""


def make_verdict(error: BaseException | None, arguments: str, example: Any) -> ExampleVerdict:
    """Make the verdict on ``example``, Hypothesis' ConjectureData; ``error`` is the example's exception, or None."""
    status = classify_error(error)
    origin = find_error_origin(error) if error is not None and status is ExampleStatus.FAILED else None
    text = summarize_error(error) if error is not None else ""
    scores, trace = dict(example.target_observations), format_test_traceback(error)
    return ExampleVerdict(status, text, origin, arguments, format_choices(example), scores, trace)


def format_choices(example: Any) -> str:
    """Format all values that have been drawn so far in ``example``, Hypothesis' ConjectureData."""
    drawn = getattr(example, "choices", None)  # older versions of Hypothesis have a buffer of bytes instead
    return _truncate_text(repr(list(getattr(example, "buffer", ()) if drawn is None else drawn)))


def classify_error(error: BaseException | None) -> ExampleStatus:
    """Return the status of an example in which the test's body raised ``error``."""
    from hypothesis.errors import StopTest, UnsatisfiedAssumption

    if error is None:
        return ExampleStatus.PASSED
    statuses_by_type = {
        StopTest: ExampleStatus.STOPPED,
        UnsatisfiedAssumption: ExampleStatus.REJECTED,
        pytest.skip.Exception: ExampleStatus.SKIPPED,
        unittest.SkipTest: ExampleStatus.SKIPPED,
        pytest.xfail.Exception: ExampleStatus.XFAILED,
    }
    return next((status for cls, status in statuses_by_type.items() if isinstance(error, cls)), ExampleStatus.FAILED)


def find_error_origin(error: BaseException, visited: tuple[BaseException, ...] = ()) -> object:
    """Return the key by which Hypothesis identifies a failure.

    The key consists of the type, file and line of the error and of its inner errors. Inner errors are the error's
    ``__context__`` and the members of an exception group. ``visited`` contains the errors that were already visited,
    which guards against cycles.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    location = (frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else None
    visited = (*visited, error)
    related = [error.__context__, *getattr(error, "exceptions", ())]
    inner = [
        find_error_origin(other, visited)
        for other in related
        if isinstance(other, BaseException) and other not in visited
    ]
    return (f"{type(error).__module__}.{type(error).__qualname__}", location, tuple(inner))


def format_arguments(drawn_values: dict[str, Any]) -> str:
    """Format drawn values as ``x=1, y=[]``, truncated and without memory addresses, which differ between ranks."""
    text = ", ".join(f"{name}={_safe_repr(value)}" for name, value in drawn_values.items())
    return _truncate_text(re.sub(r"\b0x[0-9a-fA-F]+", "0x...", text))


def _safe_repr(value: object) -> str:
    """Return ``repr(value)``, or the name of the value's type if ``repr`` raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a faulty repr of user code must not fail the example
        return type(value).__qualname__


def summarize_error(error: BaseException) -> str:
    """Return the type of an error and the first line of the error's message, truncated."""
    message = str(error).strip().partition("\n")[0]
    return _truncate_text(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _truncate_text(text: str) -> str:
    """Truncate a long text and append a SHA-256 digest of the whole text, so that different texts stay different."""
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return f"{text[:MAX_TEXT_LENGTH]}... (sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]})"


def format_test_traceback(error: BaseException | None) -> str:
    """Format the traceback of a failure, starting at the test's own frame.

    Returns the empty string if the example did not fail.
    """
    if classify_error(error) is not ExampleStatus.FAILED or error is None or error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))


def describe_departure(verdict: ExampleVerdict) -> str:
    """Describe how a rank ended an example, or where it waited."""
    return verdict.text or (RETURNED if verdict.status is ExampleStatus.PASSED else verdict.status.value)


def find_common_failure(message: str) -> str:
    """Return the line of an ExampleFailed that says which ranks failed and how; "" for the message of another error."""
    before, _, failure = message.partition("ExampleFailed: ")
    return failure.partition("\n")[0] if before in ("", f"{__package__}.hypothesis_sync.") else ""


def describe_by_rank(
    verdicts: list[ExampleVerdict], get_text: Callable[[ExampleVerdict], str], status: ExampleStatus | None = None
) -> str:
    """Describe the verdicts of all ranks in one line, as in "ranks 0-1, 3: x; rank 2: y".

    Ranks with the same text are listed together. ``verdicts`` are in rank order. If ``status`` is given, only verdicts
    with that status are included.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if status in (None, verdict.status):
            ranks_by_text.setdefault(get_text(verdict), []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())
