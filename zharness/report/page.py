"""The records as one self-contained page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zharness.errors import UsageError
from zharness.report.matrix import matrix, outcome
from zharness.report.sensitivity import sensitivity
from zharness.report.words import summary
from zharness.run.record import Record

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>zharness</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
pre, td, th { font-family: ui-monospace, monospace; font-size: 13px; }
pre { overflow-x: auto; background: #f4f4f4; padding: .8rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid #ccc; padding: .25rem .5rem; text-align: left; vertical-align: top; }
</style></head><body>
<h1>zharness</h1><p>{{ summary }}</p>
<h2>Matrix</h2><pre>{{ matrix }}</pre><pre>{{ sensitivity }}</pre>
<h2>Cells</h2>
<table><thead><tr><th>outcome</th><th>case</th><th>tier</th><th>error / bound</th><th>caught: scale error</th>
<th>lost elements</th><th>undetermined</th><th>cause</th></tr></thead><tbody>
{% for record in records %}<tr><td>{{ word(record) }}</td><td>{{ record.case.id }}</td><td>{{ record.tier or "" }}</td>
<td>{{ "%.3g" | format(record.ratio) if record.ratio is not none else "" }}</td>
<td>{{ "%.1e" | format(record.smallest) if record.smallest is not none else "" }}</td>
<td>{{ record.wrong_elements or "" }}</td>
<td>{{ "%d of %d" | format(record.undetermined, record.elements) if record.elements else "" }}</td>
<td>{{ record.stale or record.cause or record.notes | join("; ") }}</td></tr>
{% endfor %}</tbody></table></body></html>
"""


def check_writable(path: Path) -> None:
    """Raises UsageError when a page cannot be written to ``path``: before a long run, not after it."""
    try:
        partial_of(path).touch()
        partial_of(path).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}; name a writable place") from error


def partial_of(path: Path) -> Path:
    """The temporary name beside ``path``, links followed."""
    return path.resolve().with_name(path.name + ".partial")


def write_page(records: Sequence[Record], seconds: float, path: Path) -> None:
    """Write the page to a temporary name and rename it. Raises UsageError when it cannot be written."""
    try:
        from jinja2 import Environment
    except ImportError:
        raise UsageError('the page needs jinja2; install it with: pip install "zharness[report]"') from None
    template = Environment(autoescape=True).from_string(TEMPLATE)
    text = template.render(
        records=records,
        matrix=matrix(records),
        sensitivity=sensitivity(records),
        summary=summary(records, seconds),
        word=outcome,
    )
    check_writable(path)
    partial_of(path).write_text(text, encoding="utf-8")
    os.replace(partial_of(path), path.resolve())
