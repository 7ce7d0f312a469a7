"""What training costs: the reference engine, DDP, FSDP2 and DeepSpeed beside plain PyTorch without communication."""

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
from engines_bench.timing import PLAIN, TEAMS, Plan, seconds
from engines_bench.work import SIZES
from tabulate import tabulate

from zharness.world import run

EPILOG = """
Time: the plain model and a few engines train in the same ranks, one thread each, in turns of a few steps, so that a
busy moment of the machine meets all of them. In each turn the median step of an engine is divided by that of the plain
model; the table gives the median of these ratios over the turns, their quartiles (the noise), and the ratio of the
fastest steps. Plain PyTorch runs on every rank at once, as the engines do, but tells nobody anything.

Bytes: counted, not timed, on the reference engine. "held" are the storages of parameters, gradients after a backward
and AdamW's state, beside the formula of the ZeRO paper; "sent" is what a step asks of the collectives, beside 2 psi
(stages 0, 1), (A+1) psi (2), 3A psi (3) times (N-1)/N; "gathered" are stage 3's whole parameters.

The exit status is 1 when a figure of the reference engine misses its bar. Ratios mean something on a quiet machine
only: look at the load that is printed first, and at the quartiles.

  python scripts/bench_engines.py                                  everything, about a quarter of an hour
  python scripts/bench_engines.py --size 5M --rounds 5             the small model's times, and all bytes
  python scripts/bench_engines.py --part bytes                     bytes alone, a minute
  python scripts/bench_engines.py --part time --engine reference   without the other engines
"""

# The bars: the median step over plain PyTorch's, by stage of the reference engine.
BARS: Mapping[int, float] = {0: 1.08, 1: 1.15, 2: 1.15, 3: 1.35}
NEAR = 1.02  # how far held and sent bytes may be above their formulas
WORLDS = (1, 2, 4, 8)
PARTS = ("time", "bytes", "growth")
STEPS = {"5M": 3, "50M": 1}  # in a turn: one of the large model takes as long as a dozen of the small one
Key = tuple[str, int]


def times(names: list[str], plan: Plan, cap: float) -> dict[Key, dict[str, float]]:
    """Ratios to the plain model, by engine and stage."""
    found: dict[Key, dict[str, float]] = {}
    for team in TEAMS:
        chosen = tuple(key for key in team if key[0] in names)
        if not chosen:
            continue
        print(f"timing {', '.join(f'{name} {stage}' for name, stage in chosen)}", file=sys.stderr)
        taken = run(seconds, chosen, plan, world_size=2, timeout=cap)[0]
        for key in chosen:
            found[key] = ratios(taken[key], taken[PLAIN])
    return found


def ratios(engine: list[list[float]], plain: list[list[float]]) -> dict[str, float]:
    by_round = sorted(
        statistics.median(theirs) / statistics.median(ours) for theirs, ours in zip(engine, plain, strict=True)
    )
    low, middle, high = statistics.quantiles(by_round, n=4) if len(by_round) > 1 else by_round * 3
    fastest = min(map(min, engine)) / min(map(min, plain))
    median = statistics.median(step for spans in plain for step in spans)
    return {"ratio": middle, "low": low, "high": high, "fastest": fastest, "plain s": median}


def slow(size: str, found: Mapping[Key, Mapping[str, float]]) -> Iterator[str]:
    for (name, stage), figures in found.items():
        if name == "reference" and figures["ratio"] > BARS[stage]:
            yield f"{size}, stage {stage}: {figures['ratio']:.3f} x plain, at most {BARS[stage]}"


def heavy(rows: list[dict[str, float]]) -> Iterator[str]:
    for row in rows:
        where = f"stage {row['stage']:.0f}, {row['ranks']:.0f} ranks, {row['micro-batches']:.0f} micro-batches"
        for got, bar in (("held", "formula"), ("sent", "volume")):
            if row[got] > NEAR * row[bar]:
                yield f"{where}: {got} {row[got]:.0f} bytes, formula {row[bar]:.0f}"
        if row["gathered at rest"] or row["gathered peak"] > row["gathered allowed"]:
            yield f"{where}: gathered {row['gathered at rest']:.0f} at rest, {row['gathered peak']:.0f} at the peak"


def growing(rows: list[dict[str, float]]) -> Iterator[str]:
    for row in rows:
        for name in ("tensors", "threads", "files"):
            if row[name] > 0:
                yield f"stage {row['stage']:.0f}: {row[name]:.0f} more {name}"


def time_table(found: Mapping[Key, Mapping[str, float]]) -> str:
    rows = [
        [name, stage, f["ratio"], f["low"], f["high"], f["fastest"], BARS[stage] if name == "reference" else None]
        for (name, stage), f in found.items()
    ]
    headers = ["engine", "stage", "ratio", "quartile", "quartile", "fastest", "bar"]
    return tabulate(rows, headers, "github", floatfmt=("", "", *[".3f"] * 4, ".2f"), missingval="-")


def byte_table(rows: list[dict[str, float]]) -> str:
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


def worlds(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def installed() -> list[str]:
    return ["reference", "ddp", "fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; repeatable")
    parser.add_argument("--size", action="append", choices=list(STEPS), help="models timed (both); repeatable")
    parser.add_argument("--engine", action="append", choices=installed(), help="engines timed (all); repeatable")
    parser.add_argument("--worlds", type=worlds, default=WORLDS, metavar="N,N", help="world sizes counted (1,2,4,8)")
    parser.add_argument("--rounds", type=int, default=7, help="turns that every engine gets (default 7)")
    parser.add_argument("--steps", type=int, help="steps in a turn (default 3, of the large model 1)")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW everywhere, instead of its default")
    parser.add_argument("--cap", type=float, default=1800.0, help="seconds for one team of engines (default 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, Python {platform.python_version()}, gloo, {os.cpu_count()} cores, load {load}\n")
    parts, problems, written = arguments.part or PARTS, [], {}
    for size in (arguments.size or STEPS) if "time" in parts else []:
        plan = Plan(SIZES[size], arguments.rounds, arguments.steps or STEPS[size], 4, 128, arguments.fused)
        found = times(arguments.engine or installed(), plan, arguments.cap)
        print(f"Median step over plain PyTorch's, {size} parameters, 2 ranks\n\n{time_table(found)}\n")
        problems += slow(size, found)
        written[f"time {size}"] = {f"{name} {stage}": figures for (name, stage), figures in found.items()}
    if "bytes" in parts:
        rows: list[dict[str, Any]] = []
        for world in arguments.worlds:
            print(f"counting bytes on {world} ranks", file=sys.stderr)
            rows += max(run(counting.held, SIZES["5M"], world_size=world, timeout=arguments.cap), key=str)
        print(f"Bytes of the reference engine, 5M parameters, rank by rank the same\n\n{byte_table(rows)}\n")
        problems += heavy(rows)
        written["bytes"] = rows
    if "growth" in parts:
        print("1000 steps of a tiny model at each stage", file=sys.stderr)
        growth = [run(counting.grown, stage, 1000, world_size=2, timeout=arguments.cap)[0] for stage in range(4)]
        print(f"Growth over 1000 steps\n\n{tabulate(growth, 'keys', 'github')}\n")
        problems += growing(growth)
        written["growth"] = growth
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1))
    for words in problems:
        print(f"MISSED {words}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
