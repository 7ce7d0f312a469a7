"""Compare the records of two runs cell by cell: same cells, same verdicts, same bounds.

    python scripts/compare_records.py before.jsonl after.jsonl
    python scripts/compare_records.py --before old/*.jsonl --after new/*.jsonl

Reads the files that ``zharness check --jsonl`` and ``zharness mutants --jsonl`` write. Prints each difference, and
exits with 1 if there is a difference. Times, versions and the text of messages are not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# A record's verdict and the numbers that led to it. Messages, seconds and versions may differ.
COMPARED = (
    *("verdict", "excuse", "stale", "documented", "withheld", "tier", "ratio", "smallest"),
    *("wrong_elements", "elements", "undetermined", "modules"),
)
LOCATION = (
    "step",
    "part",
    "parameter",
    "index",
    "owner",
    "offset",
    "seen_on",
    "expected",
    "actual",
    "bound",
    "ulps",
    "wrong",
)


def read_records(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Read JSON lines and return the records by cell id; of several records of a cell the last one counts."""
    records: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records[record["case"]] = record
    return records


def conclusion(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``record`` that have to be equal in both runs."""
    divergence = record.get("divergence") or {}
    fields = {name: record.get(name) for name in COMPARED}
    return fields | {f"divergence.{name}": divergence.get(name) for name in LOCATION}


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Describe every cell that one run lacks, and every compared field in which the runs differ."""
    lines = [f"only before: {name}" for name in before.keys() - after.keys()]
    lines += [f"only after: {name}" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        old, new = conclusion(before[name]), conclusion(after[name])
        lines += [f"{name}: {key} was {old[key]!r}, is {new[key]!r}" for key in old if old[key] != new[key]]
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="two files: before and after")
    parser.add_argument("--before", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--after", nargs="+", type=Path, default=[], metavar="FILE")
    arguments = parser.parse_args()
    pair = len(arguments.files) == 2 and not (arguments.before or arguments.after)
    if not pair and not (arguments.before and arguments.after and not arguments.files):
        parser.error("expected either two files, or --before and --after")
    before = read_records(arguments.files[:1] if pair else arguments.before)
    after = read_records(arguments.files[1:] if pair else arguments.after)
    lines = differences(before, after)
    print("\n".join(lines[:200]))
    print(f"{len(before)} cells before, {len(after)} after, {len(lines)} differences")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
