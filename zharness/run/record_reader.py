"""Read the records of earlier runs, and skip and list the lines that are not records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.run.record import Record, parse_record

MAX_LISTED_SKIPS = 5  # skipped lines that are listed one by one in a terminal


@dataclass(frozen=True)
class LoadedRecords:
    """The records of one or more files, and a description of each line in the files that is not a record."""

    records: tuple[Record, ...]
    skipped_lines: tuple[str, ...]

    def describe_skipped(self) -> str:
        """Describe the skipped lines for a terminal, or return an empty string if no line was skipped."""
        if not self.skipped_lines:
            return ""
        unlisted = len(self.skipped_lines) - MAX_LISTED_SKIPS
        lines = [f"SKIPPED {line}" for line in self.skipped_lines[:MAX_LISTED_SKIPS]]
        return "\n".join([*lines, f"SKIPPED {unlisted} more lines"] if unlisted > 0 else lines)


def load_records(paths: Iterable[Path], watch: Callable[[Sequence[bytes]], Iterable[bytes]] = iter) -> LoadedRecords:
    """Load the records of JSON-lines files. Raises UsageError if a file cannot be read or no file has a record.

    ``watch`` returns the lines of one file unchanged, and may show how many of them were read.
    """
    paths = list(paths)
    records: list[Record] = []
    skipped: list[str] = []
    for path in paths:
        for number, line in enumerate(watch(read_lines(path)), start=1):
            try:
                records.append(parse_record(line.decode("utf-8")))
            except (UsageError, UnicodeDecodeError, RecursionError) as error:
                skipped.append(f"{path}, line {number}: {error or type(error).__name__}")
    if not records:
        names = ", ".join(map(str, paths))
        reason = f"; the first line that is not a record: {skipped[0]}" if skipped else ""
        raise UsageError(f"found no record in {names}{reason}; `zharness check --jsonl FILE` writes records")
    return LoadedRecords(tuple(records), tuple(skipped))


def read_cells(paths: Iterable[Path]) -> frozenset[Cell]:
    """Return the cells that have a record in one of the JSON-lines files; an empty file is allowed.

    Raises UsageError if a file cannot be read or has lines but no record.
    """
    files = [path for path in paths if read_lines(path)]
    return frozenset(record.cell for record in load_records(files).records) if files else frozenset()


def read_lines(path: Path) -> list[bytes]:
    """Read the lines of a file. Raises UsageError if the file cannot be read."""
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r}: {error.strerror}; name a file that `zharness check --jsonl` wrote"
        ) from error
