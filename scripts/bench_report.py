"""The page of many records: its size, and how long until it can be used in Chromium.

    python scripts/bench_report.py [--records 10000] [--evidence 0.02] [--loads 5]

Fails where the median load takes more than 2 seconds from navigation to the first drawn matrix that answers, or the
file has more than 15 MB. Chromium is the one that is installed (see suites/report/browsers.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))  # the suites are no package that is installed

from suites.report.browsers import ARGUMENTS, browser, missing
from suites.report.made_up import records
from zharness.report.page import write_page

MOST_BYTES = 15_000_000
MOST_SECONDS = 2.0
MARK = "performance.getEntriesByName('interactive')[0]?.startTime ?? null"


def main() -> int:
    """Write the page, load it some times, print; 1 when a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--evidence", type=float, default=0.02, help="the share of records that fail, with evidence")
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        made = records(options.records, options.evidence)
        began = time.perf_counter()
        write_page(made, 1.0, path)
        took, size = time.perf_counter() - began, path.stat().st_size
        with sync_playwright() as tool:
            launched = tool.chromium.launch(executable_path=browser(), args=ARGUMENTS)
            found = [load(launched, path) for _ in range(options.loads)]
            launched.close()
    shown = sum(each.as_json()["evidence"] is not None for each in made)
    print(f"{len(made)} records, {shown} with evidence: {size / 1e6:.2f} MB, written in {took:.1f} s")
    loads, worked = zip(*found, strict=True)
    middle, spread = statistics.median(loads), f"{min(loads):.2f} to {max(loads):.2f}"
    print(
        f"interactive after {middle:.2f} s (median of {len(loads)}; {spread}); "
        f"the page's thread worked {statistics.median(worked):.2f} s, the rest is Chromium's and other programs'"
    )
    return int(size > MOST_BYTES or middle > MOST_SECONDS)


def load(launched: Browser, path: Path) -> tuple[float, float]:
    """Seconds from navigation until the page is drawn and answers, and those that its main thread worked."""
    page = launched.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.locator("html[data-drawn]").wait_for()
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    after = float(page.evaluate(MARK)) / 1000
    page.close()
    return after, float(metrics["TaskDuration"])


if __name__ == "__main__":
    sys.exit(main())
