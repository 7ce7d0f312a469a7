"""Check the models of the zoo on every engine, and write the table of docs/your-model.md.

    python scripts/zoo.py --jsonl zoo.jsonl [--engine NAME ...] [--model NAME ...] [--only LAW ...] [--write]

Every law that applies to a user's model runs, in fp32 on 2 ranks, unless --only names laws. A model that the file has
on an engine is not run again. ``--write`` puts the table of the whole file between the marks in docs/your-model.md. The
exit code is 1 if a verdict is neither a pass nor explained, or if a model compared no gradient. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tabulate import tabulate

from zharness.releases.rank_environment import prepare_rank_environment
from zharness.report.failures import render_failures
from zharness.run import Record
from zharness.run.check_loop import RunOptions, open_optional_record_file
from zharness.run.model_check import ModelCheckRequest
from zharness.run.model_matrix import check_models
from zharness.run.outcomes import count_outcomes
from zharness.run.record import RecordFile
from zharness.run.record_reader import load_records
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.world import Isolation

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
ENGINES = {"reference": (3,), "ddp": (0,), "zero1": (1,), "fsdp2": (3,), "deepspeed": (1, 2, 3)}
MODELS = {
    "suites.model.tiny": ("perceptron",),
    "suites.model.zoo": ("batch_norm", "conv_net", "dropping", "lstm", "recurrent", "unused"),
    "suites.model.zoo_parts": (
        *("group_norm", "instance_norm", "experts", "tied", "quantized", "dict_output", "dataclass_output"),
        *("nested_output", "complex_part", "float64_part", "late", "recomputed", "encoder", "weight_norm", "gru"),
    ),
    "suites.model.tiny_real": ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "lora"),
    "suites.model.zoo_transformers": (
        *("albert", "bart", "convnext", "distilbert", "gemma", "gpt_neox", "mamba", "opt", "qwen2", "resnet", "swin"),
    ),
}
NAMES = [name for names in MODELS.values() for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated (all engines)")
    parser.add_argument("--model", action="append", choices=NAMES, help="may be repeated (all models)")
    parser.add_argument("--only", action="append", default=[], metavar="LAW", help="may be repeated (all laws)")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="start no model after this time (no limit)")
    parser.add_argument("--jsonl", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a time limit loses no record
    earlier = list(load_records([arguments.jsonl]).records) if arguments.jsonl.exists() else []
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    broken = 0
    with records_appended(arguments.jsonl) as part, ExitStack() as stack:
        open_sink = cache(lambda: open_optional_record_file(stack, part))
        for engine in arguments.engine or ENGINES:
            requests = list_requests(engine, arguments.model or NAMES, tuple(arguments.only), earlier)
            broken += check_on_engine(requests, arguments.jobs, open_sink, deadline)
    if arguments.write:
        write_table(load_records([arguments.jsonl]).records)
    return int(bool(broken))


@contextmanager
def records_appended(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, whose content is appended to ``path`` at the end of the block."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        yield part
    finally:
        if part.exists():
            with path.open("ab") as file:
                file.write(part.read_bytes())
            part.unlink()


def list_requests(
    engine: str, models: Sequence[str], only: tuple[str, ...], earlier: Sequence[Record]
) -> list[ModelCheckRequest]:
    """Return a request for each model that has no record on the engine yet."""
    done = {record.cell.model for record in earlier if record.cell.engine == engine}
    paths = [f"{module}:{name}" for module, names in MODELS.items() for name in names if name in models]
    return [
        ModelCheckRequest(path, engine=engine, stages=ENGINES[engine], only=only) for path in paths if path not in done
    ]


def check_on_engine(
    requests: Sequence[ModelCheckRequest], jobs: int, open_sink: Callable[[], RecordFile | None], deadline: float
) -> int:
    """Check models on one engine; return the number of unexplained verdicts and of models without a gradient."""
    options, refused, broken = RunOptions(timeout=120, jobs=jobs, isolation=Isolation.POOLED), [], 0
    runs = check_models(requests, options, open_sink, prepare_rank_environment, lambda _line: None, refused)
    for request, records in runs:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(records).items())
        print(f"{request.model} on {request.engine}: {counts}", flush=True)
        wrong = [record for record in records if not record.is_expected or record.verdict.value == "error"]
        reason = explain_uncompared_gradients(records) if records else refused[-1]
        for text in filter(None, (render_failures(wrong), reason)):
            print(text, flush=True)
        broken += len(wrong) + bool(reason)
        if time.monotonic() > deadline:
            break
    return broken


def write_table(records: Sequence[Record]) -> None:
    """Replace the table between the marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n{render_table(records)}\n{END}", page), encoding="utf-8")


def render_table(records: Sequence[Record]) -> str:
    """Return a row for each model and a column for each engine and stage; unsupported cells are left out."""
    columns = [(engine, stage) for engine, stages in ENGINES.items() for stage in stages]
    body = []
    for module, names in MODELS.items():
        for name in names:
            found = [record for record in records if record.cell.model == f"{module}:{name}"]
            squares = [describe_square([r for r in found if (r.cell.engine, r.cell.stage) == key]) for key in columns]
            body.append([name, *squares])
    table = tabulate(body, ["model", *(f"{engine} {stage}" for engine, stage in columns)], tablefmt="github")
    return "\n".join(re.sub(r" +", " ", re.sub(r"-{3,}", "---", line)) for line in table.splitlines())


def describe_square(records: Sequence[Record]) -> str:
    """Return the number of passes, and the number of each other outcome."""
    counts = count_outcomes(records)
    counts.pop("unsupported", None)
    passes = counts.pop("pass", 0)
    others = "".join(f", {count} {outcome}" for outcome, count in counts.items())
    return f"{passes}{others}" if records else "not run"


if __name__ == "__main__":
    sys.exit(main())
