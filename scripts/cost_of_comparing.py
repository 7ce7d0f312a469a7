"""Measure the cost of comparing, (cell - engine's run - baseline's run) / engine's run, over the default matrix.

    python scripts/cost_of_comparing.py

The engine's run is the time that its slowest rank needs to observe a cell: build the model and the engine, draw
batches, run forwards, backwards and steps, and gather full gradients, weights and state by the engine's own functions.
It excludes the work of zharness on the ranks for the comparison: check that the engine left the model unchanged, copy
the tensors that it returned, look for replaced functions of torch, and write the evidence. The baseline's run is the
time to build and run the plain model in the cell's dtype, or 0 if the process has cached it from another cell. All
other time is cost:
certificates in float64, reading and judging, and messages to and from ranks and judge. Cells run one after another on
pooled ranks and a pooled judge.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from tqdm import tqdm

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.law_kit import construction, rank_context, scenarios
from zharness.parity import snapshot
from zharness.parity.baseline import Baseline
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import Request, observe_and_judge, plan
from zharness.world import GroupMode, Isolation, RankServer
from zharness.world.cores import assign_cores
from zharness.world.task import RankTask

BAR = 0.30  # limit on the median cost

Parts = tuple[tuple[Any, str], ...]  # functions, by their module or class and their name


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds of one cell: the whole cell, the engine's slowest rank, the plain model's runs, and the judge."""

    cell: Cell
    whole: float
    engine: float
    plain: float
    judge: float

    @property
    def ratio(self) -> float:
        """The cost of comparing, as a fraction of the engine's run."""
        return (self.whole - self.engine - self.plain) / self.engine


def time_observe(*arguments: Any) -> float:
    """Observe a cell and return the seconds, without the seconds spent on comparing; runs on a rank."""
    whole, comparing = time_parts(COMPARING, observe_and_judge.observe, arguments)
    return whole - comparing


def time_judge(*arguments: Any) -> tuple[float, float]:
    """Judge a cell; return the seconds, and the seconds of building and running the plain model; runs in the judge."""
    return time_parts(PLAIN, observe_and_judge.judge, arguments)


def time_parts(parts: Parts, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Call ``function(*arguments)``; return its seconds, and those spent in ``parts``."""
    stopwatch = Stopwatch()
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(patch.object(owner, name, stopwatch.wrap(getattr(owner, name))))
        began = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - began, stopwatch.seconds


# Functions of zharness that run on a rank in addition to the engine's.
COMPARING: Parts = (
    (observe_and_judge, "open_evidence_writer"),
    (snapshot.EvidenceWriter, "write_snapshot"),
    (snapshot.EvidenceWriter, "finish"),
    (rank_context, "read_process_conditions"),
    (rank_context.RankContext, "record"),
    (construction.ModelSnapshot, "capture"),
    (construction.ModelSnapshot, "require_unchanged"),
)
# Runs of the plain model in the cell's dtype; further runs in float64 are certificates, so they are part of comparing.
PLAIN: Parts = (
    *((Baseline, name) for name in ("build_module", "batch", "run_rank")),
    (scenarios, "run_plain_scenario"),
)


class Stopwatch:
    """The seconds spent within the wrapped functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its calls timed, except calls with torch.float64 among the arguments."""

        @wraps(function)
        def timed_function(*args: Any, **options: Any) -> Any:
            if torch.float64 in args:
                return function(*args, **options)
            began = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return timed_function


def measure_cost(ranks: RankServer, judges: RankServer, cell: Cell, claims: Capabilities, folder: str) -> Cost:
    """Run one cell as ``zharness check --isolation pooled`` does; it overwrites the evidence of the cell before."""
    began = time.perf_counter()
    common = {"timeout": 60.0, "isolation": Isolation.POOLED}
    pool = f"stage {cell.stage}"  # each stage has its own ranks; all stages share the judge
    arguments = (cell, 0, folder, claims, {})
    observing = submit(ranks, time_observe, arguments, cell.world_size, group=GroupMode.REUSED, pool=pool, **common)
    judge, plain = submit(judges, time_judge, (cell, 0, folder, claims), 1, group=GroupMode.NONE, **common)[0]
    return Cost(cell, time.perf_counter() - began, max(observing), plain, judge)


def submit(
    server: RankServer, function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, **options: Any
) -> list[Any]:
    """Run ``function(*arguments)`` on ranks of the server; return the results of all ranks."""
    return server.submit(RankTask(function, arguments, ranks, **options)).values()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="reference", help="(%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="run every n-th cell only (%(default)s)")
    options = parser.parse_args()
    importlib.import_module("torch._dynamo")  # imported here, or else every process imports it
    claimed = {stage: engines.capabilities(options.engine, stage) for stage in range(4)}
    cells = [
        planned.cell
        for planned in plan(Request(engines=(options.engine,)), lambda _, stage: claimed[stage])
        if not planned.unsupported_reason
    ][:: options.every]
    with RankServer(prepare_rank_environment(options.engine)) as ranks, RankServer() as judges:
        for server in (ranks, judges):
            server.pin_to_cores(assign_cores(0, os.cpu_count() or 1))  # like one of several lanes
        folder = tempfile.mkdtemp(dir=judges.scratch_dir)
        for cell in {cell.stage: cell for cell in cells}.values():
            measure_cost(ranks, judges, cell, claimed[cell.stage], folder)  # starts the ranks of the stage
        costs = [measure_cost(ranks, judges, cell, claimed[cell.stage], folder) for cell in tqdm(cells, unit="cell")]
    return report(costs)


def report(costs: list[Cost]) -> int:
    """Print the table of costs; return 1 if the median is above ``BAR``, else 0."""
    groups: dict[str, list[Cost]] = {}
    for cost in costs:
        groups.setdefault(cost.cell.law.partition(".")[0], []).append(cost)
    rows = [
        [
            name,
            len(group),
            *(f"{1000 * statistics.median(getattr(cost, part) for cost in group):.1f}" for part in PARTS),
            f"{statistics.median(cost.ratio for cost in group):.0%}",
        ]
        for name, group in {**groups, "all": costs}.items()
    ]
    print(tabulate(rows, ["group", "cells", *(f"{part}, ms" for part in PARTS), "cost of comparing"]))
    return 1 if statistics.median(cost.ratio for cost in costs) > BAR else 0


PARTS = ("whole", "engine", "plain", "judge")

if __name__ == "__main__":
    sys.exit(main())
