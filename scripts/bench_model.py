"""What verifying a model costs: a GPT-2 of about 10 M parameters, every law, beside the engine's and plain runs alone.

    python scripts/bench_model.py [--model PATH] [--engine reference] [--stage 3] [--jobs 0]

Prints the seconds of the whole run, and (whole - engine's - baseline's) / engine's, for cells one after the other:
whole are observing and judging; the engine's run is the same calls with nothing recorded, the baseline's the forwards
and backwards of the plain model within the judge.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from zharness.case import Case
from zharness.checks import check_named
from zharness.checks.bench import Bench
from zharness.engines import Capabilities
from zharness.parity.baseline import Baseline, Local
from zharness.report.live import Options
from zharness.report.own_model import Asked, run_model
from zharness.run import cell
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner, surroundings
from zharness.world import Group, Isolation, Work

TIMEOUT = 600.0


def gpt2() -> Any:
    """10.3 M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=384, n_positions=128, vocab_size=8192))


@dataclass(frozen=True)
class TimedBaseline(Baseline):
    """Notes in a list how long its own runs take."""

    def local(self, *args: Any, **kwargs: Any) -> Local:
        began = time.perf_counter()
        try:
            return super().local(*args, **kwargs)
        finally:
            SPENT.append(time.perf_counter() - began)


SPENT: list[float] = []


class SilentBench(Bench):
    """Records nothing."""

    def record(self, *_: Any, **__: Any) -> None: ...

    def record_weights(self, *_: Any, **__: Any) -> None: ...

    def record_state(self, *_: Any, **__: Any) -> None: ...


def observed(case: Case, room: str, claims: Capabilities) -> float:
    """In every rank: seconds of the check's own observing."""
    began = time.perf_counter()
    cell.observe(case, 0, room, claims, {})
    return time.perf_counter() - began


def alone(case: Case, claims: Capabilities) -> float:
    """In every rank: seconds of the same calls of the engine, with nothing recorded."""
    bench = cell.bench_of(case, 0, claims, {})
    bench.__class__ = SilentBench
    torch.manual_seed(case.seed(0))
    began = time.perf_counter()
    check_named(case.check).observe(bench)
    return time.perf_counter() - began


def judged(case: Case, room: str, claims: Capabilities) -> tuple[float, float]:
    """In the judge: seconds of judging, and how many of them the plain model ran."""
    SPENT.clear()
    plain = cell.baseline_of(case, 0)
    fields: Mapping[str, Any] = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    cell.baseline_of = lambda *_: TimedBaseline(**fields)
    began = time.perf_counter()
    cell.judge(case, 0, room, claims)
    return time.perf_counter() - began, sum(SPENT)


def measured(runner: Runner, case: Case) -> tuple[float, float, float]:
    """Seconds of a cell: whole, engine's and baseline's."""
    claims = runner.claims(case.engine, case.stage)
    with tempfile.TemporaryDirectory() as room:

        def ranks(function: Any, *args: Any) -> float:
            work = Work(function, args, case.world_size, TIMEOUT, Group.KEPT, Isolation.POOLED, "bench")
            return max(runner._servers[case.engine].submit(work).values())

        ranks(alone, case, claims)  # the first run of a pool imports, and builds the model
        engine, watched = ranks(alone, case, claims), ranks(observed, case, room, claims)
        work = Work(judged, (case, room, claims), timeout=TIMEOUT, group=Group.NONE, isolation=Isolation.POOLED)
        judging, baseline = runner._judges.submit(work).values()[0]
    return watched + judging, engine, baseline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scripts.bench_model:gpt2")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    wanted = Asked(asked.model, "", asked.engine, (asked.stage,))
    options = Options(timeout=TIMEOUT, lanes=asked.jobs, isolation=Isolation.POOLED)
    records: list[Record] = run_model(wanted, options, lambda: None, told=lambda line: print(line, flush=True))
    seconds = time.monotonic() - began
    failed = [record.case.id for record in records if record.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    print(f"all {len(records)} laws: {seconds:.1f} s; not passed: {', '.join(failed) or 'none'}", flush=True)
    whole = engine = baseline = 0.0
    with Runner({asked.engine: surroundings(asked.engine)}, TIMEOUT, isolation=Isolation.POOLED) as runner:
        for record in records:
            if record.verdict is Verdict.PASS:
                parts = measured(runner, record.case)
                print("{:<28} whole {:6.2f} s, engine {:6.2f} s, baseline {:6.2f} s".format(record.case.check, *parts))
                whole, engine, baseline = (a + b for a, b in zip((whole, engine, baseline), parts, strict=True))
    print(f"(whole - engine's - baseline's) / engine's = {(whole - engine - baseline) / engine:.0%}")
    return int(bool(failed))


if __name__ == "__main__":
    from scripts.bench_model import main as as_module  # under the name that ranks import its functions by

    sys.exit(as_module())
