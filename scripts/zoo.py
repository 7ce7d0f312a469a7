"""Check the models of the zoo on every engine, and write the table of docs/your-model.md.

    python scripts/zoo.py --jsonl zoo.jsonl [--engine NAME ...] [--model NAME ...] [--only LAW ...] [--write]
    python scripts/zoo.py --jsonl planted.jsonl --planted [--model NAME ...] [--write]

Every law that applies to a user's model runs, in fp32 on 2 ranks, unless --only names laws. A model whose laws the file
has on an engine is not run again. ``--write`` puts the table of the whole file between the marks in docs/your-model.md.
The exit code is 1 if a verdict is neither a pass nor explained, or if a model compared no gradient.

``--planted`` gives each model one mutant of zharness/mutants as its engine instead, chosen by the model's name, and the
exit code is 1 if fewer than 95 % of the models are red. The laws for which the mutant was written run first, and all
others only if these pass. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import random
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

from zharness.errors import UsageError
from zharness.laws import get_law
from zharness.laws.registry import LAWS
from zharness.mutants import MUTANTS, Mutant, Target
from zharness.names import matches_pattern
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
TO_REACH = 0.95  # the share of planted faults that have to be found
SPECIAL_VARIANTS = ("buffers", "idle")  # of state.resume; they show nothing on a model without such a tensor
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
WHOLE = ("training.grads", "training.sgd_step", "training.ranks_agree")  # each run of all laws has these
NAMES = [name for names in MODELS.values() for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated (all engines)")
    parser.add_argument("--model", action="append", choices=NAMES, help="may be repeated (all models)")
    parser.add_argument("--only", action="append", default=[], metavar="LAW", help="may be repeated (all laws)")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="start no model after this time (no limit)")
    parser.add_argument("--jsonl", type=Path, required=True)
    parser.add_argument("--planted", action="store_true", help="give each model an engine with one planted fault")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a time limit loses no record
    earlier = list(load_records([arguments.jsonl]).records) if arguments.jsonl.exists() else []
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    broken = 0
    with records_appended(arguments.jsonl) as part, ExitStack() as stack:
        open_sink = cache(lambda: open_optional_record_file(stack, part))
        for engine in () if arguments.planted else arguments.engine or ENGINES:
            requests = list_requests(engine, arguments.model or NAMES, tuple(arguments.only), earlier)
            broken += check_on_engine(requests, arguments.jobs, open_sink, deadline)
        for path in list_paths(arguments.model or NAMES) if arguments.planted else ():
            if time.monotonic() < deadline:
                check_planted(path, arguments.jobs, open_sink, earlier)
    if arguments.planted:
        return report_planted(load_records([arguments.jsonl]).records, arguments.write)
    if arguments.write:
        write_table("zoo", render_table(load_records([arguments.jsonl]).records))
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


def list_paths(models: Sequence[str]) -> list[str]:
    """Return the paths of the factories of ``models``."""
    return [f"{module}:{name}" for module, names in MODELS.items() for name in names if name in models]


def list_requests(
    engine: str, models: Sequence[str], only: tuple[str, ...], earlier: Sequence[Record]
) -> list[ModelCheckRequest]:
    """Return a request for each model of which a wanted law has no record on the engine yet."""
    wanted = [name for name in WHOLE if not only or any(matches_pattern(name, pattern) for pattern in only)]
    requests = []
    for path in list_paths(models):
        found = {record.cell.law for record in earlier if (record.cell.engine, record.cell.model) == (engine, path)}
        if not found.issuperset(wanted) or not found:
            requests.append(ModelCheckRequest(path, engine=engine, stages=ENGINES[engine], only=only))
    return requests


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


def list_general_targets(mutant: Mutant) -> list[Target]:
    """Return the cells that have to kill the mutant and whose law and variant apply to models of users, in fp32."""
    return [
        target
        for target in mutant.targets
        if target.variant in LAWS[target.law].user_model_variants
        and not get_law(target.law).is_calibrated
        and target.variant not in SPECIAL_VARIANTS
        and (target.dtype, target.world_size, target.model) == ("fp32", 2, "mlp")
    ]


def draw_mutant(path: str) -> Mutant:
    """Return the mutant of a model: a draw from those of whose targets one applies to any model."""
    candidates = [mutant for _, mutant in sorted(MUTANTS.items()) if list_general_targets(mutant)]
    return random.Random(path).choice(candidates)  # noqa: S311 - no secret


def check_planted(path: str, jobs: int, open_sink: Callable[[], RecordFile | None], earlier: Sequence[Record]) -> None:
    """Run the laws of the mutant's targets on the model, and all other laws if these find nothing."""
    mutant = draw_mutant(path)
    targets = list_general_targets(mutant)
    stages = (mutant.stages[0] if targets[0].stage is None else targets[0].stage,)
    if any((record.cell.model, record.cell.engine) == (path, mutant.engine) for record in earlier):
        return
    options = RunOptions(timeout=120, jobs=jobs, isolation=Isolation.POOLED)
    for only in (tuple(dict.fromkeys(target.law for target in targets)), ()):
        request = ModelCheckRequest(path, engine=mutant.engine, stages=stages, only=only)
        try:
            runs = list(check_models([request], options, open_sink, prepare_rank_environment, lambda _line: None, []))
        except UsageError as error:
            print(f"{path} on {mutant.name}: REFUSED {error}", flush=True)
            continue
        reds = [record for _, records in runs for record in records if record.verdict.is_broken]
        print(f"{path} on {mutant.name}: {reds[0].cell.law if reds else 'not found'}", flush=True)
        if reds:
            return


def report_planted(records: Sequence[Record], is_written: bool) -> int:
    """Print the share of models that are red and the faults that were not found; return the exit code."""
    rows, survivors = [], []
    for path in list_paths(NAMES):
        mutant = draw_mutant(path)
        found = [record for record in records if (record.cell.model, record.cell.engine) == (path, mutant.engine)]
        reds = list(dict.fromkeys(record.cell.law for record in found if record.verdict.is_broken))
        if found:
            rows.append([path.split(":")[1], mutant.name, mutant.over, ", ".join(reds) or "not found"])
            survivors += [] if reds else [f"{path}: {mutant.name} is not found: {mutant.description}"]
    share = 1 - len(survivors) / len(rows) if rows else 0.0
    print(*survivors, f"{len(rows) - len(survivors)} of {len(rows)} planted faults are found ({share:.1%})", sep="\n")
    if is_written:
        write_table("planted", render_rows(rows, ["model", "planted fault", "in", "found by"]))
    return int(share < TO_REACH)


def write_table(mark: str, table: str) -> None:
    """Replace the table between the marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{table}\n{end}", page), encoding="utf-8")


def render_table(records: Sequence[Record]) -> str:
    """Return a row for each model and a column for each engine and stage; unsupported cells are left out."""
    columns = [(engine, stage) for engine, stages in ENGINES.items() for stage in stages]
    latest = {record.cell: record for record in records}.values()
    body = []
    for module, names in MODELS.items():
        for name in names:
            found = [record for record in latest if record.cell.model == f"{module}:{name}"]
            squares = [describe_square([r for r in found if (r.cell.engine, r.cell.stage) == key]) for key in columns]
            body.append([name, *squares])
    return render_rows(body, ["model", *(f"{engine} {stage}" for engine, stage in columns)])


def render_rows(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown, without the spaces that align its columns."""
    table = tabulate(rows, headers, tablefmt="github")
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
