"""Write records as JUnit XML, in pytest's form, which CI services read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from zharness.run.files import write_atomically
from zharness.run.outcomes import outcome_name
from zharness.run.record import Record

# The tag and type of each outcome, as pytest writes them; an outcome without an entry passes.
JUNIT_TAGS = {
    "fail": ("failure", ""),
    "crash": ("failure", ""),
    "hang": ("failure", ""),
    "stale": ("failure", ""),
    "undetermined": ("failure", ""),
    "leak": ("failure", ""),
    "error": ("error", ""),
    "excused": ("skipped", "pytest.xfail"),
    "contract": ("skipped", "pytest.xfail"),
    "unsupported": ("skipped", "pytest.skip"),
}
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def write_junit(records: Sequence[Record], seconds: float, path: Path) -> None:
    """Write the XML file atomically. Raises UsageError if the file cannot be written."""
    root = build_testsuites(records, seconds)
    indent(root)
    write_atomically(f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n', path)


def build_testsuites(records: Sequence[Record], seconds: float) -> Element:
    """Build the XML: one test suite, with a test case for each cell."""
    tags = [JUNIT_TAGS[outcome_name(record)][0] for record in records if outcome_name(record) in JUNIT_TAGS]
    root = Element("testsuites", name="zharness")
    suite = SubElement(
        root,
        "testsuite",
        name="zharness",
        tests=str(len(records)),
        failures=str(tags.count("failure")),
        errors=str(tags.count("error")),
        skipped=str(tags.count("skipped")),
        time=f"{seconds:.3f}",
    )
    for record in records:
        add_testcase(suite, record)
    return root


def add_testcase(suite: Element, record: Record) -> None:
    """Add the test case of one cell: its id, its law as the class name, its seconds, and its failure."""
    testcase = SubElement(
        suite,
        "testcase",
        classname=strip_illegal_characters(f"{record.cell.engine_label}.{record.cell.law}"),
        name=strip_illegal_characters(record.cell.id),
        time=f"{record.seconds:.3f}",
    )
    outcome = outcome_name(record)
    if outcome not in JUNIT_TAGS:
        return
    tag, pytest_type = JUNIT_TAGS[outcome]
    reason = record.stale_reason or record.pool_difference or record.cause
    text = [
        reason,
        record.documentation_url or record.expected_failure,
        record.module_departures,
        record.details,
        f"again: {record.command}",
    ]
    attributes = {
        "message": strip_illegal_characters(f"{outcome}: {' '.join(reason.split())}"),
        **({"type": pytest_type} if pytest_type else {}),
    }
    result = SubElement(testcase, tag, attributes)
    result.text = strip_illegal_characters("\n\n".join(part for part in text if part))


def strip_illegal_characters(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return _ILLEGAL.sub("�", text)
