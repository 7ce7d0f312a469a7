"""Time the steps of a large transformer on GPUs: the reference, DDP, FSDP2 and DeepSpeed beside plain PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_engines import compute_ratios, list_installed_engines
from engines_bench.timing import PLAIN, TEAMS, Plan, time_steps
from engines_bench.work import SIZES
from tabulate import tabulate

from zharness.device import POISON_VARIABLE, Poison, choose_backend, compute_device_type
from zharness.errors import ZHarnessError
from zharness.world import run

EPILOG = """
The plain model and a few engines train on the same ranks, in alternating rounds of a few steps; a step ends when its
kernels have ended. Every rank also runs the plain model, without communication, so that plain PyTorch and the engines
share a GPU in the same way. In bf16, DDP and plain PyTorch run forwards under torch.autocast with weights in fp32; the
other engines have weights in bf16 and train fp32 master weights. Collectives of the backend staged are timed without
poisoning. The groups of engines share the seconds that are left; a group with a small share runs fewer and shorter
rounds, but at least one. The figures are written after each group: a run that is cut keeps the figures so far.

  python scripts/bench_gpu.py --ranks 1,2 --json steps.json
  ZHARNESS_DEVICE=cpu python scripts/bench_gpu.py --size tiny --dtype fp32 --json steps.json     tries the script
"""
GRACE_SECONDS = 15.0  # for a round that takes longer than the round before it, and for the end of ranks
COLUMNS = ("engine", "stage", "ranks", "plain ms", "ms", "ratio", "low", "high", "problem")


def time_team(team: Sequence[tuple[str, int]], plan: Plan, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each engine of a group: its median step and its ratio to the plain model's, or the problem.

    The group may take ``seconds``, including its start.
    """
    plan = replace(plan, deadline=time.time() + seconds)
    where = [{"engine": name, "stage": stage, "ranks": ranks} for name, stage in team]
    try:
        timed = run(time_steps, tuple(team), plan, world_size=ranks, timeout=seconds + GRACE_SECONDS)[0]
    except ZHarnessError as error:
        return [{**row, "problem": str(error).splitlines()[0]} for row in where]
    rows = []
    for key, row in zip(team, where, strict=True):
        found = compute_ratios(timed[key], timed[PLAIN])
        plain = 1000 * found["plain s"]
        rows.append({**row, "plain ms": plain, "ms": plain * found["ratio"], **pick(found, ("ratio", "low", "high"))})
    return rows


def pick(figures: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the entries of ``figures`` with these ``names``."""
    return {name: figures[name] for name in names}


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of a list such as ``1,2``."""
    return [int(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="100M", help="parameters of the model (default 100M)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="default bf16")
    parser.add_argument("--ranks", type=parse_numbers, default=[1, 2], metavar="N,N", help="world sizes (default 1,2)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each engine (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round (default 5)")
    parser.add_argument("--samples", type=int, default=8, help="samples of 512 tokens on each rank (default 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample (default 512)")
    parser.add_argument("--seconds", type=float, default=900.0, help="seconds for all groups together (default 900)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures are written")
    return parser.parse_args()


def main() -> None:
    """Time every group of engines on each world size, and write and print the figures after each group."""
    options = parse_arguments()
    plan = Plan(
        SIZES[options.size], options.rounds, options.steps, options.samples, options.length, False, options.dtype
    )
    os.environ.setdefault(POISON_VARIABLE, Poison.OFF.value)
    installed, rows, end = list_installed_engines(), list[dict[str, Any]](), time.time() + options.seconds
    backends = {str(ranks): choose_backend(ranks).value for ranks in options.ranks}
    facts = {"torch": torch.__version__, "device": compute_device_type(), "size": options.size, "dtype": options.dtype}
    facts |= {"poison": os.environ[POISON_VARIABLE], "backends": backends}
    teams = [[key for key in team if key[0] in installed] for team in TEAMS]
    groups = [(ranks, team) for ranks in options.ranks for team in teams if team]
    for number, (ranks, team) in enumerate(groups):
        rows += time_team(team, plan, ranks, (end - time.time()) / (len(groups) - number))
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))
        print(f"{ranks} ranks: {', '.join(f'{name} {stage}' for name, stage in team)}", file=sys.stderr)
    shown = [[row.get(column, "") for column in COLUMNS] for row in rows]
    print(f"Median step, {options.size} parameters, {options.dtype}, {facts['device']}\n")
    print(tabulate(shown, COLUMNS, "github", floatfmt=".3f"))
    sys.exit(any("problem" in row for row in rows))


if __name__ == "__main__":
    main()
