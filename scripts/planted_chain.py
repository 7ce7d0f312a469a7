"""Plant a fault into a DeepSpeed that trains a checkpointed GPT-2 with LoRA; find, shrink and export the fault.

    python scripts/planted_chain.py [--seconds 45]

Each step is a command of docs/your-model.md; a line shows its exit code and seconds. The exit code is 1 if the fault is
not found, the smallest model has more than 3 modules, or the script does not fail.
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
CELL = f"training.grads[deepspeed-zero2-w2-fp32-{MODEL}]"
FACTOR = "it is 1.0001 x the right gradient"
MODULES = 3


def run_step(title: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and print its exit code and seconds."""
    began = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    print(f"{title}: exit code {result.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return result


def require(condition: bool, message: str, run: subprocess.CompletedProcess[str]) -> None:
    """Exit with ``message`` and the output of ``run`` unless ``condition``."""
    if not condition:
        sys.exit(f"{message}\n{run.stdout}\n{run.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default="45", help="Limit of the search for the smallest model.")
    arguments = parser.parse_args()
    zharness = [sys.executable, "-m", "zharness"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "small.py"
        model = run_step("found", [*zharness, "model", MODEL, "--engine", "deepspeed", "--stage", "2"])
        require(model.returncode == 1 and FACTOR in model.stdout, "the fault is not found", model)
        shrink = run_step("shrunk", [*zharness, "shrink", CELL, "--seconds", arguments.seconds, "-o", str(script)])
        require(shrink.returncode == 0, "the script does not reproduce the smallest failure", shrink)
        size = re.search(r"^  training.*\((\d+) modules", shrink.stderr, re.MULTILINE)
        require(size is not None and int(size[1]) <= MODULES, f"more than {MODULES} modules are left", shrink)
        ranks = re.search(r"--nproc_per_node=(\d+)", script.read_text())
        require(ranks is not None, "the script does not name its torchrun command", shrink)
        assert ranks is not None, "checked by require"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks[1]}"]
        shown = run_step("torchrun", [*launch, str(script)])
        require(shown.returncode != 0 and "repro: REPRODUCED" in shown.stdout, "the script does not fail", shown)
        print(next(line for line in shown.stdout.splitlines() if "REPRODUCED" in line))
        print(next(line.strip() for line in shrink.stderr.splitlines() if line.startswith("  training")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
