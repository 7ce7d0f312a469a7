"""Run every law that applies to user models on every architecture of suites/model and every engine.

    python scripts/soak_models.py [--engine NAME ...] [--model NAME ...] [--stage N ...] [--jsonl FILE]

The default tests run a sample of these cells. Prints a line for each model and engine; the exit code is 1 if a law is
broken.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from zharness.errors import UsageError
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.report.failures import render_failures
from zharness.run.check_loop import RunOptions, open_optional_record_file
from zharness.run.model_check import ModelCheckRequest, check_model
from zharness.run.outcomes import count_outcomes
from zharness.run.record import RecordFile
from zharness.world import Isolation

MODELS = {
    "perceptron": "suites.model.tiny",
    **dict.fromkeys(("gpt2", "llama", "bert", "t5", "vit", "mixtral", "lora"), "suites.model.tiny_real"),
}
ENGINES = {"reference": (0, 1, 2, 3), "deepspeed": (1, 2, 3), "fsdp2": (2, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated (all engines)")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (all models)")
    parser.add_argument("--stage", action="append", type=int, help="may be repeated (all stages of each engine)")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    broken = 0
    with ExitStack() as stack:
        file = open_optional_record_file(stack, arguments.jsonl)
        for model in arguments.model or MODELS:
            for engine in arguments.engine or ENGINES:
                broken += check_on_engine(model, engine, arguments, file)
    return int(bool(broken))


def check_on_engine(model: str, engine: str, arguments: argparse.Namespace, file: RecordFile | None) -> int:
    """Check one model on one engine; return the number of unexpected verdicts and harness errors."""
    options = RunOptions(timeout=300, jobs=arguments.jobs, isolation=Isolation.POOLED)
    path = f"{MODELS[model]}:{model}"
    stages = tuple(stage for stage in ENGINES[engine] if stage in (arguments.stage or ENGINES[engine]))
    request = ModelCheckRequest(path, "", engine, stages, arguments.world_size, arguments.dtype)
    try:
        records = check_model(request, options, lambda: file, prepare_rank_environment)
    except UsageError as error:
        print(f"{model} on {engine}: {error}", flush=True)
        return 1
    counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(records).items())
    wrong = [record for record in records if not record.is_expected or record.verdict.value == "error"]
    print(f"{model} on {engine}: {counts}", flush=True)
    if wrong:
        print(render_failures(wrong), flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
