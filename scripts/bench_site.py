"""Measure the size of the site of many records, and the seconds until Chromium has opened its index.

    python scripts/bench_site.py [--records 50000] [--bad 0.02] [--loads 5]

Fails if the median load of the index takes more than 2 seconds from navigation until its filters work, or if the site
has more than 30 MB. It uses the installed Chromium (see suites/report/browsers.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parents[1]))  # the suites are not an installed package

from suites.report.browsers import launch_chromium, missing
from suites.report.made_up import cells, make_record
from zharness.run.record import Record
from zharness.site.command import build_site

MOST_BYTES = 30_000_000
MOST_SECONDS = 2.0
MARK = "performance.getEntriesByName('interactive')[0].startTime"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
DEEPSPEED_RELEASES = ("0.16.4", "0.17.6", "0.18.8", "0.19.8")
TORCH_RELEASES = ("2.8.0+cpu", "2.9.1+cpu", "2.12.0+cpu", "2.13.0+cpu")


def main() -> int:
    """Write the site, open it several times and print the figures; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--bad", type=float, default=0.02, help="share of records that fail unexpectedly")
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        lines, site = Path(folder) / "records.jsonl", Path(folder) / "site"
        with lines.open("w", encoding="utf-8") as file:
            for record in itertools.islice(invent_records(options.bad), options.records):
                file.write(json.dumps(record.as_json()) + "\n")
        began, used = time.perf_counter(), time.process_time()
        build_site([lines], site)
        seconds, busy = time.perf_counter() - began, time.process_time() - used
        files = [path for path in site.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        law_page = max((site / "laws").iterdir(), key=lambda path: path.stat().st_size)
        with launch_chromium() as launched:
            index = [load(launched, site / "index.html", MARK) for _ in range(options.loads)]
            largest = [load(launched, law_page, LOADED) for _ in range(options.loads)]
    print(f"{len(files)} files, {size / 1e6:.1f} MB, written in {seconds:.1f} s ({busy:.1f} s of the processor)")
    print(f"the index opens in {describe(index)}")
    print(f"the largest page of a law, {law_page.name}, opens in {describe(largest)}")
    return int(size > MOST_BYTES or statistics.median(index) > MOST_SECONDS)


def invent_records(bad: float) -> Iterator[Record]:
    """Yield records without end: each cell on four releases of its engine, the reference on four releases of torch."""
    chance = random.Random(0)  # noqa: S311 - not a secret
    for cell, version in cells():
        for engine_release, torch_release in zip(DEEPSPEED_RELEASES, TORCH_RELEASES, strict=True):
            released = {"deepspeed": engine_release, "reference": version}.get(cell.engine, torch_release)
            record = make_record(cell, released, chance, bad)
            yield replace(record, torch_version=torch_release, evidence=None)


def load(launched: Browser, path: Path, expression: str) -> float:
    """Return the seconds from navigation to the event whose milliseconds ``expression`` evaluates to."""
    page = launched.new_page()
    page.goto(path.as_uri())
    page.wait_for_function(f"{LOADED} > 0")
    seconds = float(page.evaluate(expression)) / 1000
    page.close()
    return seconds


def describe(seconds: list[float]) -> str:
    """Describe the median and the spread of some times."""
    return f"{statistics.median(seconds):.2f} s (median of {len(seconds)}; {min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
