"""What verifying a model costs: a GPT-2 of about 10 M parameters, every law, beside the engine's and plain runs alone.

    python scripts/bench_model.py [--model PATH] [--engine reference] [--stage 3] [--jobs 0]

Prints the seconds of the whole run, and (whole - engine's - baseline's) / engine's, for cells one after the other:
whole are observing and judging; the engine's run is the same calls with nothing recorded, the baseline's the forwards
and backwards of the plain model within the judge. These are CPU seconds of all processes, which what else runs on the
machine changes little. Figures to reach: 90 s, and 30 %. Micro-batches are 4 rows of all the 128 tokens that the model
has positions for; `--model scripts.bench_model:of_32_tokens` takes those that are drawn for a model without a batch
function, where the engine has less to do and as much is compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import HarnessFault
from zharness.law_kit.rank_context import RankContext
from zharness.laws import get_law
from zharness.parity.baseline import Baseline, LocalResult
from zharness.releases.rank_environment import get_release_environment
from zharness.run import observe_and_judge
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest, check_model
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.workload.models import SAMPLES
from zharness.world import Group, Isolation, RankTask

TIMEOUT = 600.0
AIM = 0.3


def of_32_tokens() -> Any:
    """10.3 M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=384, n_positions=128, vocab_size=8192))


def gpt2() -> Any:
    """The same, and micro-batches as long as it has positions."""

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(8192, (SAMPLES, 128), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return of_32_tokens(), batch


def of_124_million() -> Any:
    """GPT-2 itself: `zharness model scripts.bench_model:of_124_million --stage 3 --jobs 1`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


@dataclass(frozen=True)
class TimedBaseline(Baseline):
    """Notes in a list how long its own runs take."""

    def local(self, *args: Any, **kwargs: Any) -> LocalResult:
        began = time.process_time()
        try:
            return super().run_rank(*args, **kwargs)
        finally:
            SPENT.append(time.process_time() - began)


SPENT: list[float] = []


class SilentBench(RankContext):
    """Records nothing."""

    def record(self, *_: Any, **__: Any) -> None: ...

    def record_weights(self, *_: Any, **__: Any) -> None: ...

    def record_state(self, *_: Any, **__: Any) -> None: ...


def observed(case: Cell, room: str, claims: Capabilities) -> float:
    """In every rank: seconds of the check's own observing."""
    began = time.process_time()
    observe_and_judge.observe(case, 0, room, claims, {})
    return time.process_time() - began


def alone(case: Cell, claims: Capabilities) -> float:
    """In every rank: seconds of the same calls of the engine, with nothing recorded."""
    bench = observe_and_judge.build_cell_context(case, 0, claims, {})
    bench.__class__ = SilentBench
    torch.manual_seed(case.seed(0))
    began = time.process_time()
    get_law(case.law).observe(bench)
    return time.process_time() - began


def judged(case: Cell, room: str, claims: Capabilities) -> tuple[float, float]:
    """In the judge: seconds of judging, and how many of them the plain model ran. Raises HarnessFault for a fail."""
    SPENT.clear()
    plain = observe_and_judge.build_baseline(case, 0, claims)
    timed = TimedBaseline(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    began = time.process_time()
    found = observe_and_judge.judge_against_baseline(timed, case, room, claims)
    took = time.process_time() - began
    if found.mismatch is not None:
        raise HarnessFault(f"{case.id} passed, and does not where it is timed: {found.mismatch.describe()}")
    return took, sum(SPENT)


def built(case: Cell, claims: Capabilities) -> None:
    """In the judge: the model once, which imports what it is made of."""
    observe_and_judge.build_baseline(case, 0, claims).build_module()


def measured(runner: Runner, case: Cell, room: str) -> tuple[float, float, float]:
    """CPU seconds of a cell: whole, engine's and baseline's."""
    claims = runner.claims(case.engine, case.stage)

    def ranks(function: Any, *args: Any) -> float:
        work = RankTask(function, args, case.world_size, TIMEOUT, Group.REUSED, Isolation.POOLED, "bench")
        return sum(runner._servers[case.engine].submit(work).values())

    def judge(function: Any, *args: Any) -> Any:
        work = RankTask(function, args, timeout=TIMEOUT, group=Group.NONE, isolation=Isolation.POOLED)
        return runner._judge_server.submit(work).values()[0]

    ranks(alone, case, claims)  # the first run of a pool imports, and builds the model
    judge(built, case, claims)
    engine, watched = ranks(alone, case, claims), ranks(observed, case, room, claims)
    judging, baseline = judge(judged, case, room, claims)
    return watched + judging, engine, baseline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scripts.bench_model:gpt2")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    wanted = ModelCheckRequest(asked.model, "", asked.engine, (asked.stage,))
    options = RunOptions(timeout=TIMEOUT, jobs=asked.jobs, isolation=Isolation.POOLED)
    records: list[Record] = check_model(
        wanted, options, lambda: None, get_release_environment, report_status=lambda line: print(line, flush=True)
    )
    seconds = time.monotonic() - began
    failed = [record.cell.id for record in records if record.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    print(f"all {len(records)} laws: {seconds:.1f} s; not passed: {', '.join(failed) or 'none'}", flush=True)
    return told([record.cell for record in records if record.verdict is Verdict.PASS], asked.engine) or int(
        bool(failed)
    )


def told(cases: Sequence[Cell], engine: str) -> int:
    """Measure these cells one after the other, and print what each takes; 1 where that is above the aim."""
    sums = (0.0, 0.0, 0.0)
    with (
        Runner({engine: get_release_environment(engine)}, TIMEOUT, isolation=Isolation.POOLED) as runner,
        tempfile.TemporaryDirectory() as room,
    ):
        for case in cases:
            parts = measured(runner, case, room)
            print("{:<28} whole {:6.2f} s, engine {:6.2f} s, baseline {:6.2f} s".format(case.law, *parts), flush=True)
            sums = tuple(map(sum, zip(sums, parts, strict=True)))
    whole, alone_, baseline = sums
    over = (whole - alone_ - baseline) / alone_
    print(f"(whole - engine's - baseline's) / engine's = {over:.0%}")
    return int(over > AIM)


if __name__ == "__main__":
    from scripts.bench_model import main as as_module  # under the name that ranks import its functions by

    sys.exit(as_module())
