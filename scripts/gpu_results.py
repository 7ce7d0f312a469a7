"""Join the files that the sections of gpu.sh wrote into a folder, as results.json, records.jsonl and page.html."""

from __future__ import annotations

import argparse
import html
import json
import platform
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

RECORDS, RESULTS, PAGE = "records.jsonl", "results.json", "page.html"
BROKEN = ("fail", "crash", "hang", "error", "undetermined")
FIGURE_ENGINES = ("reference", "fsdp2", "ddp")  # engines on which no law may raise a false alarm
ENDED = ("0", "1", "3")  # exit codes of a check that was not killed: laws hold, a law is broken, the harness failed
STEP_COLUMNS = ("engine", "stage", "ranks", "plain ms", "ms", "ratio", "low", "high", "problem")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a section; if the section was killed, its last line may be incomplete and is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def read_records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each section, finished or cut."""
    files = [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.partial")]
    return {path.name.split(".")[0]: list(read_lines(path)) for path in sorted(files) if path.name != RECORDS}


def read_sections(folder: Path) -> list[dict[str, Any]]:
    """Return the name, exit code, seconds and command of the latest run of each section."""
    path, found = folder / "sections.tsv", dict[str, dict[str, Any]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        name, status, seconds, command = line.split("\t", 3)
        found[name] = {"name": name, "exit": status, "seconds": int(seconds), "command": command}
    return list(found.values())


def read_device(folder: Path) -> dict[str, dict[str, int]]:
    """Return the MiB in use on all GPUs and the number of their processes, before the first section and at the end."""
    path = folder / "device.tsv"
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return {when: {"mib": int(mib), "processes": int(processes)} for when, mib, processes in rows}


def outcome(record: Mapping[str, Any]) -> str:
    """Return the verdict of a record; an expected failure counts as ``expected``."""
    return "expected" if record["excuse"] and not record["stale"] else str(record["verdict"])


def count_cells(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the number of cells of each outcome, for each section, engine, dtype and world size."""
    counts: defaultdict[tuple[str, str, str, int], Counter[str]] = defaultdict(Counter)
    for section, rows in records.items():
        for record in rows:
            counts[section, record["engine"], record["dtype"], record["world_size"]][outcome(record)] += 1
    names = ("section", "engine", "dtype", "ranks")
    return [{**dict(zip(names, key, strict=True)), **counted} for key, counted in sorted(counts.items())]


def find_largest_memory(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the largest peaks of one rank in MiB, and the cell in which each was; empty without a GPU."""
    peaks = [(peak, row["case"]) for rows in records.values() for row in rows for peak in row.get("gpu_memory", ())]
    if not peaks:
        return {}
    largest = {name: max(peaks, key=lambda each: each[0][at]) for at, name in enumerate(("allocated", "reserved"))}
    return {name: {"mib": each[0][at], "cell": each[1]} for at, (name, each) in enumerate(largest.items())}


def list_unexpected(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the cells that broke a law, or in which the harness failed, and that no expected failure covers."""
    return [
        {"section": section, "cell": record["case"], "verdict": record["verdict"], "cause": record["cause"]}
        for section, rows in records.items()
        for record in rows
        if outcome(record) in BROKEN
    ]


def count_judged(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, int]]:
    """Return, for each of FIGURE_ENGINES, the number of judged cells and the number of unexpected outcomes."""
    found = {engine: {"judged": 0, "unexpected": 0} for engine in FIGURE_ENGINES}
    for record in (record for rows in records.values() for record in rows):
        if record["engine"] in found and (result := outcome(record)) != "unsupported":
            found[record["engine"]]["judged"] += 1
            found[record["engine"]]["unexpected"] += result in BROKEN
    return found


def list_kills(folder: Path, sections: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the laws that killed each mutant of the command; empty if the mutant survived or was not reached."""
    arguments = next((str(each["command"]).split() for each in sections if each["name"] == "mutants"), [])
    start = arguments.index("mutants") + 1 if "mutants" in arguments else 0
    names = arguments[start : arguments.index("--scope") if "--scope" in arguments else None] if start else []
    kills: dict[str, list[str]] = {name: [] for name in names}
    for record in (record for rows in read_records(folder / "mutants").values() for record in rows):
        name = str(record["engine"]).rpartition(":")[2]
        if name in kills and record["verdict"] in BROKEN and record["verdict"] != "error":
            kills[name].append(record["check"])
    return kills


def read_default(folder: Path, sections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the default check, including its start, and whether it was complete; {} if it did not run.

    The output of a check that reached its limit has a line with STOPPED.
    """
    ran = next((each for each in sections if each["name"] == "default"), None)
    log = folder / "default.log"
    if ran is None or not log.is_file():
        return {}
    whole = ran["exit"] in ENDED and "STOPPED after" not in log.read_text(encoding="utf-8")
    return {"seconds": ran["seconds"], "whole": whole}


def list_nondeterministic(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return each note about operators for which torch has no deterministic algorithm, once."""
    notes = (note for rows in records.values() for record in rows for note in record["notes"])
    return sorted({note for note in notes if "no deterministic algorithm" in note})


def build_results(folder: Path, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the results of all sections as plain data."""
    steps = folder / "steps.json"
    doctor = folder / "doctor.log"
    sections = read_sections(folder)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "doctor": doctor.read_text(encoding="utf-8").splitlines() if doctor.is_file() else [],
        "figures": {
            "default": read_default(folder, sections),
            "mutants": list_kills(folder, sections),
            "judged": count_judged(records),
        },
        "sections": sections,
        "device": read_device(folder),
        "cells": count_cells(records),
        "unexpected": list_unexpected(records),
        "nondeterministic": list_nondeterministic(records),
        "largest_memory_of_a_rank": find_largest_memory(records),
        "steps": json.loads(steps.read_text(encoding="utf-8")) if steps.is_file() else {},
    }


def render_tables(results: Mapping[str, Any]) -> str:
    """Return the sections, the counts of cells and the step times as text."""
    ran = [[each[key] for key in ("name", "exit", "seconds", "command")] for each in results["sections"]]
    rows = results["steps"].get("rows", [])
    steps = [[row.get(column, "") for column in STEP_COLUMNS] for row in rows]
    figures = results["figures"]
    parts = {
        "Default check of the reference": json.dumps(figures["default"]),
        "Mutants, and the laws that killed them": tabulate(
            [[name, ", ".join(laws) or "LIVES"] for name, laws in figures["mutants"].items()]
        ),
        "Cells judged, and unexpected outcomes": tabulate(
            [[engine, *counts.values()] for engine, counts in figures["judged"].items()],
            ("engine", "judged", "unexpected"),
        ),
        "Memory and processes on the GPUs before and after": json.dumps(results["device"]),
        "Sections": tabulate(ran, ("section", "exit", "seconds", "command")),
        "Cells": tabulate(results["cells"], "keys"),
        f"Median step, {results['steps'].get('size', '')} {results['steps'].get('dtype', '')}": tabulate(
            steps, STEP_COLUMNS, floatfmt=".3f"
        ),
        "Peak memory of one rank": json.dumps(results["largest_memory_of_a_rank"], indent=1),
    }
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts.items())


def write_page(folder: Path, text: str) -> int:
    """Write the report's page with the tables at its end, or without records only the tables; return the status."""
    page, status = folder / PAGE, 0
    if (folder / RECORDS).stat().st_size:
        command = [sys.executable, "-m", "zharness", "report", str(folder / RECORDS), "--html", str(page)]
        status = subprocess.run(command, check=False).returncode
    block = f"<pre>{html.escape(text)}</pre>"
    before = page.read_text(encoding="utf-8") if page.is_file() else "<!doctype html><body></body>"
    head, end, tail = before.rpartition("</body>")
    page.write_text(f"{head}{block}{end}{tail}", encoding="utf-8")
    return 0 if status <= 1 else status  # 1: a law does not hold, which the page shows


def main() -> None:
    """Read the folder, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    records = read_records(folder)
    with (folder / RECORDS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for rows in records.values() for record in rows)
    results = build_results(folder, records)
    (folder / RESULTS).write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = render_tables(results)
    print(text)
    sys.exit(write_page(folder, text))


if __name__ == "__main__":
    main()
