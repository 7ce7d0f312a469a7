"""Does a suite say the same twice, in another order, on ranks that live on and on new ones?

    python scripts/same_verdicts.py --engine reference --engine ddp --engine fsdp2

Runs the cells once for each way and holds every cell's verdict, excuse and first wrong number against those of the
first way. Prints what differs; exit code 1 when anything does.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from zharness.releases.rank_environment import get_release_environment
from zharness.run import Record, Request, Verdict
from zharness.run.check_loop import RunOptions, run_request
from zharness.world import Isolation


@dataclass(frozen=True)
class Way:
    """How cells are run: on which ranks, and in which order (None: that of the matrix)."""

    isolation: Isolation
    shuffle: int | None = None

    def __str__(self) -> str:
        return self.isolation.value + ("" if self.shuffle is None else f", shuffled by {self.shuffle}")


POOLED, FRESH = Isolation.POOLED, Isolation.FRESH
WAYS = (Way(POOLED), Way(POOLED), Way(POOLED, 1), Way(POOLED, 2), Way(FRESH), Way(FRESH, 1))


def verdict(record: Record) -> str:
    """What has to be the same. A crash has no number, and which rank tells of it first is a matter of time."""
    excuse = f" ({record.expected_failure})" if record.expected_failure else ""
    number = f": {record.divergence.describe()}" if record.divergence is not None else ""
    return f"{record.verdict.value}{excuse}{number}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="checks, groups or globs; all checks")
    parser.add_argument("--engine", action="append", default=[], help="may be repeated (reference)")
    parser.add_argument("--dtype", action="append", default=[], help="may be repeated (fp32)")
    parser.add_argument("--stage", action="append", type=int, default=[], help="may be repeated; all the engine has")
    parser.add_argument("--jobs", type=int, default=0, help="cells at a time; one for each core")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the ranks of one cell (%(default)s)")
    asked = parser.parse_args()
    request = Request(
        patterns=tuple(asked.patterns),
        engines=tuple(asked.engine) or ("reference",),
        stages=tuple(asked.stage),
        dtypes=tuple(asked.dtype) or ("fp32",),
    )
    first: dict[str, Record] = {}
    different = 0
    for number, way in enumerate(WAYS, start=1):
        print(f"run {number} of {len(WAYS)}: {way}", file=sys.stderr)
        began = time.monotonic()
        options = RunOptions(asked.timeout, jobs=asked.jobs, isolation=way.isolation, shuffle_seed=way.shuffle)
        records, _ = run_request(request, options, lambda: None, get_release_environment)
        found = {record.cell.id: record for record in records if record.verdict is not Verdict.UNSUPPORTED}
        first = first or found
        changed = [name for name in first if verdict(found[name]) != verdict(first[name])]
        unexpected = sum(not record.is_expected for record in found.values())
        # Each as it ends, so that a run that is interrupted has shown what it found.
        print(
            f"{way!s:24}{len(found)} cells in {time.monotonic() - began:.0f} s, {unexpected} unexpected, "
            f"{len(changed)} unlike the first run's",
            flush=True,
        )
        for name in changed:
            print(f"  {name}\n    {verdict(first[name])}\n    {verdict(found[name])}", flush=True)
        different += len(changed)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
