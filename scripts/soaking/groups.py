"""Run a thousand groups of ranks, four at a time, and measure open files, threads and shared memory.

python scripts/soak.py groups
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

TESTS = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.world_size({world_size})
@pytest.mark.parametrize("number", range({groups}))
def test_sum(number, rank, world_size):
    # A message from another group, or from an earlier one, would change the sum.
    total = torch.tensor([float(1000 * number + rank)])
    dist.all_reduce(total)
    assert total.item() == world_size * 1000 * number + sum(range(world_size))
"""

CONFTEST = '''
import json, os
from pathlib import Path

def count(pid):
    return (
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
    )

def list_servers():
    """Return the process id of the rank server, this process's only child."""
    children = [Path(f"/proc/self/task/{task}/children").read_text().split() for task in os.listdir("/proc/self/task")]
    return [int(pid) for pids in children for pid in pids]

def pytest_runtest_logfinish(nodeid, location):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    servers = [count(pid) for pid in list_servers()]
    line = {"pytest": count("self"), "server": servers, "shm": len(os.listdir("/dev/shm"))}
    with open(os.path.join(os.environ["SOAK"], os.environ["PYTEST_XDIST_WORKER"]), "a") as file:
        file.write(json.dumps(line) + chr(10))
'''


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.add_argument("--groups", type=int, default=1000, help="number of tests, each with a new group (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="pytest -n (%(default)s)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of a group (%(default)s)")
    parser.add_argument("--isolation", choices=["fresh", "pooled"], default="fresh")


def run(options: argparse.Namespace) -> int:
    """Run the groups in a temporary folder; return 1 if a test failed or a count grew, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        return soak(Path(folder), options)


def soak(folder: Path, options: argparse.Namespace) -> int:
    """Run all groups and print the table; return 1 if a test failed or a count grew, else 0."""
    (folder / "test_soak.py").write_text(TESTS.format(groups=options.groups, world_size=options.world_size))
    (folder / "conftest.py").write_text(CONFTEST)
    counts_folder = folder / "seen"
    counts_folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(options.workers)]
    command += ["--isolation", options.isolation, "--rootdir", str(folder), str(folder)]
    began = time.monotonic()
    environment = {**os.environ, "SOAK": str(counts_folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    print(done.stdout.strip().splitlines()[-1])
    counts = [row for path in sorted(counts_folder.iterdir()) for row in read_counts(path)]
    print(tabulate(counts, headers=["worker", "what", "after the first", "in the middle", "after the last"]))
    print(f"{options.groups} groups of {options.world_size} ranks in {seconds:.1f} s, {options.workers} at a time")
    is_flat = all(row[4] <= row[3] for row in counts)
    print("flat" if is_flat else "something grew")
    return 0 if done.returncode == 0 and is_flat else 1


def read_counts(path: Path) -> list[list[object]]:
    """Return the rows of one xdist worker: its counts and its rank server's after the first, middle and last test."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    picked = [lines[0], lines[len(lines) // 2], lines[-1]]
    return [
        [path.name, "files of pytest", *(line["pytest"][0] for line in picked)],
        [path.name, "threads of pytest", *(line["pytest"][1] for line in picked)],
        [path.name, "files of the rank server", *(line["server"][0][0] for line in picked)],
        [path.name, "threads of the rank server", *(line["server"][0][1] for line in picked)],
        [path.name, "shared memory segments", *(line["shm"] for line in picked)],
    ]
