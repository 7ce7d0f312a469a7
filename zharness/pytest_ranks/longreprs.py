"""Failures as pytest shows them: a rank's own with the rank in front, and those of which no rank could tell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

# What a failed report has to be made of so that the terminal, xdist and junit treat it like any other. There is no
# public way to build one without an exception at hand.
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
    """The report's failure, which the short summary tells with ``headline``; ``sections`` follow its traceback."""
    longrepr = report.longrepr
    if not isinstance(longrepr, ExceptionChainRepr | ReprExceptionInfo):
        place = (longrepr[0], longrepr[1]) if isinstance(longrepr, tuple) else locate_failure(item)
        body = ReprEntryNative([f"{report.longreprtext}\n"])
        whole: ExceptionRepr = ReprExceptionInfo(
            ReprTraceback([body], None, "native"), ReprFileLocation(*place, headline)
        )
        return add_sections(whole, sections)
    # Made anew, not changed: other reports, and the facts, keep theirs.
    crash = longrepr.reprcrash
    place = (crash.path, crash.lineno) if crash is not None else locate_failure(item)
    told = ReprFileLocation(*place, headline)
    if isinstance(longrepr, ExceptionChainRepr):
        traceback, _, description = longrepr.chain[-1]
        whole = ExceptionChainRepr([*longrepr.chain[:-1], (traceback, told, description)])
    else:
        whole = ReprExceptionInfo(longrepr.reprtraceback, told)
    whole.sections.extend(longrepr.sections)
    return add_sections(whole, sections)


def build_longrepr(
    item: pytest.Item, location: tuple[str, int], headline: str, text: str, sections: Sections
) -> ExceptionRepr:
    """A failure without an exception of ours: what there is to read, then ``headline`` in red, and ``place``."""
    crash = ReprFileLocation(*location, headline)
    lines = [f"E   {line}" for line in headline.splitlines()]
    file = item.location[0] if location[0] == str(item.path) else location[0]
    last = ReprFileLocation(file, location[1], f"in {item.name}")
    entries: list[ReprEntry | ReprEntryNative] = [ReprEntry(lines, None, None, last, "long")]
    if text:
        entries.insert(0, ReprEntryNative([f"{text}\n"]))
    return add_sections(ReprExceptionInfo(ReprTraceback(entries, None, "long"), crash), sections)


def add_sections(longrepr: ExceptionRepr, sections: Sections) -> ExceptionRepr:
    """Sections of the failure, not of the report: those are shown with ``--show-capture=no`` as well."""
    for title, text in sections:
        longrepr.addsection(title, text)
    return longrepr


def locate_failure(item: pytest.Item, message: str = "") -> tuple[str, int]:
    """The item's file, with the line that ``words`` name in it, as in ``(test_x.py, line 7)``, or else the item's."""
    for file, line in _LOCATION_PATTERN.findall(message):
        if Path(file).name == item.path.name:
            return str(item.path), int(line)
    return str(item.path), (item.location[1] or 0) + 1
