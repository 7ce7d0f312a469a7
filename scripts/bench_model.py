"""Measure what verifying a model costs: every law on a GPT-2 of about 10 M parameters.

    python scripts/bench_model.py [--model PATH] [--engine reference] [--stage 3] [--jobs 0]

Prints the seconds of the whole run, and (whole - engine - baseline) / engine over the cells, run one after another.
Here "whole" is observing and judging, "engine" is the same calls of the engine without recording, and "baseline" is the
forwards and backwards of the plain model in the judge. All three are CPU seconds of all processes, which other load on
the machine changes little. Targets: 60 s, and 30 %. Micro-batches are 4 rows of 128 tokens, the model's full length;
`--model scripts.bench_model:of_32_tokens` uses the shorter random batches of a model without a batch function: the
engine computes less, while the number of compared elements stays the same.
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
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import observe_and_judge
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest, check_model
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.workload.models import SAMPLES
from zharness.world import GroupMode, Isolation, RankTask

TIMEOUT = 600.0
AIM = 0.3  # largest cost of verifying, as a share of the engine's CPU time


def of_32_tokens() -> Any:
    """Build a GPT-2 with 10.3 M parameters and no batch function."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=384, n_positions=128, vocab_size=8192))


def gpt2() -> Any:
    """Build the same GPT-2, with micro-batches as long as its number of positions."""

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return random token ids, which are inputs and labels."""
        ids = torch.randint(8192, (SAMPLES, 128), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return of_32_tokens(), batch


def of_124_million() -> Any:
    """Build GPT-2 with 124 M parameters: `zharness model scripts.bench_model:of_124_million --stage 3 --jobs 1`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


@dataclass(frozen=True)
class TimedBaseline(Baseline):
    """A baseline that appends the CPU seconds of each of its runs to ``RUN_SECONDS``."""

    def run_rank(self, *args: Any, **kwargs: Any) -> LocalResult:
        began = time.process_time()
        try:
            return super().run_rank(*args, **kwargs)
        finally:
            RUN_SECONDS.append(time.process_time() - began)


RUN_SECONDS: list[float] = []


class SilentRankContext(RankContext):
    """A context that records nothing."""

    def record(self, *_: Any, **__: Any) -> None: ...

    def record_weights(self, *_: Any, **__: Any) -> None: ...

    def record_optimizer_state(self, *_: Any, **__: Any) -> None: ...


def time_observe(cell: Cell, folder: str, claims: Capabilities) -> float:
    """Observe a cell and return the CPU seconds; runs on every rank."""
    began = time.process_time()
    observe_and_judge.observe(cell, 0, folder, claims, {})
    return time.process_time() - began


def time_engine(cell: Cell, claims: Capabilities) -> float:
    """Make the cell's calls of the engine without recording and return the CPU seconds; runs on every rank."""
    ctx = observe_and_judge.build_cell_context(cell, 0, claims, {})
    ctx.__class__ = SilentRankContext
    torch.manual_seed(cell.seed(0))
    began = time.process_time()
    get_law(cell.law).observe(ctx)
    return time.process_time() - began


def time_judge(cell: Cell, folder: str, claims: Capabilities) -> tuple[float, float]:
    """Judge a cell; return the CPU seconds, and those of the plain model's runs. Raises HarnessFault if a law is
    broken.
    """
    RUN_SECONDS.clear()
    plain = observe_and_judge.build_baseline(cell, 0, claims)
    timed = TimedBaseline(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    began = time.process_time()
    judgement = observe_and_judge.judge_against_baseline(timed, cell, folder, claims)
    seconds = time.process_time() - began
    if judgement.mismatch is not None:
        raise HarnessFault(f"{cell.id} passed before, but fails while it is timed: {judgement.mismatch.describe()}")
    return seconds, sum(RUN_SECONDS)


def build_model(cell: Cell, claims: Capabilities) -> None:
    """Build the cell's model once in the judge's process, so that its imports are not timed later."""
    observe_and_judge.build_baseline(cell, 0, claims).build_module()


def measure_cell(runner: Runner, cell: Cell, folder: str) -> tuple[float, float, float]:
    """Return the CPU seconds of a cell: whole, engine and baseline."""
    claims = runner.claims(cell.engine, cell.stage)

    def run_on_ranks(function: Any, *args: Any) -> float:
        """Return the sum of the numbers that ``function`` returns on the ranks."""
        task = RankTask(function, args, cell.world_size, TIMEOUT, GroupMode.REUSED, Isolation.POOLED, "bench")
        return sum(runner._servers[cell.engine].submit(task).values())

    def run_on_judge(function: Any, *args: Any) -> Any:
        """Return the result of ``function`` in the judge's process."""
        task = RankTask(function, args, timeout=TIMEOUT, group=GroupMode.NONE, isolation=Isolation.POOLED)
        return runner._judge_server.submit(task).values()[0]

    run_on_ranks(time_engine, cell, claims)  # the first run in a pool includes imports and the build of the model
    run_on_judge(build_model, cell, claims)
    engine = run_on_ranks(time_engine, cell, claims)
    observing = run_on_ranks(time_observe, cell, folder, claims)
    judging, baseline = run_on_judge(time_judge, cell, folder, claims)
    return observing + judging, engine, baseline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scripts.bench_model:gpt2")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    request = ModelCheckRequest(arguments.model, "", arguments.engine, (arguments.stage,))
    options = RunOptions(timeout=TIMEOUT, jobs=arguments.jobs, isolation=Isolation.POOLED)
    records: list[Record] = check_model(
        request, options, lambda: None, prepare_rank_environment, report_status=lambda line: print(line, flush=True)
    )
    seconds = time.monotonic() - began
    failed = [record.cell.id for record in records if record.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    print(f"all {len(records)} laws: {seconds:.1f} s; not passed: {', '.join(failed) or 'none'}", flush=True)
    passed = [record.cell for record in records if record.verdict is Verdict.PASS]
    return measure_cells(passed, arguments.engine) or int(bool(failed))


def measure_cells(cells: Sequence[Cell], engine: str) -> int:
    """Measure cells one after another and print their seconds; return 1 if the cost is above ``AIM``, else 0."""
    sums = (0.0, 0.0, 0.0)
    with (
        Runner({engine: prepare_rank_environment(engine)}, TIMEOUT, isolation=Isolation.POOLED) as runner,
        tempfile.TemporaryDirectory() as folder,
    ):
        for cell in cells:
            parts = measure_cell(runner, cell, folder)
            print("{:<28} whole {:6.2f} s, engine {:6.2f} s, baseline {:6.2f} s".format(cell.law, *parts), flush=True)
            sums = tuple(map(sum, zip(sums, parts, strict=True)))
    whole, engine_alone, baseline = sums
    cost = (whole - engine_alone - baseline) / engine_alone
    print(f"(whole - engine - baseline) / engine = {cost:.0%}")
    return int(cost > AIM)


if __name__ == "__main__":
    from scripts.bench_model import main as imported_main  # ranks import the functions under this module name

    sys.exit(imported_main())
