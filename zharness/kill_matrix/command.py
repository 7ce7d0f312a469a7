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

from zharness.kill_matrix.cells import KillAttempts, plan_kill_attempts
from zharness.kill_matrix.matrix import KillMatrix, index_mutant_records, render_matrix
from zharness.kill_matrix.mutant_runner import MutantRunner
from zharness.kill_matrix.resume import load_finished_records
from zharness.laws import find_laws
from zharness.mutants import find_mutants
from zharness.run import PlannedCell, Record, Runner
from zharness.run.record import open_record_file
from zharness.run.runner import pin_runners_to_cores
from zharness.workload import model_spec
from zharness.world.limits import check_world_size

RunCells = Callable[[Sequence[PlannedCell], Sequence[Runner]], Iterator[Record]]


class LawScope(Enum):
    """Which checks are tried on a mutant."""

    EVERY_LAW = "every"
    TARGET_LAWS = "targets"


@dataclass(frozen=True)
class KillOptions:
    """What is tried on the mutants, and how: checks and models by name, seconds for a cell, cells at a time.

    ``scope`` says whether a mutant is tried on every one of the checks, or on those among them that it names itself.
    """

    laws: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    models: tuple[str, ...] = ()
    timeout: float = 60.0
    parallel_cells: int = 1
    scope: LawScope = LawScope.EVERY_LAW


def run_mutants(patterns: tuple[str, ...], options: KillOptions, jsonl: Path | None, run_cells: RunCells) -> int:
    """Try the checks on the mutants that match, print who kills whom; the exit code. Raises UsageError.

    ``jsonl`` is read before it is written: cells that it holds are not run again. ``run_all`` runs cells on runners.
    """
    # Those of a model of one's own alone have none here to try a mutant on.
    chosen, checks = find_mutants(patterns), [check for check in find_laws(options.laws) if check.models]
    for model in options.models:
        model_spec(model)
    for world_size in options.world_sizes:
        check_world_size(world_size)
    own = [(mutant, check) for mutant in chosen for check in checks if check.name in mutant.named_laws]
    every = own if options.scope is LawScope.TARGET_LAWS else [(mutant, check) for mutant in chosen for check in checks]
    # Those that a mutant names come first: a run that is stopped has the most to say then.
    tries = [plan_kill_attempts(*pair, options.world_sizes, options.models) for pair in dict.fromkeys([*own, *every])]
    known = index_mutant_records(load_finished_records(jsonl)) if jsonl is not None else {}
    with ExitStack() as stack:
        file = stack.enter_context(open_record_file(jsonl)) if jsonl is not None else None
        if file is not None:
            for record in known.values():
                file.add(record)
        bar = stack.enter_context(tqdm(total=len(tries), unit="pair", leave=False, disable=not sys.stderr.isatty()))
        if any(select_remaining_cells(tried, known) for tried in tries):
            runners = [stack.enter_context(MutantRunner(options.timeout)) for _ in range(options.parallel_cells)]
            pin_runners_to_cores(
                runners, [cell for tried in tries for cell in select_remaining_cells(tried, known)[:1]]
            )
        while cells := [cell for tried in tries for cell in select_remaining_cells(tried, known)[:1]]:
            bar.update(len(tries) - len(cells) - bar.n)
            for record in run_cells(cells, runners):
                known[record.cell.id] = record
                if file is not None:
                    file.add(record)
                bar.set_postfix_str(record.cell.engine.partition(":")[2], refresh=False)
                bar.update(record.verdict.is_broken)
    names = {mutant.engine for mutant in chosen}
    records = tuple(record for record in known.values() if record.cell.engine in names)
    matrix = KillMatrix(tuple(chosen), tuple(check.name for check in checks), records)
    click.echo(render_matrix(matrix))
    return matrix.exit_code()


def select_remaining_cells(attempts: KillAttempts, records_by_id: dict[str, Record]) -> list[PlannedCell]:
    """What is left to try of one check on one mutant: nothing once a cell killed it."""
    records = [records_by_id[cell.cell.id] for cell in attempts.cells if cell.cell.id in records_by_id]
    if any(record.verdict.is_broken for record in records):
        return []
    return [cell for cell in attempts.cells if cell.cell.id not in records_by_id]
