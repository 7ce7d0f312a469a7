"""Check that cells have the same verdicts when they run again, in another order, on pooled ranks and on fresh ranks.

    python scripts/same_verdicts.py --engine reference --engine ddp --engine fsdp2

Runs the cells once in each setting, and compares every cell's verdict, expected failure and first wrong number with
those of the first run. Prints the differences; the exit code is 1 if there is a difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import Record, Request, Verdict
from zharness.run.check_loop import RunOptions, run_request
from zharness.world import Isolation


@dataclass(frozen=True)
class RunSetting:
    """The isolation of the ranks and the seed of the order of the cells (None: the order of the matrix)."""

    isolation: Isolation
    shuffle: int | None = None

    def __str__(self) -> str:
        return self.isolation.value + ("" if self.shuffle is None else f", shuffled by {self.shuffle}")


POOLED, FRESH = Isolation.POOLED, Isolation.FRESH
SETTINGS = (
    RunSetting(POOLED),
    RunSetting(POOLED),
    RunSetting(POOLED, 1),
    RunSetting(POOLED, 2),
    RunSetting(FRESH),
    RunSetting(FRESH, 1),
)


def describe_verdict(record: Record) -> str:
    """Return the text that has to be the same in all runs: verdict, expected failure and first wrong number.

    The message of a crash is left out: which rank reports it first depends on timing.
    """
    expected_failure = f" ({record.expected_failure})" if record.expected_failure else ""
    divergence = f": {record.divergence.describe()}" if record.divergence is not None else ""
    return f"{record.verdict.value}{expected_failure}{divergence}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="laws, groups or globs; all laws")
    parser.add_argument("--engine", action="append", default=[], help="may be repeated (reference)")
    parser.add_argument("--dtype", action="append", default=[], help="may be repeated (fp32)")
    parser.add_argument(
        "--stage", action="append", type=int, default=[], help="may be repeated (all stages of the engine)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="cells at a time (0: one for each core)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the ranks of one cell (%(default)s)")
    arguments = parser.parse_args()
    request = Request(
        patterns=tuple(arguments.patterns),
        engines=tuple(arguments.engine) or ("reference",),
        stages=tuple(arguments.stage),
        dtypes=tuple(arguments.dtype) or ("fp32",),
    )
    first: dict[str, Record] = {}
    different = 0
    for number, setting in enumerate(SETTINGS, start=1):
        print(f"run {number} of {len(SETTINGS)}: {setting}", file=sys.stderr)
        began = time.monotonic()
        options = RunOptions(
            arguments.timeout, jobs=arguments.jobs, isolation=setting.isolation, shuffle_seed=setting.shuffle
        )
        records, _ = run_request(request, options, lambda: None, prepare_rank_environment)
        current = {record.cell.id: record for record in records if record.verdict is not Verdict.UNSUPPORTED}
        first = first or current
        changed = [name for name in first if describe_verdict(current[name]) != describe_verdict(first[name])]
        unexpected = sum(not record.is_expected for record in current.values())
        # Printed after each run, so that an interrupt does not lose it.
        print(
            f"{setting!s:24}{len(current)} cells in {time.monotonic() - began:.0f} s, {unexpected} unexpected, "
            f"{len(changed)} different from the first run",
            flush=True,
        )
        for name in changed:
            print(f"  {name}\n    {describe_verdict(first[name])}\n    {describe_verdict(current[name])}", flush=True)
        different += len(changed)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
