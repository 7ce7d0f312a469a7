"""Check each model of the zoo on an engine with one fault, and print the share of faults that a law finds.

    python scripts/zoo_planted.py --jsonl planted.jsonl [--model NAME ...] [--write]

The fault of a model is the first of all mutants of zharness/mutants, in an order that the model's name determines, that
changes a number of training on this model: a loss, gradient or weight of a short run (``suites/model/short_run.py``)
differs from that of the correct engine. No law takes part in this choice. Then every law that applies to a user's model
runs on the broken engine. The fault is found if a law fails on the broken engine and holds on the correct engine at the
same stage; otherwise, and if the model is refused, the fault counts as not found. A model whose line is in the file is
not run again. ``--write`` puts the table into docs/your-model.md. The exit code is 1 if fewer than 95 % of the faults
are found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.zoo import NAMES, append_lines, check_each, list_paths, render_rows, write_table
from suites.model.short_run import find_difference, train_and_record
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.mutants import MUTANTS, Mutant
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import Record
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest
from zharness.world import Isolation, RankServer, RankTask

TO_REACH = 0.95  # the share of planted faults that have to be found
WORLD_SIZE, SECONDS = 2, 60.0


@dataclass(frozen=True)
class PlantedResult:
    """A model's fault, the first number that it changes, and the laws that found it.

    ``drawn`` is the number of mutants that were tried until one changed a number. ``also_right`` are laws that also
    fail on the correct engine, so they prove nothing. ``refusal`` is the reason why no law ran.
    """

    model: str
    mutant: str
    stage: int
    drawn: int
    changes: str
    found_by: tuple[str, ...]
    also_right: tuple[str, ...] = ()
    refusal: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="may be repeated (all models)")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="start no model after this time (no limit)")
    parser.add_argument("--jsonl", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    done = {result.model for result in load_results(arguments.jsonl)}
    wanted = [
        path for path in list_paths() if path.partition(":")[2] in (arguments.model or NAMES) and path not in done
    ]
    for path in wanted:
        if time.monotonic() > deadline:
            break
        result = plant_fault(path, RunOptions(timeout=120, jobs=arguments.jobs, isolation=Isolation.POOLED))
        append_lines(arguments.jsonl, [asdict(result)])
        print(describe_result(result), flush=True)
    return report(load_results(arguments.jsonl), arguments.write)


def load_results(path: Path) -> list[PlantedResult]:
    """Return the results of the file, which may be missing."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    plain = [json.loads(line) for line in lines]
    return [
        PlantedResult(**{**each, "found_by": tuple(each["found_by"]), "also_right": tuple(each["also_right"])})
        for each in plain
    ]


def plant_fault(path: str, options: RunOptions) -> PlantedResult:
    """Choose the model's fault, run every law on the broken engine, and those that fail on the correct engine."""
    mutant, stage, drawn, changes = draw_fault(path)
    try:
        reds = find_broken_laws(ModelCheckRequest(path, engine=mutant.engine, stages=(stage,)), options)
        right = ModelCheckRequest(path, engine=mutant.wraps, stages=(stage,), only=tuple(reds))
        also_right = find_broken_laws(right, options) if reds else []
    except UsageError as error:
        return PlantedResult(path, mutant.name, stage, drawn, changes, (), refusal=str(error))
    found = tuple(law for law in reds if law not in also_right)
    return PlantedResult(path, mutant.name, stage, drawn, changes, found, tuple(also_right))


def draw_fault(path: str) -> tuple[Mutant, int, int, str]:
    """Return the first mutant that changes a number on the model, its stage, its place in the draw, and the number."""
    draw = random.Random(path)  # noqa: S311 - no secret
    faults = [(mutant, draw.choice(mutant.stages)) for _, mutant in sorted(MUTANTS.items())]
    draw.shuffle(faults)
    with ExitStack() as stack:
        server = stack.enter_context(RankServer(prepare_rank_environment("fsdp2")))
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        @cache
        def record(engine: str, stage: int) -> Path | None:
            """Return the folder with the short run's evidence, or None if a rank of it did not end."""
            folder = root / f"{engine.rpartition(':')[2]}-{stage}"
            folder.mkdir()
            cell = Cell("training.grads", engine, stage, WORLD_SIZE, "fp32", path)
            return (
                None
                if server.submit(RankTask(train_and_record, (cell, str(folder)), WORLD_SIZE, SECONDS)).cause
                else folder
            )

        for drawn, (mutant, stage) in enumerate(faults, start=1):
            right = record(mutant.wraps, stage)
            wrong = right and record(mutant.engine, stage)
            changes = find_difference(wrong, right, WORLD_SIZE) if wrong and right else ""
            if changes:
                return mutant, stage, drawn, changes
    raise UsageError(f"no mutant changes a number of a short run of {path}")


def find_broken_laws(request: ModelCheckRequest, options: RunOptions) -> list[str]:
    """Return the names of the laws that fail. Raises UsageError if the model is refused."""
    refused: list[str] = []
    records: list[Record] = [record for _, found in check_each([request], options, refused) for record in found]
    if refused:
        raise UsageError(refused[0])
    return list(dict.fromkeys(record.cell.law for record in records if record.verdict.is_broken))


def describe_result(result: PlantedResult) -> str:
    """Return one line about a result."""
    found = ", ".join(result.found_by) or result.refusal or "NOT FOUND"
    return f"{result.model} on {result.mutant} at stage {result.stage} ({result.changes}): {found}"


def report(results: Sequence[PlantedResult], is_written: bool) -> int:
    """Print the share of faults that are found, and the faults that are not; return the exit code."""
    survivors = [result for result in results if not result.found_by]
    for result in survivors:
        print(f"{describe_result(result)}: {MUTANTS[result.mutant].description}")
    share = 1 - len(survivors) / len(results) if results else 0.0
    print(f"{len(results) - len(survivors)} of {len(results)} planted faults are found ({share:.1%})")
    if is_written:
        headers = ["model", "planted fault", "in", "first number that it changes", "found by"]
        write_table("planted", render_rows(list(list_rows(results)), headers))
    return int(share < TO_REACH)


def list_rows(results: Sequence[PlantedResult]) -> Iterator[list[str]]:
    """Yield the row of each result, in the order of the zoo."""
    by_model = {result.model: result for result in results}
    for path in list_paths():
        if path in by_model:
            result = by_model[path]
            first = result.found_by[0] if result.found_by else ("refused" if result.refusal else "not found")
            more = f" and {len(result.found_by) - 1} more" if len(result.found_by) > 1 else ""
            where = f"{MUTANTS[result.mutant].wraps} {result.stage}"
            yield [path.partition(":")[2], result.mutant, where, result.changes, first + more]


if __name__ == "__main__":
    sys.exit(main())
