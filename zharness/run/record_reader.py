"""Records of earlier runs as they are found: what is no record is skipped and counted, never fatal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zharness.errors import UsageError
from zharness.run.record import Record, parse_record

MAX_LISTED_SKIPS = 5  # skipped lines that a terminal tells one by one


@dataclass(frozen=True)
class LoadedRecords:
    """The records of some files, and in words each line that is none."""

    records: tuple[Record, ...]
    skipped_lines: tuple[str, ...]

    def describe_skipped(self) -> str:
        """For a terminal; the empty string where nothing was skipped."""
        if not self.skipped_lines:
            return ""
        rest = len(self.skipped_lines) - MAX_LISTED_SKIPS
        lines = [f"SKIPPED {line}" for line in self.skipped_lines[:MAX_LISTED_SKIPS]]
        return "\n".join([*lines, f"SKIPPED {rest} more lines"] if rest > 0 else lines)


def load_records(paths: Iterable[Path]) -> LoadedRecords:
    """Every record of some JSON-lines files. Raises UsageError when a file cannot be read or none has any record."""
    paths = list(paths)
    records: list[Record] = []
    skipped: list[str] = []
    for path in paths:
        for number, line in enumerate(read_lines(path), start=1):
            try:
                records.append(parse_record(line.decode("utf-8")))
            except (UsageError, UnicodeDecodeError, RecursionError) as error:
                skipped.append(f"{path}, line {number}: {error or type(error).__name__}")
    if not records:
        named = ", ".join(map(str, paths))
        why = f"; the first line that is none: {skipped[0]}" if skipped else ""
        raise UsageError(f"no record in {named}{why}; records are what `zharness check --jsonl FILE` writes")
    return LoadedRecords(tuple(records), tuple(skipped))


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file. Raises UsageError when it cannot be read."""
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}; name a file of records") from error
