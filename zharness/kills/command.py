"""``zharness mutants``: from patterns to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import click
from tqdm import tqdm

from zharness.checks import find_checks
from zharness.kills.cells import Attempts, attempts
from zharness.kills.ledger import resumed
from zharness.kills.matrix import Matrix, by_case, words
from zharness.kills.runner import MutantRunner
from zharness.mutants import find_mutants
from zharness.run import Planned, Record, Runner
from zharness.run.record import record_file
from zharness.run.runner import keep_apart
from zharness.workload import model_spec
from zharness.world.limits import check_world_size

RunAll = Callable[[Sequence[Planned], Sequence[Runner]], Iterator[Record]]


class Scope(Enum):
    """Which checks are tried on a mutant."""

    EVERY_CHECK = "every"
    ITS_TARGETS = "targets"


@dataclass(frozen=True)
class Options:
    """What is tried on the mutants, and how: checks and models by name, seconds for a cell, cells at a time.

    ``scope`` says whether a mutant is tried on every one of the checks, or on those among them that it names itself.
    """

    checks: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    models: tuple[str, ...] = ()
    timeout: float = 60.0
    lanes: int = 1
    scope: Scope = Scope.EVERY_CHECK


def mutants(patterns: tuple[str, ...], options: Options, jsonl: Path | None, run_all: RunAll) -> int:
    """Try the checks on the mutants that match, print who kills whom; the exit code. Raises UsageError.

    ``jsonl`` is read before it is written: cells that it holds are not run again. ``run_all`` runs cells on runners.
    """
    # Those of a model of one's own alone have none here to try a mutant on.
    chosen, checks = find_mutants(patterns), [check for check in find_checks(options.checks) if check.models]
    for model in options.models:
        model_spec(model)
    for world_size in options.world_sizes:
        check_world_size(world_size)
    own = [(mutant, check) for mutant in chosen for check in checks if check.name in mutant.named_checks]
    every = own if options.scope is Scope.ITS_TARGETS else [(mutant, check) for mutant in chosen for check in checks]
    # Those that a mutant names come first: a run that is stopped has the most to say then.
    tries = [attempts(*pair, options.world_sizes, options.models) for pair in dict.fromkeys([*own, *every])]
    known = by_case(resumed(jsonl)) if jsonl is not None else {}
    with ExitStack() as stack:
        file = stack.enter_context(record_file(jsonl)) if jsonl is not None else None
        if file is not None:
            for record in known.values():
                file.add(record)
        bar = stack.enter_context(tqdm(total=len(tries), unit="pair", leave=False, disable=not sys.stderr.isatty()))
        if any(open_cells(tried, known) for tried in tries):
            runners = [stack.enter_context(MutantRunner(options.timeout)) for _ in range(options.lanes)]
            keep_apart(runners, [cell for tried in tries for cell in open_cells(tried, known)[:1]])
        while cells := [cell for tried in tries for cell in open_cells(tried, known)[:1]]:
            bar.update(len(tries) - len(cells) - bar.n)
            for record in run_all(cells, runners):
                known[record.case.id] = record
                if file is not None:
                    file.add(record)
                bar.set_postfix_str(record.case.engine.partition(":")[2], refresh=False)
                bar.update(record.verdict.broken)
    names = {mutant.engine for mutant in chosen}
    records = tuple(record for record in known.values() if record.case.engine in names)
    matrix = Matrix(tuple(chosen), tuple(check.name for check in checks), records)
    click.echo(words(matrix))
    return matrix.exit_code()


def open_cells(tried: Attempts, known: dict[str, Record]) -> list[Planned]:
    """What is left to try of one check on one mutant: nothing once a cell killed it."""
    records = [known[cell.case.id] for cell in tried.cells if cell.case.id in known]
    if any(record.verdict.broken for record in records):
        return []
    return [cell for cell in tried.cells if cell.case.id not in known]
