"""Measure what the installed pytest plugin costs `pytest --collect-only` of a project that does not use it.

Runs with and without the plugin alternate, in a folder with one test file. Prints the medians of processor seconds,
which other work on the machine changes less than wall-clock seconds, and their difference.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TEST_FILE = """
import pytest

@pytest.mark.parametrize("number", range(50))
def test_number(number):
    assert number >= 0
"""
COLLECT = (sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="runs with and without the plugin (default 15)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_number.py").write_text(TEST_FILE, encoding="utf-8")
        with_plugin, without = list[float](), list[float]()
        for _ in range(runs):
            without.append(measure_seconds((*COLLECT, "-p", "no:zharness"), folder))
            with_plugin.append(measure_seconds(COLLECT, folder))
    difference = statistics.median(with_plugin) - statistics.median(without)
    print(
        f"pytest --collect-only: {statistics.median(without):.3f} s without the plugin, "
        f"{statistics.median(with_plugin):.3f} s with it: {1000 * difference:+.1f} ms (medians of {runs} runs)"
    )


def measure_seconds(command: tuple[str, ...], folder: str) -> float:
    """Run ``command`` in ``folder``, and return the processor seconds that it used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
