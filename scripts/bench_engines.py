"""Measure training time and bytes of the reference engine, DDP, FSDP2 and DeepSpeed against plain PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from engines_bench import counting
from engines_bench.timing import PLAIN, TEAMS, Plan, time_steps
from engines_bench.work import SIZES
from tabulate import tabulate

from zharness.world import run

EPILOG = """
Time: the plain model and a few engines train on the same ranks, one thread each, in alternating rounds of a few steps,
so that other load on the machine affects all of them. In each round the median step of an engine is divided by that of
the plain model. The table shows the median of these ratios over the rounds, their quartiles (the noise), and the ratio
of the fastest steps. Plain PyTorch runs on every rank at the same time, as the engines do, but without communication.

Bytes: counted, not timed, on the reference engine. "held" are the storages of parameters, gradients after a backward
and AdamW's state, compared with the formula of the ZeRO paper; "sent" are the bytes of a step's collectives, compared
with 2 psi (stages 0, 1), (A+1) psi (2), 3A psi (3) times (N-1)/N; "gathered" are stage 3's unsharded parameters.

The exit status is 1 if a figure of the reference engine exceeds its limit. Ratios are meaningful only on an idle
machine: check the load that is printed first, and the quartiles.

  python scripts/bench_engines.py                                  everything, about a quarter of an hour
  python scripts/bench_engines.py --size 5M --rounds 5             the small model's times, and all bytes
  python scripts/bench_engines.py --part bytes                     bytes alone, a minute
  python scripts/bench_engines.py --part time --engine reference   without the other engines
"""

# Limits on the ratio of the median step to plain PyTorch's, by stage of the reference engine.
BARS: Mapping[int, float] = {0: 1.08, 1: 1.15, 2: 1.15, 3: 1.35}
NEAR = 1.02  # limit on the ratio of held and sent bytes to their formulas
WORLDS = (1, 2, 4, 8)
PARTS = ("time", "bytes", "growth")
STEPS = {"5M": 3, "50M": 1}  # steps in a round; a step of the large model takes as long as a dozen of the small model
Key = tuple[str, int]


def time_engines(names: list[str], plan: Plan, cap: float) -> dict[Key, dict[str, float]]:
    """Time engines on 2 ranks; return their ratios to the plain model by engine and stage."""
    figures: dict[Key, dict[str, float]] = {}
    for team in TEAMS:
        chosen = tuple(key for key in team if key[0] in names)
        if not chosen:
            continue
        print(f"timing {', '.join(f'{name} {stage}' for name, stage in chosen)}", file=sys.stderr)
        seconds = run(time_steps, chosen, plan, world_size=2, timeout=cap)[0]
        for key in chosen:
            figures[key] = compute_ratios(seconds[key], seconds[PLAIN])
    return figures


def compute_ratios(engine: list[list[float]], plain: list[list[float]]) -> dict[str, float]:
    """Return the median, the quartiles and the minimum of an engine's step time over the plain model's."""
    by_round = sorted(
        statistics.median(engine_steps) / statistics.median(plain_steps)
        for engine_steps, plain_steps in zip(engine, plain, strict=True)
    )
    low, middle, high = statistics.quantiles(by_round, n=4) if len(by_round) > 1 else by_round * 3
    fastest = min(map(min, engine)) / min(map(min, plain))
    median = statistics.median(step for spans in plain for step in spans)
    return {"ratio": middle, "low": low, "high": high, "fastest": fastest, "plain s": median}


def find_slow_stages(size: str, figures_by_engine: Mapping[Key, Mapping[str, float]]) -> Iterator[str]:
    """Yield a message for each stage of the reference engine that is slower than its limit."""
    for (name, stage), figures in figures_by_engine.items():
        if name == "reference" and figures["ratio"] > BARS[stage]:
            yield f"{size}, stage {stage}: {figures['ratio']:.3f} x plain, at most {BARS[stage]}"


def find_excess_bytes(rows: list[dict[str, float]]) -> Iterator[str]:
    """Yield a message for each byte count that exceeds its formula or limit."""
    for row in rows:
        where = f"stage {row['stage']:.0f}, {row['ranks']:.0f} ranks, {row['micro-batches']:.0f} micro-batches"
        for measured, formula in (("held", "formula"), ("sent", "volume")):
            if row[measured] > NEAR * row[formula]:
                yield f"{where}: {measured} {row[measured]:.0f} bytes, formula {row[formula]:.0f}"
        if row["gathered at rest"] or row["gathered peak"] > row["gathered allowed"]:
            yield f"{where}: gathered {row['gathered at rest']:.0f} at rest, {row['gathered peak']:.0f} at the peak"


def find_growth(rows: list[dict[str, float]]) -> Iterator[str]:
    """Yield a message for each count of tensors, threads or files that grew."""
    for row in rows:
        for name in ("tensors", "threads", "files"):
            if row[name] > 0:
                yield f"stage {row['stage']:.0f}: {row[name]:.0f} more {name}"


def render_time_table(figures_by_engine: Mapping[Key, Mapping[str, float]]) -> str:
    """Return the table of time ratios."""
    rows = [
        [name, stage, f["ratio"], f["low"], f["high"], f["fastest"], BARS[stage] if name == "reference" else None]
        for (name, stage), f in figures_by_engine.items()
    ]
    headers = ["engine", "stage", "ratio", "quartile", "quartile", "fastest", "bar"]
    return tabulate(rows, headers, "github", floatfmt=("", "", *[".3f"] * 4, ".2f"), missingval="-")


def render_byte_table(rows: list[dict[str, float]]) -> str:
    """Return the table of byte counts."""
    shown = [
        [
            *(int(row[name]) for name in ("stage", "ranks", "micro-batches")),
            *(row["held"] / 2**20, row["held"] / row["formula"]),
            *(row["sent"] / 2**20, row["sent"] / row["volume"] if row["volume"] else None),
            *(row[name] / 2**20 for name in ("gathered peak", "gathered allowed", "gathered at rest")),
        ]
        for row in rows
    ]
    headers = [
        *("stage", "ranks", "A", "held MiB", "/ formula", "sent MiB", "/ formula"),
        *("gathered peak MiB", "allowed", "at rest"),
    ]
    formats = ("", "", "", ".2f", ".4f", ".2f", ".4f", ".2f", ".2f", ".2f")
    return tabulate(shown, headers, "github", floatfmt=formats, missingval="-")


def parse_world_sizes(text: str) -> list[int]:
    """Return the numbers of a list such as ``1,2,4``."""
    return [int(number) for number in text.split(",")]


def list_installed_engines() -> list[str]:
    """Return the engines that can be timed; DeepSpeed only if it is installed."""
    return ["reference", "ddp", "fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; repeatable")
    parser.add_argument("--size", action="append", choices=list(STEPS), help="models timed (both); repeatable")
    parser.add_argument(
        "--engine", action="append", choices=list_installed_engines(), help="engines timed (all); repeatable"
    )
    parser.add_argument(
        "--worlds", type=parse_world_sizes, default=WORLDS, metavar="N,N", help="world sizes counted (1,2,4,8)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each engine (default 7)")
    parser.add_argument("--steps", type=int, help="steps in a round (default 3, of the large model 1)")
    parser.add_argument("--fused", action="store_true", help="use torch's fused AdamW instead of its default")
    parser.add_argument("--cap", type=float, default=1800.0, help="seconds for one group of engines (default 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    return parser.parse_args()


def main() -> None:
    """Measure the requested parts, print their tables, and exit with 1 if a limit is exceeded."""
    arguments = parse_arguments()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, Python {platform.python_version()}, gloo, {os.cpu_count()} cores, load {load}\n")
    parts, problems, written = arguments.part or PARTS, [], {}
    for size in (arguments.size or STEPS) if "time" in parts else []:
        plan = Plan(SIZES[size], arguments.rounds, arguments.steps or STEPS[size], 4, 128, arguments.fused)
        figures_by_engine = time_engines(arguments.engine or list_installed_engines(), plan, arguments.cap)
        print(
            f"Median step over plain PyTorch's, {size} parameters, 2 ranks\n\n{render_time_table(figures_by_engine)}\n"
        )
        problems += find_slow_stages(size, figures_by_engine)
        written[f"time {size}"] = {f"{name} {stage}": figures for (name, stage), figures in figures_by_engine.items()}
    if "bytes" in parts:
        rows: list[dict[str, Any]] = []
        for world in arguments.worlds:
            print(f"counting bytes on {world} ranks", file=sys.stderr)
            rows += max(run(counting.count_bytes, SIZES["5M"], world_size=world, timeout=arguments.cap), key=str)
        print(f"Bytes of the reference engine, 5M parameters, the same on every rank\n\n{render_byte_table(rows)}\n")
        problems += find_excess_bytes(rows)
        written["bytes"] = rows
    if "growth" in parts:
        print("1000 steps of a tiny model at each stage", file=sys.stderr)
        growth = [
            run(counting.measure_growth, stage, 1000, world_size=2, timeout=arguments.cap)[0] for stage in range(4)
        ]
        print(f"Growth over 1000 steps\n\n{tabulate(growth, 'keys', 'github')}\n")
        problems += find_growth(growth)
        written["growth"] = growth
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1))
    for problem in problems:
        print(f"MISSED {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
