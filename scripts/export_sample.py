"""Export recorded cells as scripts, run them, and compare with the records' verdicts.

    python scripts/export_sample.py two.jsonl torch.jsonl --verdict fail,crash --each 1

It exports the first records (`zharness check --jsonl FILE`) of every law and engine with these verdicts, and prints a
line for each: the cell, the result of its script, its lines and seconds. The exit code is 1 if a script does not
reproduce its cell.
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


def sample_records(files: list[Path], verdicts: set[str], each: int, pattern: str) -> list[Record]:
    """Return the first ``each`` records of every law, variant and engine."""
    counts: Counter[tuple[str, str, str]] = Counter()
    records = []
    for record in load_records(files).records:
        cell = record.cell
        key = (cell.law, cell.variant, cell.engine)
        if record.verdict.value in verdicts and counts[key] < each and pattern in cell.id:
            counts[key] += 1
            records.append(record)
    return records


def get_claims(record: Record) -> engines.Capabilities:
    """Return the claims of the record's engine, which may be a mutant."""
    cell = record.cell
    known = engines.capabilities(cell.engine, cell.stage)
    return known or MUTANTS[cell.engine.partition(":")[2]].claims(cell.stage)


def export_and_run(record: Record, folder: Path) -> tuple[str, ScriptResult | None, int]:
    """Return the reason why the cell cannot be exported, or "", the result of its script, and its number of lines."""
    cell = record.cell
    try:
        script = render_cell_script(record, get_claims(record), "script.py")
    except UsageError as refused:
        return str(refused), None, 0
    path = folder / "script.py"
    path.write_text(script.text)
    return "", make_script_runner(cell.engine)(path), len(script.text.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--verdict", default=",".join(v.value for v in (Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT)))
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--only", default="", help="Text that the cell ids have to contain.")
    arguments = parser.parse_args()
    records = sample_records(arguments.files, set(arguments.verdict.split(",")), arguments.each, arguments.only)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for record in tqdm(records, unit="cell", leave=False, disable=not sys.stderr.isatty()):
            began = time.monotonic()
            reason, result, lines = export_and_run(record, Path(folder))
            status = "none" if result is None else "shown" if is_faithful(record, result) else "NOT SHOWN"
            counts[status] += 1
            seconds = time.monotonic() - began
            detail = reason if result is None else f"{lines} lines, {seconds:.1f} s: {result.evidence[:150]}"
            print(f"{status:9} {record.cell.id}: {detail}", flush=True)
    print(dict(counts))
    return int(counts["NOT SHOWN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
