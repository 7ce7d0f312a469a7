"""Check the models of the zoo on every engine, and write the table of docs/your-model.md.

    python scripts/zoo.py --jsonl zoo.jsonl [--engine NAME ...] [--model NAME ...] [--only LAW ...] [--write]

Every law that applies to a user's model runs, in fp32 on 2 ranks, unless --only names laws. ``zoo.requests.jsonl``
beside the file lists the models that were checked completely, with engine, stages and laws; only the other models run.
``--write`` puts the results into the table between the marks in docs/your-model.md; squares without a record in the
file do not change. The exit code is 1 if a verdict is neither a pass nor explained, or if no gradient of a model was
compared. Nothing is downloaded. ``scripts/zoo_planted.py`` checks the models on broken engines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tabulate import tabulate

from zharness.errors import UsageError
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.report.failures import render_failures
from zharness.run import Record
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest
from zharness.run.model_matrix import check_models
from zharness.run.outcomes import count_outcomes
from zharness.run.record_reader import load_records
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.world import Isolation

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"
ENGINES = {"reference": (3,), "ddp": (0,), "zero1": (1,), "fsdp2": (3,), "deepspeed": (1, 2, 3)}
MODELS = {
    "suites.model.tiny": ("perceptron",),
    "suites.model.zoo": ("batch_norm", "conv_net", "dropping", "lstm", "recurrent", "sync_norm", "unused"),
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
COLUMNS = [(engine, stage) for engine, stages in ENGINES.items() for stage in stages]


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
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    results, only, broken = ResultFile(arguments.jsonl), tuple(arguments.only), 0
    for engine in arguments.engine or ENGINES:
        requests = [ModelCheckRequest(path, engine=engine, stages=ENGINES[engine], only=only) for path in list_paths()]
        wanted = [request for request in requests if request.model.partition(":")[2] in (arguments.model or NAMES)]
        broken += check_on_engine([each for each in wanted if not results.has(each)], arguments.jobs, results, deadline)
    if arguments.write:
        write_table("zoo", render_table(results.load(), results.list_requests(), read_table("zoo")))
    return int(bool(broken))


@dataclass(frozen=True)
class FinishedRequest:
    """A model that was checked completely on one engine, with the stages and laws, and the reason if it was refused."""

    model: str
    engine: str
    stages: tuple[int, ...]
    only: tuple[str, ...]
    refusal: str = ""

    def covers(self, request: ModelCheckRequest, stage: int) -> bool:
        """Return whether every cell of ``request`` at ``stage`` is one of this request's cells."""
        same = (self.model, self.engine) == (request.model, request.engine) and stage in self.stages
        return same and (not self.only or (bool(request.only) and set(self.only) >= set(request.only)))


class ResultFile:
    """The file of records and the file beside it that lists the finished requests.

    Both are written when a model is finished, so an interruption loses the records of one model, which runs again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.requests_path = path, path.with_suffix(".requests.jsonl")

    def load(self) -> tuple[Record, ...]:
        """Return the records of the file, which may be missing."""
        return load_records([self.path]).records if self.path.exists() and self.path.stat().st_size else ()

    def list_requests(self) -> list[FinishedRequest]:
        """Return the finished requests in the order in which they ended."""
        if not self.requests_path.exists():
            return []
        plain = map(json.loads, self.requests_path.read_text(encoding="utf-8").splitlines())
        return [
            FinishedRequest(**{**each, "stages": tuple(each["stages"]), "only": tuple(each["only"])}) for each in plain
        ]

    def has(self, request: ModelCheckRequest) -> bool:
        """Return whether all cells of ``request`` have been run."""
        finished = self.list_requests()
        return all(any(each.covers(request, stage) for each in finished) for stage in request.stages)

    def add(self, request: ModelCheckRequest, records: Iterable[Record], refusal: str = "") -> None:
        """Append the records of a finished request, and the request."""
        append_lines(self.path, (record.as_json() for record in records))
        done = FinishedRequest(request.model, request.engine, request.stages, request.only, refusal)
        append_lines(self.requests_path, [asdict(done)])


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each of ``lines`` in one write."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def list_paths() -> list[str]:
    """Return the paths of all factories of the zoo."""
    return [f"{module}:{name}" for module, names in MODELS.items() for name in names]


def check_on_engine(requests: Sequence[ModelCheckRequest], jobs: int, results: ResultFile, deadline: float) -> int:
    """Check models on one engine; return the number of unexplained verdicts and of models without a gradient."""
    options, refused, broken = RunOptions(timeout=120, jobs=jobs, isolation=Isolation.POOLED), list[str](), 0
    for request, records in check_each(requests, options, refused):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(records).items())
        print(f"{request.model} on {request.engine}: {counts}", flush=True)
        if not records and len(request.stages) > 1:  # one stage may have refused the model for all of them
            parts = [replace(request, stages=(stage,)) for stage in request.stages]
            broken += check_on_engine(parts, jobs, results, deadline)
            continue
        wrong = [record for record in records if not record.is_expected or record.verdict.value == "error"]
        reason = explain_uncompared_gradients(records) if records else refused[-1]
        for text in filter(None, (render_failures(wrong), reason)):
            print(text, flush=True)
        results.add(request, records, "" if records else reason)
        broken += len(wrong) + bool(reason)
        if time.monotonic() > deadline:
            break
    return broken


def check_each(
    requests: Sequence[ModelCheckRequest], options: RunOptions, refused: list[str]
) -> Iterable[tuple[ModelCheckRequest, list[Record]]]:
    """Yield each request with its records. A refused request has no records; its reason is added to ``refused``."""
    try:
        yield from check_models(requests, options, lambda: None, prepare_rank_environment, lambda _line: None, refused)
    except UsageError as error:
        if len(requests) != 1:
            raise
        refused.append(f"REFUSED {error}")
        yield requests[0], []


def write_table(mark: str, table: str) -> None:
    """Replace the table between the marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    pattern = find_marks(mark)
    PAGE.write_text(pattern.sub(lambda found: f"{found[1]}\n{table}\n{found[3]}", page), encoding="utf-8")


def find_marks(mark: str) -> re.Pattern[str]:
    """Return the pattern of a begin mark, the table, and an end mark."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    return re.compile(f"({re.escape(begin)})(.*?)({re.escape(end)})", re.DOTALL)


def read_table(mark: str) -> dict[tuple[str, str], str]:
    """Return the table that the page has now, as squares by row and column."""
    found = find_marks(mark).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has marks of {mark}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2].strip().splitlines()]
    header, body = lines[0], lines[2:]
    return {(row[0], column): text for row in body for column, text in zip(header[1:], row[1:], strict=True)}


def render_table(
    records: Sequence[Record], finished: Sequence[FinishedRequest], earlier: Mapping[tuple[str, str], str]
) -> str:
    """Return a row for each model and a column for each engine and stage; squares without a record keep their text."""
    latest = {record.cell: record for record in records}.values()
    refused = {(each.model, each.engine, stage) for each in finished if each.refusal for stage in each.stages}
    body = []
    for path in list_paths():
        name, squares = path.partition(":")[2], []
        for engine, stage in COLUMNS:
            found = [r for r in latest if (r.cell.model, r.cell.engine, r.cell.stage) == (path, engine, stage)]
            text = describe_square(found) or ("refused" if (path, engine, stage) in refused else "")
            squares.append(text or earlier.get((name, f"{engine} {stage}"), "not run"))
        body.append([name, *squares])
    return render_rows(body, ["model", *(f"{engine} {stage}" for engine, stage in COLUMNS)])


def render_rows(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown, without the spaces that align its columns."""
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return "\n".join(re.sub(r" +", " ", re.sub(r"-{3,}", "---", line)) for line in table.splitlines())


def describe_square(records: Sequence[Record]) -> str:
    """Return the number of passes and of each other outcome, except unsupported; empty without a record."""
    counts = count_outcomes(records)
    counts.pop("unsupported", None)
    passes = counts.pop("pass", 0)
    return f"{passes}{''.join(f', {count} {outcome}' for outcome, count in counts.items())}" if records else ""


if __name__ == "__main__":
    sys.exit(main())
