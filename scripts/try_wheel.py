"""Install a built wheel into an empty environment, and run a newcomer's commands there, with a stopwatch.

    python scripts/try_wheel.py dist FOLDER

The environment has only the wheel and its requirements under constraints.txt, a copy as a user would download it; the
last commands add the extras that they need. The commands run in an empty folder, so that they cannot find the clone.
FOLDER must not exist. The exit code is 1 if a command has another exit code than the listed one, takes longer than
TIME_LIMIT, or prints a traceback that is not part of its output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 1500  # seconds for one command; pip took 360 s on a busy machine
# A constraint in the caller's environment would hide that constraints.txt does not suffice.
LEFT_OUT = ("PYTHON", "VIRTUAL_ENV", "ZHARNESS", "PIP_CONSTRAINT")
TRACEBACK = "Traceback (most recent call last)"
BROKEN = "zharness.mutants:loses_the_shards_edge"
CELL = f"training.grads[{BROKEN}-zero2-w2-fp32-mlp]"


@dataclass(frozen=True)
class Trial:
    """A command, a part of its output, and its exit code."""

    line: str
    shows: str
    code: int = 0


# ``{wheel}`` stands for the wheel's path. The second part needs extras.
WITHOUT_EXTRAS = (
    Trial("pip install '{wheel}' -c constraints.txt", ""),
    Trial("zharness --version", "zharness, version"),
    Trial("zharness tour", "gradient"),
    Trial("zharness list laws", "training.grads"),
    Trial("zharness doctor", "python"),
    Trial("zharness check 'training.grads[reference-zero3-w2-fp32-mlp]'", "1 pass"),
    Trial(f"zharness check training.grads --engine {BROKEN} --stage 2 --model mlp --jsonl failing.jsonl", "FAIL", 1),
    Trial("zharness report failing.jsonl", "it is broken", 1),
    Trial("zharness init failing.jsonl", "zharness.toml"),
    Trial("zharness laws versions", "1.0"),
    Trial("zharness mutants loses_the_shards_edge --scope targets", "killed"),
    Trial("zharness repro zero1-step-between-backwards", "as expected"),
    Trial("zharness repro zero1-step-between-backwards --issue", "### "),
    Trial(f"zharness export '{CELL}' -o shown.py", "shows the same verdict"),
    Trial("torchrun --standalone --nproc_per_node=2 shown.py", "", 1),
    Trial("zharness check ddp --engine nonsense", "nonsense", 2),
)
WITH_EXTRAS = (
    Trial("pip install '{wheel}[report]' pytest -c constraints.txt", ""),
    Trial("zharness report failing.jsonl --html failing.html", "it is broken", 1),
    Trial("zharness site failing.jsonl -o site", "site/index.html"),
    Trial("pytest --pyargs zharness.repro -k zero1_noreport_step_between_backwards -p no:cacheprovider", "1 passed"),
    Trial("pytest test_shards.py", "2 passed"),
)
SHARDS = """import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2, 4)
def test_the_shards_sum_to_the_whole(rank, world_size):
    total = torch.arange(8.0).chunk(world_size)[rank].sum()
    dist.all_reduce(total)
    assert total.item() == 28.0
"""


def run_trial(trial: Trial, wheel: Path, folder: Path) -> list[str]:
    """Run one command in ``folder/work``, print how long it took, and return its problems."""
    programs = folder / "env" / "bin"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    environment = {**inherited, "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(programs.parent)}
    start = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", trial.line.replace("{wheel}", str(wheel))],  # noqa: S607
            cwd=folder / "work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIME_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"it took longer than {TIME_LIMIT} s"
        print(f"{TIME_LIMIT:6.1f} s  killed  {trial.line}\n         WRONG: {problem}", flush=True)
        return [problem]
    output = done.stdout + done.stderr
    print(f"{time.monotonic() - start:6.1f} s  exit {done.returncode}  {trial.line}", flush=True)
    problems = []
    if done.returncode != trial.code:
        problems.append(f"exit code {done.returncode}; expected {trial.code}")
    if trial.shows not in output:
        problems.append(f"the output has no {trial.shows!r}")
    if TRACEBACK in output and not trial.line.startswith("torchrun"):
        problems.append("the output has a traceback")
    if problems:
        print("\n".join([*(f"         WRONG: {text}" for text in problems), output[-3000:]]), flush=True)
    return problems


def main() -> int:
    """Make the environment, run every command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name a folder that does not")
    folder = arguments.folder.resolve()
    (wheel,) = arguments.dist.resolve().glob("*.whl")
    (folder / "work").mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    shutil.copy(ROOT / "constraints.txt", folder / "work")
    (folder / "work" / "test_shards.py").write_text(SHARDS, encoding="utf-8")
    problems = [text for trial in (*WITHOUT_EXTRAS, *WITH_EXTRAS) for text in run_trial(trial, wheel, folder)]
    print(f"{len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
