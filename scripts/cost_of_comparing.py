"""What it costs to compare: (cell - engine's run - baseline's run) / engine's run, over the default matrix.

    python scripts/cost_of_comparing.py

The engine's run is what its slowest rank takes to run the check's half of a cell: to build the model and the engine
around it, to draw batches, forwards, backwards, steps, and whatever else is asked of the engine, as the full gradients,
weights and state that it gathers by its own functions. What this package does there besides is comparing: to see that
the engine left the model as it was, to copy what it returned, to look for replaced functions of torch, to write it all
down. The baseline's run is what it takes to build and run the plain model in the cell's dtype; where a process has done
that for another cell already, nothing. All the rest is the cost as well: certificates in float64, reading and judging,
the hand-over to ranks and judge and back. Cells run one after the other, on ranks and a judge that live on.
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
from zharness.releases.rank_environment import get_release_environment
from zharness.run import Request, observe_and_judge, plan
from zharness.world import Group, Isolation, RankServer
from zharness.world.cores import assign_cores
from zharness.world.task import RankTask

BAR = 0.30

Parts = tuple[tuple[Any, str], ...]  # functions, by what they belong to


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one cell: in all, of the engine's slowest rank, of the plain model's runs, and of the judge."""

    case: Cell
    whole: float
    engine: float
    plain: float
    judge: float

    @property
    def ratio(self) -> float:
        """The figure."""
        return (self.whole - self.engine - self.plain) / self.engine


def observed(*arguments: Any) -> float:
    """In a rank: its seconds, without those of comparing."""
    whole, comparing = watched(COMPARING, observe_and_judge.observe, arguments)
    return whole - comparing


def judged(*arguments: Any) -> tuple[float, float]:
    """In the judge's process: its seconds, and among them those in which the plain model was built and run."""
    return watched(PLAIN, observe_and_judge.judge, arguments)


def watched(parts: Parts, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """The seconds of ``function(*arguments)``, and those of them in ``parts``."""
    watch = Watch()
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(patch.object(owner, name, watch.timed(getattr(owner, name))))
        began = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - began, watch.seconds


# In a rank, beside the engine.
COMPARING: Parts = (
    (observe_and_judge, "records_in"),
    (snapshot.EvidenceWriter, "keep"),
    (snapshot.EvidenceWriter, "finish"),
    (rank_context, "conditions"),
    (rank_context.RankContext, "record"),
    (construction.ModelSnapshot, "of"),
    (construction.ModelSnapshot, "require_unchanged"),
)
# In the cell's dtype: what runs once more, in float64, shows that arithmetic is exact, and is part of comparing.
PLAIN: Parts = (*((Baseline, name) for name in ("module", "batch", "local")), (scenarios, "play_plain"))


class Watch:
    """Seconds within any of the functions that it times; one that calls another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, on the clock unless it is asked for float64."""

        @wraps(function)
        def on_the_clock(*args: Any, **options: Any) -> Any:
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

        return on_the_clock


def cost(ranks: RankServer, judges: RankServer, case: Cell, claims: Capabilities, room: str) -> Cost:
    """One cell as ``zharness check --isolation pooled`` runs it: files in ``room`` are those of the cell before."""
    began = time.perf_counter()
    common = {"timeout": 60.0, "isolation": Isolation.POOLED}
    pool = f"stage {case.stage}"  # ranks are one stage's, the judge is everyone's
    arguments = (case, 0, room, claims, {})
    seen = submitted(ranks, observed, arguments, case.world_size, group=Group.REUSED, pool=pool, **common)
    judge, plain = submitted(judges, judged, (case, 0, room, claims), 1, group=Group.NONE, **common)[0]
    return Cost(case, time.perf_counter() - began, max(seen), plain, judge)


def submitted(
    server: RankServer, function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, **options: Any
) -> list[Any]:
    """What every rank returned."""
    return server.submit(RankTask(function, arguments, ranks, **options)).values()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="reference", help="(%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="every so manieth cell only (%(default)s)")
    options = parser.parse_args()
    importlib.import_module("torch._dynamo")  # here once, or in every process again
    claimed = {stage: engines.capabilities(options.engine, stage) for stage in range(4)}
    cells = [
        planned.cell
        for planned in plan(Request(engines=(options.engine,)), lambda _, stage: claimed[stage])
        if not planned.unsupported_reason
    ][:: options.every]
    with RankServer(get_release_environment(options.engine)) as ranks, RankServer() as judges:
        for server in (ranks, judges):
            server.pin_to_cores(assign_cores(0, os.cpu_count() or 1))  # as a lane among as many as there are cores
        room = tempfile.mkdtemp(dir=judges.scratch_dir)
        for case in {case.stage: case for case in cells}.values():
            cost(ranks, judges, case, claimed[case.stage], room)  # the first of its stage starts the ranks
        costs = [cost(ranks, judges, case, claimed[case.stage], room) for case in tqdm(cells, unit="cell")]
    return report(costs)


def report(costs: list[Cost]) -> int:
    """The table, and whether the median keeps to the bar."""
    groups: dict[str, list[Cost]] = {}
    for each in costs:
        groups.setdefault(each.case.law.partition(".")[0], []).append(each)
    rows = [
        [
            name,
            len(found),
            *(f"{1000 * statistics.median(getattr(each, part) for each in found):.1f}" for part in PARTS),
            f"{statistics.median(each.ratio for each in found):.0%}",
        ]
        for name, found in {**groups, "all": costs}.items()
    ]
    print(tabulate(rows, ["group", "cells", *(f"{part}, ms" for part in PARTS), "cost of comparing"]))
    return 1 if statistics.median(each.ratio for each in costs) > BAR else 0


PARTS = ("whole", "engine", "plain", "judge")

if __name__ == "__main__":
    sys.exit(main())
