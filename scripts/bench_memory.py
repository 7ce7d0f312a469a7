"""Compare the memory that `zharness model` announces with the peak of its processes, and print their CPU time.

    python scripts/bench_memory.py suites.model.large:of_64_mib [--engine NAME] [--stage N] [--only LAW ...] [--jobs N]

The measured memory is memory that the system cannot reclaim: anonymous and shared pages of the command's processes
(Pss_Anon and Pss_Shmem in /proc/PID/smaps_rollup: a page that several processes share counts once), read every tenth of
a second. The temporary files that ranks record are measured separately: the judge maps them, but the system can drop
their pages when memory runs short. CPU time is the time of all processes, from the same samples.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB, KIB = 2**30, 2**10
INTERVAL = 0.1  # seconds
ROUNDING = 0.05  # GiB, by which an announced size may be rounded
ANNOUNCED = re.compile(r"at most ([\d.]+) GiB, and ([\d.]+) ([GM])iB of temporary files")
UNITS = {"G": GIB, "M": 2**20}
PAGES = re.compile(r"^Pss_(?:Anon|Shmem): +(\d+) kB", re.MULTILINE)


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
    command = [sys.executable, "-m", "zharness", "model", "--ignore-memory-limit", arguments.model, *options]
    began, peak, most_files, cpu_seconds = time.monotonic(), 0, 0, dict[int, float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):
        assert process.stdout is not None, "it was asked for"
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        while process.poll() is None:
            members = list(find_family(process.pid))
            peak = max(peak, sum(map(read_memory, members)))
            most_files = max(most_files, sum(map(read_size, Path(folder).rglob("*"))))
            cpu_seconds |= {pid: seconds for pid in members if (seconds := read_cpu_seconds(pid)) > 0}
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERVAL)
        reader.join()
    output = "".join(lines)
    announced = ANNOUNCED.search(output)
    if process.returncode not in (0, 1) or announced is None:
        sys.exit(f"{output}\nuntil then: {peak / GIB:.2f} GiB of memory, {most_files / GIB:.2f} GiB of files")
    memory, files = peak / GIB / float(announced[1]), most_files / GIB
    announced_files = float(announced[2]) * UNITS[announced[3]] / GIB
    print(output.strip().splitlines()[-1])
    print(
        f"{arguments.model} on {arguments.engine} {arguments.stage}: {peak / GIB:.2f} GiB of {announced[1]} GiB "
        f"announced ({memory:.0%}), {files:.2f} GiB of {announced_files:.2f} GiB of files, "
        f"{sum(cpu_seconds.values()):.0f} s of CPU time in {time.monotonic() - began:.0f} s"
    )
    return int(memory > 1 or files > announced_files + ROUNDING)


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


def read_memory(pid: int) -> int:
    """Return the pages of a process that no file backs, in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(size) for size in PAGES.findall(text)) * KIB


def read_size(path: Path) -> int:
    """Return the bytes that a file takes on its disk; 0 if it does not exist."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def read_cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far; 0 if it has ended."""
    stat = read_stat(pid)
    return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


if __name__ == "__main__":
    sys.exit(main())
