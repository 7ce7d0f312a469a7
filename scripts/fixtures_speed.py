"""Compare the time of a test with one all_reduce under zharness and under torch's test fixtures."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import torch
from fixtures.session import FIXTURES, Session, require_expecttest
from tabulate import tabulate

EPILOG = """
Each fixture runs the same tests in a pytest process of its own, in alternating rounds, so that other load on the
machine affects all of them. A test's time is measured from pytest_runtest_logstart to pytest_runtest_logfinish, so it
includes starting the ranks. The first test of a session is reported separately: there torch's continuous fixture spawns
its processes, and zharness forks its rank server. torch's fixtures do not check collectives before they run, and
neither does "pooled" here; "fresh" includes the check of the test's one all_reduce, and "pooled-checked" shows it in a
row of its own. The exit status is 1 if a figure of zharness exceeds its limit.

  python scripts/fixtures_speed.py                               everything, some minutes
  python scripts/fixtures_speed.py --ranks 2 --scale "" --rounds 1
  python scripts/fixtures_speed.py --fixture process --fixture spawn
  python scripts/fixtures_speed.py --ranks "" --scale 64,256     large worlds only
"""

# Limits in seconds: for the median test, by fixture and ranks; for the single test of a large world, by ranks.
BARS: Mapping[tuple[str, int], tuple[float, str]] = {
    ("fresh", 2): (0.10, "fresh test overhead, 2 ranks, at most 0.10 s median"),
    ("fresh", 4): (0.20, "fresh test overhead, 4 ranks, at most 0.20 s median"),
    ("pooled", 2): (0.005, "pooled with the group reused, 2 ranks, at most 5 ms"),
    ("pooled", 4): (0.010, "pooled with the group reused, 4 ranks, at most 10 ms"),
}
SCALE_BARS: Mapping[int, tuple[float, str]] = {
    64: (3.0, "world size 64, one all_reduce test, at most 3 s"),
    256: (15.0, "world size 256, one all_reduce test, at most 15 s"),
}
TIMES_BELOW = 25  # a fresh test has to be at least this many times faster than under MultiProcessTestCase
# Tests per round: many for a fast fixture, few for a fixture whose test takes seconds.
TESTS = {"fresh": 30, "pooled": 30, "pooled-checked": 30, "pooled-new": 30, "process": 5, "continuous": 10, "spawn": 5}


@dataclass
class Figure:
    """The seconds of a fixture's passed tests at one world size, and the number of ``failed`` tests."""

    fixture: str
    ranks: int
    first: list[float]
    later: list[float]
    sessions: list[float]
    failed: int

    @property
    def median(self) -> float | None:
        return statistics.median(self.later) if self.later else None


def measure(name: str, ranks: int, tests: int, folder: Path, cap: float) -> tuple[list[float], int, float]:
    """Return the seconds of each passed test, the number of other tests, and the seconds of the pytest process."""
    start, arguments = monotonic(), ("--rank-timeout", "120") if FIXTURES[name].ours else ()
    session = Session(FIXTURES[name], folder, {"FIXTURES_RANKS": str(ranks), "FIXTURES_TESTS": str(tests)}, arguments)
    session.wait(cap)
    seconds = monotonic() - start
    session.kill_leftovers(0)
    passed = [t.seconds for t in session.tests() if t.outcome == "passed" and t.seconds is not None]
    if len(passed) < tests:
        print("\n".join(session.output().splitlines()[-15:]), file=sys.stderr)
    return passed, tests - len(passed), seconds


def compare(names: list[str], ranks: list[int], rounds: int, cap: float, scratch: Path) -> list[Figure]:
    """Measure every fixture at every world size, in ``rounds`` alternating rounds."""
    figures = {(name, world): Figure(name, world, [], [], [], 0) for world in ranks for name in names}
    for number in range(rounds):
        for (name, world), figure in figures.items():
            passed, failed, seconds = measure(name, world, TESTS[name], scratch / f"{number}-{name}-{world}", cap)
            figure.first += passed[:1]
            figure.later += passed[1:]
            figure.sessions.append(seconds)
            figure.failed += failed
            print(f"round {number + 1}: {name}, {world} ranks: {seconds:.1f} s, {failed} failed", file=sys.stderr)
    return list(figures.values())


def measure_scale(world_sizes: list[int], cap: float, scratch: Path) -> list[Figure]:
    """Measure one test on fresh ranks at each large world size."""
    figures = []
    for world in world_sizes:
        passed, failed, seconds = measure("fresh", world, 1, scratch / f"scale-{world}", cap)
        figures.append(Figure("fresh", world, passed, [], [seconds], failed))
        print(f"scale: {world} ranks: {seconds:.1f} s, {failed} failed", file=sys.stderr)
    return figures


def find_misses(figures: list[Figure], large: list[Figure]) -> Iterator[str]:
    """Yield a message for each limit that a figure exceeds or that could not be measured."""
    medians = {(figure.fixture, figure.ranks): figure.median for figure in figures}
    for key, (bar, title) in BARS.items():
        if key in medians:
            yield from describe_excess(medians[key], bar, title)
    for world in {figure.ranks for figure in figures}:
        torch_median, fresh_median = medians.get(("process", world)), medians.get(("fresh", world))
        if torch_median is not None and ("fresh", world) in medians:
            title = f"fresh, {world} ranks, at least {TIMES_BELOW}x below MultiProcessTestCase"
            yield from describe_excess(fresh_median, torch_median / TIMES_BELOW, title)
    for figure in large:
        if figure.ranks in SCALE_BARS:
            yield from describe_excess(figure.first[0] if figure.first else None, *SCALE_BARS[figure.ranks])
    for figure in [*figures, *large]:
        if FIXTURES[figure.fixture].ours and figure.failed:
            yield f"{figure.failed} tests failed: {FIXTURES[figure.fixture].title}, {figure.ranks} ranks"


def describe_excess(seconds: float | None, bar: float, title: str) -> Iterator[str]:
    """Yield a message if ``seconds`` is above ``bar`` or None."""
    if seconds is None or seconds > bar:
        yield f"{title}: {'not measured' if seconds is None else f'{seconds:.4f} s'}"


def render_table(figures: list[Figure]) -> str:
    """Return the table of all fixtures."""
    base: defaultdict[int, float | None] = defaultdict(lambda: None)
    base.update({figure.ranks: figure.median for figure in figures if figure.fixture == "fresh"})
    rows = []
    for figure in sorted(figures, key=lambda figure: figure.ranks):
        fresh, median = base[figure.ranks], figure.median
        ratio = median / fresh if fresh and median is not None else None
        first = statistics.median(figure.first) if figure.first else None
        title = FIXTURES[figure.fixture].title
        rows.append([title, figure.ranks, len(figure.later), median, first, ratio, figure.failed])
    headers = ["fixture", "ranks", "tests", "median s", "first s", "ratio to zharness fresh", "failed"]
    return tabulate(rows, headers, "github", floatfmt=("", "", "", ".4f", ".3f", ".2f", ""), missingval="-")


def render_scale_table(figures: list[Figure]) -> str:
    """Return the table of the large world sizes."""
    rows = []
    for figure in figures:
        seconds = figure.first[0] if figure.first else None
        per_rank_ms = None if seconds is None else 1000 * seconds / figure.ranks
        rows.append([figure.ranks, seconds, per_rank_ms, SCALE_BARS.get(figure.ranks, (None,))[0]])
    headers = ["ranks", "one all_reduce test s", "ms per rank", "bar s"]
    return tabulate(rows, headers, "github", floatfmt=("", ".2f", ".1f", ".0f"), missingval="-")


def parse_world_sizes(text: str) -> list[int]:
    """Return the numbers of a list such as ``2,4``; an empty text gives none."""
    return [int(number) for number in text.split(",") if number.strip()]


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument(
        "--ranks", type=parse_world_sizes, default=[2, 4], metavar="N,N", help="world sizes compared (2,4)"
    )
    parser.add_argument(
        "--scale", type=parse_world_sizes, default=[64, 256], metavar="N,N", help="zharness alone (64,256)"
    )
    parser.add_argument("--fixture", action="append", choices=list(TESTS), help="only this fixture; repeatable")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each fixture (default 2)")
    parser.add_argument("--cap", type=float, default=300.0, help="seconds for one pytest process (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every duration to FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    names = arguments.fixture or list(TESTS)
    if arguments.ranks and not {"process", "continuous"}.isdisjoint(names):
        require_expecttest()
    with tempfile.TemporaryDirectory(prefix="fixtures-") as scratch:
        figures = compare(names, arguments.ranks, arguments.rounds, arguments.cap, Path(scratch))
        large = measure_scale(arguments.scale, arguments.cap, Path(scratch))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, gloo; ratios matter, not seconds\n")
    print(render_table(figures), *([render_scale_table(large)] if large else []), sep="\n\n")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"compared": [asdict(f) for f in figures], "scale": [asdict(f) for f in large]})
        )
    problems = list(find_misses(figures, large))
    for problem in problems:
        print(f"MISSED {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
