"""Which recorded cells can be shown by a script: each is exported, and the script run beside the record's verdict.

    python scripts/export_sample.py two.jsonl torch.jsonl --verdict fail,crash --each 1

Of the records (`zharness check --jsonl FILE`) with these verdicts it takes the first few of every law and engine, and
prints a line for each: the cell, what its script came to, in how many lines and seconds. Exit code 1 where a script
does not show its cell.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from zharness import engines
from zharness.cli.cells import make_script_runner
from zharness.errors import UsageError
from zharness.export.cell_script import render_cell_script
from zharness.export.verify import ScriptResult, is_faithful
from zharness.mutants import MUTANTS
from zharness.run.record import Record, Verdict
from zharness.run.record_reader import load_records


def chosen(files: list[Path], verdicts: set[str], each: int, pattern: str) -> list[Record]:
    """The first records of every law, variant, engine and stage."""
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for record in load_records(files).records:
        case = record.cell
        key = (case.law, case.variant, case.engine)
        if record.verdict.value in verdicts and seen[key] < each and pattern in case.id:
            seen[key] += 1
            found.append(record)
    return found


def claims_of(record: Record) -> engines.Capabilities:
    case = record.cell
    known = engines.capabilities(case.engine, case.stage)
    return known or MUTANTS[case.engine.partition(":")[2]].claims(case.stage)


def tried(record: Record, folder: Path) -> tuple[str, ScriptResult | None, int]:
    """Why there is no script, or what it came to and its lines."""
    case = record.cell
    try:
        script = render_cell_script(record, claims_of(record), "script.py")
    except UsageError as refused:
        return str(refused), None, 0
    path = folder / "script.py"
    path.write_text(script.text)
    return "", make_script_runner(case.engine)(path), len(script.text.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--verdict", default=",".join(v.value for v in (Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT)))
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--only", default="", help="Part of the case ids.")
    given = parser.parse_args()
    records = chosen(given.files, set(given.verdict.split(",")), given.each, given.only)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for record in tqdm(records, unit="cell", leave=False, disable=not sys.stderr.isatty()):
            began = time.monotonic()
            reason, shown, lines = tried(record, Path(folder))
            word = "none" if shown is None else "shown" if is_faithful(record, shown) else "NOT SHOWN"
            counts[word] += 1
            said = (
                reason if shown is None else f"{lines} lines, {time.monotonic() - began:.1f} s: {shown.evidence[:150]}"
            )
            print(f"{word:9} {record.cell.id}: {said}", flush=True)
    print(dict(counts))
    return int(counts["NOT SHOWN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
