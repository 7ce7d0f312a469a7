"""Records as JUnit's XML, in the form that pytest writes and that CI services read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from zharness.report.matrix import outcome_name
from zharness.run.files import write_atomically
from zharness.run.record import Record

# What becomes of an outcome; pytest spells an expected failure the same way. What is not here passes.
JUNIT_TAGS = {
    "fail": ("failure", ""),
    "crash": ("failure", ""),
    "hang": ("failure", ""),
    "stale": ("failure", ""),
    "undetermined": ("failure", ""),
    "error": ("error", ""),
    "excused": ("skipped", "pytest.xfail"),
    "contract": ("skipped", "pytest.xfail"),
    "unsupported": ("skipped", "pytest.skip"),
}
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def write_junit(records: Sequence[Record], seconds: float, path: Path) -> None:
    """Write the file under a temporary name and rename it. Raises UsageError when it cannot be written."""
    root = build_testsuites(records, seconds)
    indent(root)
    write_atomically(f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n', path)


def build_testsuites(records: Sequence[Record], seconds: float) -> Element:
    """One suite, a test case for each cell: its id, the law as its class, seconds, and what went wrong."""
    told = [JUNIT_TAGS[outcome_name(record)][0] for record in records if outcome_name(record) in JUNIT_TAGS]
    root = Element("testsuites", name="zharness")
    suite = SubElement(
        root,
        "testsuite",
        name="zharness",
        tests=str(len(records)),
        failures=str(told.count("failure")),
        errors=str(told.count("error")),
        skipped=str(told.count("skipped")),
        time=f"{seconds:.3f}",
    )
    for record in records:
        add_testcase(suite, record)
    return root


def add_testcase(suite: Element, record: Record) -> None:
    """One cell."""
    case = SubElement(
        suite,
        "testcase",
        classname=strip_illegal_characters(f"{record.cell.engine_label}.{record.cell.law}"),
        name=strip_illegal_characters(record.cell.id),
        time=f"{record.seconds:.3f}",
    )
    word = outcome_name(record)
    if word not in JUNIT_TAGS:
        return
    tag, kind = JUNIT_TAGS[word]
    why = record.stale_reason or record.cause
    said = [
        why,
        record.documentation_url or record.expected_failure,
        record.module_departures,
        record.details,
        f"again: {record.command}",
    ]
    attributes = {
        "message": strip_illegal_characters(f"{word}: {' '.join(why.split())}"),
        **({"type": kind} if kind else {}),
    }
    found = SubElement(case, tag, attributes)
    found.text = strip_illegal_characters("\n\n".join(part for part in said if part))


def strip_illegal_characters(text: str) -> str:
    """``text`` without the characters that XML has no form for."""
    return _ILLEGAL.sub("�", text)
