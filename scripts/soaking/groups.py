"""A thousand groups of ranks, four at a time: what is left open between the first and the last.

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
    # A message of another group, or an old one, would change the sum.
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

def server():
    """The rank server is this process's only child."""
    found = [Path(f"/proc/self/task/{task}/children").read_text().split() for task in os.listdir("/proc/self/task")]
    return [int(pid) for pids in found for pid in pids]

def pytest_runtest_logfinish(nodeid, location):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    line = {"pytest": count("self"), "server": [count(pid) for pid in server()], "shm": len(os.listdir("/dev/shm"))}
    with open(os.path.join(os.environ["SOAK"], os.environ["PYTEST_XDIST_WORKER"]), "a") as file:
        file.write(json.dumps(line) + chr(10))
'''


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``."""
    parser.add_argument("--groups", type=int, default=1000, help="tests, each with a group of its own (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="pytest -n (%(default)s)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of a group (%(default)s)")
    parser.add_argument("--isolation", choices=["fresh", "pooled"], default="fresh")


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 when a test failed or something grew."""
    with tempfile.TemporaryDirectory() as folder:
        return soak(Path(folder), options)


def soak(folder: Path, options: argparse.Namespace) -> int:
    """Run them all and print the table; 1 when a test failed or something grew."""
    (folder / "test_soak.py").write_text(TESTS.format(groups=options.groups, world_size=options.world_size))
    (folder / "conftest.py").write_text(CONFTEST)
    seen = folder / "seen"
    seen.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(options.workers)]
    command += ["--isolation", options.isolation, "--rootdir", str(folder), str(folder)]
    began = time.monotonic()
    environment = {**os.environ, "SOAK": str(seen)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    print(done.stdout.strip().splitlines()[-1])
    grown = [row for path in sorted(seen.iterdir()) for row in rows(path)]
    print(tabulate(grown, headers=["worker", "what", "after the first", "in the middle", "after the last"]))
    print(f"{options.groups} groups of {options.world_size} ranks in {seconds:.1f} s, {options.workers} at a time")
    flat = all(row[4] <= row[3] for row in grown)
    print("flat" if flat else "something grew")
    return 0 if done.returncode == 0 and flat else 1


def rows(path: Path) -> list[list[object]]:
    """What one worker saw of itself and of its rank server."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    picked = [lines[0], lines[len(lines) // 2], lines[-1]]
    return [
        [path.name, "files of pytest", *(line["pytest"][0] for line in picked)],
        [path.name, "threads of pytest", *(line["pytest"][1] for line in picked)],
        [path.name, "files of the rank server", *(line["server"][0][0] for line in picked)],
        [path.name, "threads of the rank server", *(line["server"][0][1] for line in picked)],
        [path.name, "shared memory segments", *(line["shm"] for line in picked)],
    ]
