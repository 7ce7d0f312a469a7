"""A fault planted into DeepSpeed, under a LoRA on a GPT-2 that recomputes: found, made small, and shown by its script.

    python scripts/planted_chain.py [--seconds 45]

Each step is the command that docs/your-model.md has for it, and a line says what it came to and how long it took. Exit
code 1 where the fault is not found, the smallest model has more than 3 modules, or the script does not fail.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "suites.export.planted:lora"
CASE = f"training.grads[deepspeed-zero2-w2-fp32-{MODEL}]"
FACTOR = "it is 1.0001 x the right gradient"
MODULES = 3


def told(what: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and print what it took."""
    began = time.monotonic()
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    print(f"{what}: exit code {found.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def require(condition: bool, what: str, run: subprocess.CompletedProcess[str]) -> None:
    if not condition:
        sys.exit(f"{what}\n{run.stdout}\n{run.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default="45", help="For the search of the smallest.")
    asked = parser.parse_args()
    zharness = [sys.executable, "-m", "zharness"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "small.py"
        model = told("found", [*zharness, "model", MODEL, "--engine", "deepspeed", "--stage", "2"])
        require(model.returncode == 1 and FACTOR in model.stdout, "the fault is not found", model)
        shrink = told("shrunk", [*zharness, "shrink", CASE, "--seconds", asked.seconds, "-o", str(script)])
        require(shrink.returncode == 0, "the smallest is not shown by its script", shrink)
        size = re.search(r"^  training.*\((\d+) modules", shrink.stderr, re.MULTILINE)
        require(size is not None and int(size[1]) <= MODULES, f"more than {MODULES} modules are left", shrink)
        ranks = re.search(r"--nproc_per_node=(\d+)", script.read_text())
        require(ranks is not None, "the script does not say how it is run", shrink)
        assert ranks is not None, "required before"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks[1]}"]
        shown = told("torchrun", [*launch, str(script)])
        require(shown.returncode != 0 and "repro: REPRODUCED" in shown.stdout, "the script does not fail", shown)
        print(next(line for line in shown.stdout.splitlines() if "REPRODUCED" in line))
        print(next(line.strip() for line in shrink.stderr.splitlines() if line.startswith("  training")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
