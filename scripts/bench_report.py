"""Measure the size of the HTML page of many records, and the seconds until Chromium has loaded it.

    python scripts/bench_report.py [--records 10000] [--evidence 0.02] [--loads 5]

Fails if the median load takes more than 2 seconds from navigation until the matrix is drawn and interactive, or if the
file has more than 15 MB. It uses the installed Chromium (see suites/report/browsers.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))  # the suites are not an installed package

from suites.report.browsers import ARGUMENTS, browser, missing
from suites.report.made_up import records
from zharness.report.page import write_page

MOST_BYTES = 15_000_000
MOST_SECONDS = 2.0
MARK = "performance.getEntriesByName('interactive')[0]?.startTime ?? null"


def main() -> int:
    """Write the page, load it several times and print the figures; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--evidence", type=float, default=0.02, help="share of records that fail and have evidence")
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        sample = records(options.records, options.evidence)
        began = time.perf_counter()
        write_page(sample, 1.0, path)
        write_seconds, size = time.perf_counter() - began, path.stat().st_size
        with sync_playwright() as tool:
            launched = tool.chromium.launch(executable_path=browser(), args=ARGUMENTS)
            measured = [load(launched, path) for _ in range(options.loads)]
            launched.close()
    with_evidence = sum(record.as_json()["evidence"] is not None for record in sample)
    print(
        f"{len(sample)} records, {with_evidence} with evidence: {size / 1e6:.2f} MB, written in {write_seconds:.1f} s"
    )
    loads, busy = zip(*measured, strict=True)
    median, spread = statistics.median(loads), f"{min(loads):.2f} to {max(loads):.2f}"
    print(
        f"interactive after {median:.2f} s (median of {len(loads)}; {spread}); "
        f"the page's thread was busy for {statistics.median(busy):.2f} s, the rest is Chromium and other programs"
    )
    return int(size > MOST_BYTES or median > MOST_SECONDS)


def load(launched: Browser, path: Path) -> tuple[float, float]:
    """Return the seconds from navigation until the page is interactive, and those in which its main thread was busy."""
    page = launched.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.locator("html[data-drawn]").wait_for()
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    seconds = float(page.evaluate(MARK)) / 1000
    page.close()
    return seconds, float(metrics["TaskDuration"])


if __name__ == "__main__":
    sys.exit(main())
