"""Build the failure representations (longreprs) that pytest shows for a test on several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

# The terminal, xdist and junit-xml render these classes. There is no public way to build them without an exception.
from _pytest._code.code import (
    ExceptionChainRepr,
    ExceptionRepr,
    ReprEntry,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

Sections = Iterable[tuple[str, str]]

_LOCATION_PATTERN = re.compile(r"\(([^()]+), line (\d+)\)")


def replace_headline(item: pytest.Item, report: pytest.TestReport, headline: str, sections: Sections) -> ExceptionRepr:
    """Return a copy of a report's failure with another line in the short summary and additional sections.

    ``headline`` becomes the line in the short summary, and ``sections`` follow the traceback. The original report stays
    unchanged, because the merged report and the problem share it.
    """
    longrepr = report.longrepr
    if not isinstance(longrepr, ExceptionChainRepr | ReprExceptionInfo):
        location = (longrepr[0], longrepr[1]) if isinstance(longrepr, tuple) else locate_failure(item)
        body = ReprEntryNative([f"{report.longreprtext}\n"])
        copy: ExceptionRepr = ReprExceptionInfo(
            ReprTraceback([body], None, "native"), ReprFileLocation(*location, headline)
        )
        return add_sections(copy, sections)
    crash = longrepr.reprcrash
    location = (crash.path, crash.lineno) if crash is not None else locate_failure(item)
    new_crash = ReprFileLocation(*location, headline)
    if isinstance(longrepr, ExceptionChainRepr):
        traceback, _, description = longrepr.chain[-1]
        copy = ExceptionChainRepr([*longrepr.chain[:-1], (traceback, new_crash, description)])
    else:
        copy = ReprExceptionInfo(longrepr.reprtraceback, new_crash)
    copy.sections.extend(longrepr.sections)
    return add_sections(copy, sections)


def build_longrepr(
    item: pytest.Item, location: tuple[str, int], headline: str, text: str, sections: Sections
) -> ExceptionRepr:
    """Build a failure representation from texts, without an exception object.

    The representation shows ``text``, then ``headline`` as the error line at ``location``.
    """
    crash = ReprFileLocation(*location, headline)
    lines = [f"E   {line}" for line in headline.splitlines()]
    file = item.location[0] if location[0] == str(item.path) else location[0]
    error_location = ReprFileLocation(file, location[1], f"in {item.name}")
    entries: list[ReprEntry | ReprEntryNative] = [ReprEntry(lines, None, None, error_location, "long")]
    if text:
        entries.insert(0, ReprEntryNative([f"{text}\n"]))
    return add_sections(ReprExceptionInfo(ReprTraceback(entries, None, "long"), crash), sections)


def add_sections(longrepr: ExceptionRepr, sections: Sections) -> ExceptionRepr:
    """Add sections to the failure representation itself.

    ``--show-capture=no`` hides the sections of a report, but not the sections of the failure representation.
    """
    for title, text in sections:
        longrepr.addsection(title, text)
    return longrepr


def locate_failure(item: pytest.Item, message: str = "") -> tuple[str, int]:
    """Return the item's file and the number of a line in that file.

    The line is the one that ``message`` names, as in ``(test_x.py, line 7)``, or else the line of the test function.
    """
    for file, line in _LOCATION_PATTERN.findall(message):
        if Path(file).name == item.path.name:
            return str(item.path), int(line)
    return str(item.path), (item.location[1] or 0) + 1
