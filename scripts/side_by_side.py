"""Run DeepSpeed's and PyTorch's test files with their own classes and with the drop-ins, and write tables of both."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from both_ways.deepspeed import DEEPSPEED
from both_ways.family import Family, Source
from both_ways.page import Page, merge_tables
from both_ways.pytorch import PYTORCH
from both_ways.runs import COLLECTION, FileRun, Selection, Way, combine_runs
from both_ways.tables import Tables, compare_ways, find_unexpected, format_path, render_both_ways, render_stand_in
from both_ways.whole import WholeTables, choose_rechecks, find_unsorted, render_whole, summarize_whole

from zharness.world.orphans import adopt_orphans

EPILOG = """
own: the project with its own classes. drop-in: the project with zharness.compat.deepspeed or zharness.compat.pytorch.
recheck: the project's own classes, for one test of each message with which tests of a file fail or are skipped with the
drop-in, and for --passes tests that pass with the drop-in, drawn by --seed (default 0). stand-in (DeepSpeed's files):
the reference engine in the place of DeepSpeed, with the drop-in.

The folder of --records keeps the runs of each project in a file. A recorded run is not repeated, unless --sample or
--seed differs, --passes is larger, or --limit is above the limit at which the run was killed. own and drop-in run the
same --sample tests of each file, spread evenly over the tests on ranks or drawn by --seed; stand-in runs all tests.
Files that use no class of the drop-in are left out. For files that only drop-in ran, the script prints outcomes and the
reasons of failures, and how many of the tests that recheck ran end in the same way. Seconds are medians over --repeats
runs. The ratio is the ratio of the CPU seconds of all processes, which other work changes less. With --ways '' nothing
runs, and the tables are printed.

With --page, files that are already in the tables of the page are left out, and the tables are written to the page: with
the rows of the records, and the rows of the page for other files. deepspeed.toml and pytorch.toml in scripts/both_ways
list the exceptions. The exit status is 1 if another test ends differently or fails on the reference engine, if another
file gains less than 2 x, or if a run was killed or has no test.

PyTorch's files name CUDA and NCCL. In both ways they run with gloo on a CPU that counts as --cpu-devices devices, or
unchanged if --cpu-devices is 0.

  git clone https://github.com/deepspeedai/DeepSpeed
  python scripts/side_by_side.py --deepspeed DeepSpeed/tests --pytorch pytorch/test/distributed --records runs
  python scripts/side_by_side.py --deepspeed DeepSpeed/tests --records runs --files unit/checkpoint --ways stand-in
"""


@dataclass(frozen=True)
class Session:
    """The test files of one project, the options, and the recorded runs by path and way."""

    family: Family
    source: Source
    options: argparse.Namespace
    known: dict[tuple[str, Way], list[FileRun]]

    @property
    def file(self) -> Path:
        """The file with the recorded runs, one run per line."""
        return self.source.records / f"{self.family.name}.jsonl"

    @property
    def page(self) -> Page | None:
        """The page with the tables of the samples that ``--seed`` chose, or None."""
        options = self.options
        return Page(options.page, self.family, options.seed) if options.page else None

    def run_files(self, left_out: set[str]) -> None:
        """Run the files and ways that the records lack, except files whose paths in tables are ``left_out``.

        Ends the program if there is no test file.
        """
        paths = self.family.find_files(self.source.root, self.options.files)
        if not paths:
            sys.exit(f"{self.source.root}: no test file of {self.family.owner} with {self.options.files!r} in its path")
        for path in paths:
            paired = self.family.starts_ranks(self.source.root / path) and format_path(path) not in left_out
            ways = [way for way in self.options.ways if way is Way.STAND_IN or paired]
            for repeat, way in itertools.product(range(self.options.repeats), ways):
                selection = self.select_tests(path, way)
                if selection is None:
                    continue
                runs = [run for run in self.known.get((path, way), []) if run.answers(selection, self.source.limit)]
                if len(runs) <= repeat:
                    runs.append(self.run_and_keep(path, way, selection))
                self.known[path, way] = runs

    def select_tests(self, path: str, way: Way) -> Selection | None:
        """Return the tests of a file that run in this way, or None if the drop-in's runs give recheck no test."""
        if way is Way.STAND_IN:
            return Selection()
        if way is Way.RECHECK:
            swapped = self.known.get((path, Way.DROP_IN), [])
            only = choose_rechecks(swapped[-1], self.options.passes, self.options.seed or 0) if swapped else ()
            return Selection(only=only) if only and only != (COLLECTION,) else None
        return Selection(self.options.sample, self.options.seed)

    def run_and_keep(self, path: str, way: Way, selection: Selection) -> FileRun:
        """Run one file in one way, append the run to the records, and return it."""
        run = self.family.run_file(self.source, path, way, selection)
        with self.file.open("a") as file:
            file.write(run.to_json() + "\n")
        print(f"{path} {way.value}: {run.describe()} in {run.seconds} s", file=sys.stderr, flush=True)
        return run

    def report(self) -> list[str]:
        """Print the tables, write them to the page, and return the differences that no exception explains."""
        runs = {key: combine_runs(found) for key, found in self.known.items() if self.options.files in key[0]}
        alone = {key: run for key, run in runs.items() if (key[0], Way.OWN) not in runs}
        exceptions = self.family.read_exceptions()
        if self.page:
            earlier = self.page.read_whole()
            added = {key: run for key, run in alone.items() if format_path(key[0]) not in earlier.rows}
            tables = merge_tables(self.page.read_tables(), compare_ways(runs))
            whole = earlier + summarize_whole(added, exceptions.failing)
            self.page.write_tables(tables)
            self.page.write_whole(whole)
        else:
            tables, whole = compare_ways(runs), summarize_whole(alone, exceptions.failing)
        texts = [*render_both_ways(tables, self.family.classes), *render_stand_in(runs, exceptions.stand_in)]
        texts += render_whole(whole, self.family.owner)
        print(*filter(None, texts), sep="\n\n")
        unexpected = [*find_unexpected(runs, exceptions.stand_in, exceptions.differences, exceptions.slower)]
        return [*unexpected, *find_unsorted(alone, exceptions.failing, exceptions.differences)]


def main() -> int:
    """Run the tests that the records lack, print and write the tables, and return the exit status."""
    options = parse_arguments()
    options.records.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    unexpected = []
    for session in iter_sessions(options):
        session.run_files(find_left_out(session.page, options.ways))
        unexpected += session.report()
    print("\n".join(f"UNEXPECTED {line}" for line in unexpected))
    return int(bool(unexpected))


def iter_sessions(options: argparse.Namespace) -> Iterator[Session]:
    """Yield a session for each project whose files the command line names."""
    for family, root in ((DEEPSPEED, options.deepspeed), (PYTORCH, options.pytorch)):
        if root is not None:
            source = Source(root, options.records, options.limit, options.cpu_devices)
            yield Session(family, source, options, read_runs(options.records / f"{family.name}.jsonl"))


def find_left_out(page: Page | None, ways: list[Way]) -> set[str]:
    """Return the files on the page: in the tables of whole files if only the drop-in runs, else in those of samples."""
    if page is None:
        return set()
    empty = Tables({}, {}), WholeTables({}, {}, {})
    tables, whole = (page.read_tables(), empty[1]) if Way.OWN in ways else (empty[0], page.read_whole())
    return {*tables.timed, *tables.reasons, *whole.rows}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed", type=Path, help="DeepSpeed's folder tests")
    parser.add_argument("--pytorch", type=Path, help="PyTorch's folder test/distributed")
    parser.add_argument("--records", type=Path, required=True, help="the folder that keeps the runs")
    parser.add_argument("--page", type=Path, help="a page with the tables, such as docs/results.md")
    parser.add_argument("--files", default="", help="only the files whose path contains this text")
    parser.add_argument(
        "--ways",
        type=parse_ways,
        default=[Way.OWN, Way.DROP_IN],
        help="of own,drop-in,recheck,stand-in (default: own,drop-in); '' prints only",
    )
    parser.add_argument("--sample", type=int, default=3, help="tests of a file; 0 means all (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="draw the tests by this number instead of spreading them evenly")
    parser.add_argument(
        "--passes", type=int, default=3, help="passed tests of a file for recheck (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of a file in each way, alternated (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one file (default: %(default)s)")
    parser.add_argument(
        "--cpu-devices", type=int, default=4, help="devices of the CPU in PyTorch's files (default: %(default)s)"
    )
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


if __name__ == "__main__":
    sys.exit(main())
