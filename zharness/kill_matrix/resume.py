"""Load the records of an earlier run, so that the cells of these records are not run again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zharness.errors import UsageError
from zharness.run import Record
from zharness.run.record import parse_record


def load_finished_records(path: Path) -> list[Record]:
    """Return the records that an earlier run wrote to ``path``, even if that run was killed.

    If the run was killed, the records in its ``.partial`` file are merged into ``path``. An incomplete last line is
    ignored. Raises UsageError if any other line is not a record.
    """
    partial = path.with_name(path.name + ".partial")
    lines = [line for file in (path, partial) if file.is_file() for line in read_complete_lines(file)]
    records = {(record.cell, record.seed): record for record in map(parse_record, dict.fromkeys(lines))}
    if partial.is_file():
        fresh = path.with_name(f".{path.name}")
        fresh.write_text("".join(json.dumps(record.as_json()) + "\n" for record in records.values()), encoding="utf-8")
        os.replace(fresh, path)
        partial.unlink()
    return list(records.values())


def read_complete_lines(file: Path) -> list[str]:
    """Return the lines of ``file`` that end with a newline. Raises UsageError if the file cannot be read as text."""
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {str(file)!r}: {error}; name a file of JSON lines, or a new one") from None
