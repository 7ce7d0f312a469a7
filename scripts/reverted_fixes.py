"""Revert fixes of an engine one by one, and see whether the tier for pull requests notices.

    python scripts/reverted_fixes.py --source deepspeed-0.19.8 --reach reach.jsonl fixes/*.diff

``--source`` is a git repository of the engine, whose HEAD has all the fixes, and ``--reach`` a record of it by
``zharness check --record-reach``. For each diff, a copy of HEAD without the fix is checked as a pull request is:
``zharness check --changed HEAD -x``. Prints a table of what was noticed, after how many cells and seconds, and exits
with 1 unless every fix was noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HOLDS = ("pass", "unsupported")
NOT_IMPORTED = "cannot be imported"  # in the message with which the tier ends if the engine has no valid source


@dataclass(frozen=True)
class Outcome:
    """What the tier said of one reverted fix: its exit code, the cells that ran, seconds, and the last line or cell."""

    name: str
    exit_code: int
    cells: int
    seconds: float
    first_failure: str

    @property
    def is_noticed(self) -> bool:
        """Whether a law is broken, or the engine cannot be imported; a mistake in the command is neither."""
        return self.exit_code == 1 or NOT_IMPORTED in self.first_failure

    def describe(self) -> str:
        """Return a row of the table."""
        noticed = "noticed" if self.is_noticed else "missed"
        return f"| {self.name} | {noticed} | {self.cells} | {self.seconds:.0f} | {self.first_failure} |"


def check_without_fix(source: Path, fix: Path, engine: str, reach: Path, seconds: float) -> Outcome:
    """Check a copy of ``source`` without the change of the file ``fix``, as a pull request of the engine is checked."""
    with TemporaryDirectory() as folder:
        copy, records = Path(folder, "source"), Path(folder, "records.jsonl")
        for arguments in (
            ("clone", "-q", str(source), str(copy)),
            ("-C", str(copy), "apply", "-R", str(fix.resolve())),
        ):
            subprocess.run(["git", *arguments], check=True)  # noqa: S607 - the git of the caller
        options = ("--changed", "HEAD", "--reach", str(reach), "-x", "--max-seconds", str(seconds))
        command = ("zharness", "check", "--engine", f"{engine}@{copy}", "--isolation", "pooled", *options)
        began = time.monotonic()
        done = subprocess.run((*command, "--jsonl", str(records)), capture_output=True, text=True, check=False)
        taken = time.monotonic() - began
        lines = records.read_text("utf-8").splitlines() if records.exists() else []
        cells = [json.loads(line) for line in lines]
        failing = [
            cell["case"].replace(f"@{copy}", "")
            for cell in cells
            if cell["verdict"] not in HOLDS and not cell.get("excuse")
        ]
        last = (done.stderr.strip().splitlines() or [""])[-1].replace(str(copy), fix.stem)
        return Outcome(fix.stem, done.returncode, len(cells), taken, failing[0] if failing else last)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixes", nargs="+", type=Path, help="diffs against the commit before each fix")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reach", type=Path, required=True)
    parser.add_argument("--engine", default="deepspeed")
    parser.add_argument("--max-seconds", type=float, default=120)
    given = parser.parse_args()
    print("| fix | tier | cells | seconds | first failure |\n|---|---|---|---|---|")
    outcomes = []
    for fix in given.fixes:
        outcomes.append(check_without_fix(given.source, fix, given.engine, given.reach, given.max_seconds))
        print(outcomes[-1].describe(), flush=True)
    noticed = sum(outcome.is_noticed for outcome in outcomes)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{noticed} of {len(outcomes)} noticed; load of the machine over 1, 5 and 15 minutes: {load}")
    return 0 if noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
