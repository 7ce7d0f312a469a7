"""Compare the memory that `zharness model` announces with the most that its processes had, and print their CPU time.

    python scripts/bench_memory.py suites.model.large:of_64_mib [--engine NAME] [--stage N] [--only LAW ...] [--jobs N]

The memory is the sum of the proportional set sizes of the command's processes (Pss in /proc/PID/smaps_rollup: a page
that several processes share counts once), read every tenth of a second. It does not count the files of evidence, which
the system may keep in memory as long as that is free. CPU time is that of all processes, from the same samples.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB, KIB = 2**30, 2**10
INTERVAL = 0.1  # seconds
ANNOUNCED = re.compile(r"at most ([\d.]+) GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--stage", default="3")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", default="1")
    arguments = parser.parse_args()
    options = ["--engine", arguments.engine, "--stage", arguments.stage, "--jobs", arguments.jobs]
    options += [word for law in arguments.only for word in ("--only", law)]
    command = [sys.executable, "-m", "zharness", "model", arguments.model, *options]
    began, peak, cpu_seconds = time.monotonic(), 0, dict[int, float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None, "it was asked for"
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        while process.poll() is None:
            members = list(find_family(process.pid))
            peak = max(peak, sum(map(read_pss, members)))
            cpu_seconds |= {pid: seconds for pid in members if (seconds := read_cpu_seconds(pid)) > 0}
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERVAL)
        reader.join()
    output = "".join(lines)
    announced = ANNOUNCED.search(output)
    if process.returncode not in (0, 1) or announced is None:
        sys.exit(output)
    ratio = peak / GIB / float(announced[1])
    print(output.strip().splitlines()[-1])
    print(
        f"{arguments.model} on {arguments.engine} {arguments.stage}: {peak / GIB:.2f} GiB of {announced[1]} GiB "
        f"announced ({ratio:.0%}), {sum(cpu_seconds.values()):.0f} s of CPU time in "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(ratio > 1)


def find_family(root: int) -> Iterator[int]:
    """Yield the ids of ``root`` and of all processes that descend from it."""
    parents = {int(path.name): read_stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = {root}
    while new := {pid for pid, stat in parents.items() if stat and int(stat[1]) in found} - found:
        found |= new
    yield from found


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the command; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def read_pss(pid: int) -> int:
    """Return the proportional set size of a process, in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KIB if found else 0


def read_cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far; 0 if it has ended."""
    stat = read_stat(pid)
    return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


if __name__ == "__main__":
    sys.exit(main())
