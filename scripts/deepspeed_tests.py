"""Run DeepSpeed's test files with its own fixtures, with the drop-in, and on the reference engine, and print tables."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import tomllib
from deepspeed_files.page import merge_tables, read_tables, write_tables
from deepspeed_files.runs import COLLECTION, FileRun, Selection, Way, build_operators, combine_runs, run_file
from deepspeed_files.tables import Tables, compare_ways, find_unexpected, format_path, render_drop_in, render_stand_in
from deepspeed_files.whole import choose_rechecks, find_unsorted, render_whole

EPILOG = """
own: DeepSpeed with its own fixtures. drop-in: DeepSpeed with zharness.compat.deepspeed. stand-in: the reference engine
in the place of DeepSpeed, with the drop-in. recheck: DeepSpeed with its own fixtures, for one test of each message with
which tests of a file fail with the drop-in, and for --passes tests that pass with it, drawn by --seed or else 0. The
file of --jsonl keeps the runs, and what it has is not run again, unless --sample or --seed differs, --passes is larger,
or --limit is above the one at which a run was killed. own and drop-in run the same --sample tests of each file, spread
over those that run on ranks or drawn by --seed, and leave out files without DistributedTest; stand-in runs all. Of
files that drop-in ran alone, outcomes and the reasons of failures are printed, and how many of the passes that were
compared pass with recheck too. Seconds are medians over --repeats runs. The ratio is that of the CPU seconds of all
processes, which other work changes less. With --ways '' nothing runs, and the tables are printed. With --page the ways
own and drop-in leave out the files that the tables of the page have, and the tables are written there: rows of --jsonl,
and of other files the rows of the page. deepspeed_tests.toml lists the exceptions. The exit status is 1 if another test
fails on the reference engine or ends differently with the drop-in, if another file gains less than 2 x, or if a run was
killed or has no test.

  git clone https://github.com/deepspeedai/DeepSpeed
  python scripts/deepspeed_tests.py DeepSpeed/tests --jsonl runs.jsonl
  python scripts/deepspeed_tests.py DeepSpeed/tests --jsonl runs.jsonl --files unit/checkpoint --ways stand-in
"""
FOLDERS = ("v1", "runtime", "checkpoint", "moe", "pipe", "comm", "ops/adam")
EXCEPTIONS = Path(__file__).with_suffix(".toml")


def main() -> int:
    """Run what the file of results lacks, print the tables, and return the exit status."""
    options = parse_arguments()
    known = read_runs(options.jsonl)
    page = read_tables(options.page) if options.page else Tables({}, {})
    for path in find_files(options.tests, options.files):
        paired = has_tests_on_ranks(options.tests / path) and format_path(path) not in {*page.timed, *page.reasons}
        ways = [way for way in options.ways if way is Way.STAND_IN or paired]
        for repeat, way in itertools.product(range(options.repeats), ways):
            selection = select_tests(options, way, known.get((path, Way.DROP_IN), []))
            if selection is None:
                continue
            answers = [run for run in known.get((path, way), []) if run.answers(selection, options.limit)]
            if len(answers) <= repeat:
                answers.append(run_and_keep(options, path, way, selection))
            known[path, way] = answers
    listed = read_exceptions()
    runs = {key: combine_runs(found) for key, found in known.items() if options.files in key[0]}
    tables = merge_tables(page, compare_ways(runs))
    print(*render_drop_in(tables), *render_stand_in(runs, listed), sep="\n\n")
    alone = {key: run for key, run in runs.items() if (key[0], Way.OWN) not in runs}
    if any(way is Way.DROP_IN for _, way in alone):
        print(*render_whole(alone, read_entries("failing")), sep="\n\n")
    if options.page:
        write_tables(options.page, tables)
    unexpected = [*find_unexpected(runs, listed, read_differences(), read_slower())]
    unexpected += find_unsorted(alone, read_entries("failing"), read_differences())
    print("\n".join(f"UNEXPECTED {line}" for line in unexpected))
    return int(bool(unexpected))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="the folder tests of a checkout of DeepSpeed")
    parser.add_argument("--jsonl", type=Path, required=True, help="the file that keeps the runs, one a line")
    parser.add_argument("--page", type=Path, help="a page with both tables of the drop-in, such as docs/results.md")
    parser.add_argument("--files", default="", help="only the files whose path contains this text")
    parser.add_argument(
        "--ways",
        type=parse_ways,
        default=[Way.OWN, Way.DROP_IN, Way.STAND_IN],
        help="own,drop-in,recheck,stand-in (default: all but recheck); '' prints only",
    )
    parser.add_argument("--sample", type=int, default=3, help="tests of a file; 0 means all (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="draw the tests by this number instead of spreading them evenly")
    parser.add_argument(
        "--passes", type=int, default=3, help="passed tests of a file for recheck (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of a file in each way, alternated (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one file (default: %(default)s)")
    return parser.parse_args()


def parse_ways(text: str) -> list[Way]:
    """Return the ways whose names are separated by commas in ``text``."""
    return [Way(name) for name in text.split(",") if name]


def read_runs(file: Path) -> dict[tuple[str, Way], list[FileRun]]:
    """Return the runs that ``file`` has, by path and way."""
    found: dict[tuple[str, Way], list[FileRun]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        run = FileRun.from_json(line)
        found.setdefault((run.path, run.way), []).append(run)
    return found


def read_exceptions() -> dict[str, list[dict[str, Any]]]:
    """Return the exceptions of ``EXCEPTIONS`` by the path of the file, with one for each file that is not collected."""
    exceptions = tomllib.loads(EXCEPTIONS.read_text())
    listed = {entry["path"]: entry.get("exception", []) for entry in exceptions["file"]}
    for group in exceptions.get("uncollectable", []):
        entry = {"tests": re.escape(COLLECTION), "kind": group["kind"], "reason": group["reason"]}
        listed |= {path: [entry, *listed.get(path, [])] for path in group["paths"]}
    return listed


def read_entries(name: str) -> list[dict[str, Any]]:
    """Return the list ``name`` of ``EXCEPTIONS``."""
    return tomllib.loads(EXCEPTIONS.read_text()).get(name, [])


def read_differences() -> list[str]:
    """Return regular expressions for the messages of DeepSpeed's own fixtures whose tests may end otherwise."""
    return [entry["message"] for entry in read_entries("difference")]


def read_slower() -> set[str]:
    """Return the paths of the files of which the drop-in saves less than half of the CPU seconds, for a reason."""
    return {path for entry in read_entries("below_two") for path in entry["paths"]}


def find_files(tests: Path, text: str) -> list[str]:
    """Return the test files in FOLDERS whose path, relative to ``tests``, contains ``text``; small files first."""
    files = (file for folder in FOLDERS for file in (tests / "unit" / folder).rglob("test_*.py"))
    by_size = sorted(files, key=lambda file: (file.stat().st_size, file))
    return [path for path in (str(file.relative_to(tests)) for file in by_size) if text in path]


def has_tests_on_ranks(file: Path) -> bool:
    """Return whether the file uses a class that the drop-in replaces; any other file runs the same in both ways."""
    return "DistributedTest" in file.read_text(encoding="utf-8")


def select_tests(options: argparse.Namespace, way: Way, swapped: list[FileRun]) -> Selection | None:
    """Return which tests of a file run in this way, or None if recheck has none from the drop-in's runs ``swapped``."""
    if way is Way.STAND_IN:
        return Selection()
    if way is Way.RECHECK:
        only = choose_rechecks(swapped[-1], options.passes, options.seed or 0) if swapped else ()
        return Selection(only=only) if only and only != (COLLECTION,) else None
    return Selection(options.sample, options.seed)


def run_and_keep(options: argparse.Namespace, path: str, way: Way, selection: Selection) -> FileRun:
    """Run one file in one way, append the run to the file of results, and return it."""
    operators = options.jsonl.resolve().parent / "operators"
    if way is not Way.STAND_IN:
        build_operators(operators)
    run = run_file(options.tests, path, way, selection, options.limit, operators)
    with options.jsonl.open("a") as file:
        file.write(run.to_json() + "\n")
    print(f"{path} {way.value}: {run.describe()} in {run.seconds} s", file=sys.stderr, flush=True)
    return run


if __name__ == "__main__":
    sys.exit(main())
