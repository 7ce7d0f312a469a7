"""Run the command ``zharness mutants``: select mutants, run their cells, and print the kill matrix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import click
from tqdm import tqdm

from zharness.device import compute_device_type, require_usable_gpus
from zharness.errors import UsageError
from zharness.kill_matrix.cells import KillAttempts, plan_kill_attempts, plan_targets
from zharness.kill_matrix.matrix import KillMatrix, index_mutant_records, render_matrix
from zharness.kill_matrix.mutant_runner import MutantRunner
from zharness.kill_matrix.resume import load_finished_records
from zharness.laws import Law, find_laws
from zharness.mutants import Mutant, find_mutants
from zharness.run import PlannedCell, Record, Runner
from zharness.run.record import open_record_file
from zharness.run.runner import pin_runners_to_cores
from zharness.workload import model_spec
from zharness.world.limits import check_world_size

RunCells = Callable[[Sequence[PlannedCell], Sequence[Runner]], Iterator[Record]]


class Scope(Enum):
    """The cells that run on each mutant: each selected law until it kills the mutant, or all targets of the mutant."""

    EVERY_LAW = "every"
    TARGETS = "targets"


@dataclass(frozen=True)
class KillOptions:
    """The options of ``zharness mutants``.

    ``laws``, ``world_sizes`` and ``models`` select the cells that are run on each mutant. ``timeout`` is the time limit
    of one cell in seconds, and ``parallel_cells`` is the number of cells that run at the same time. With
    ``Scope.TARGETS``, the targets of the selected laws run, with the world sizes and models of the targets.
    """

    laws: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    models: tuple[str, ...] = ()
    timeout: float = 60.0
    parallel_cells: int = 1
    scope: Scope = Scope.EVERY_LAW


def select_mutants_of_device(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants that are broken on this run's device, and print how many mutants are left out.

    Raises UsageError if none is left.
    """
    device = compute_device_type()
    chosen = [mutant for mutant in mutants if mutant.is_broken_on(device)]
    left_out = sorted({mutant.device for mutant in mutants if mutant not in chosen})
    sentence = f"{len(mutants) - len(chosen)} mutants are broken on {', '.join(left_out)} only, and ranks use {device}"
    if not chosen:
        raise UsageError(f"{sentence}; set ZHARNESS_DEVICE={left_out[0]}")
    if left_out:
        click.echo(f"{sentence}; they are left out", err=True)
    return chosen


def run_mutants(patterns: tuple[str, ...], options: KillOptions, jsonl: Path | None, run_cells: RunCells) -> int:
    """Run the laws on the mutants that match ``patterns``, print the kill matrix, and return the exit code.

    Cells whose records are already in the file ``jsonl`` are not run again. ``run_cells`` is the function that runs
    cells on runners and yields their records. Raises UsageError if a pattern, model or world size does not exist.
    """
    # A law without models applies only to users' models, on which mutants are not run.
    chosen = select_mutants_of_device(find_mutants(patterns))
    laws = [law for law in find_laws(options.laws) if law.models]
    for model in options.models:
        model_spec(model)
    for world_size in options.world_sizes:
        check_world_size(world_size)
    require_usable_gpus((max(options.world_sizes) + 1) * options.parallel_cells)
    attempts = list(plan_attempts(chosen, laws, options))
    known = index_mutant_records(load_finished_records(jsonl)) if jsonl is not None else {}
    with ExitStack() as stack:
        file = stack.enter_context(open_record_file(jsonl)) if jsonl is not None else None
        if file is not None:
            for record in known.values():
                file.add(record)
        bar = stack.enter_context(tqdm(total=len(attempts), unit="pair", leave=False, disable=not sys.stderr.isatty()))
        if any(select_remaining_cells(attempt, known) for attempt in attempts):
            runners = [stack.enter_context(MutantRunner(options.timeout)) for _ in range(options.parallel_cells)]
            pin_runners_to_cores(
                runners, [cell for attempt in attempts for cell in select_remaining_cells(attempt, known)[:1]]
            )
        while cells := [cell for attempt in attempts for cell in select_remaining_cells(attempt, known)[:1]]:
            bar.update(len(attempts) - len(cells) - bar.n)
            for record in run_cells(cells, runners):
                known[record.cell.id] = record
                if file is not None:
                    file.add(record)
                bar.set_postfix_str(record.cell.engine.partition(":")[2], refresh=False)
                bar.update(record.verdict.is_broken)
    names = {mutant.engine for mutant in chosen}
    records = tuple(record for record in known.values() if record.cell.engine in names)
    matrix = KillMatrix(tuple(chosen), tuple(law.name for law in laws), records)
    click.echo(render_matrix(matrix))
    return matrix.exit_code()


def plan_attempts(mutants: Sequence[Mutant], laws: Sequence[Law], options: KillOptions) -> Iterator[KillAttempts]:
    """Yield the attempts of each pair of a mutant and a law; with ``Scope.TARGETS``, yield one attempt for each target.

    Pairs with a target come first, so that even an interrupted run has run the laws that most likely kill the mutants.
    """
    pairs = [(mutant, law) for mutant in mutants for law in laws]
    for mutant, law in sorted(pairs, key=lambda pair: pair[1].name not in pair[0].named_laws):
        if options.scope is Scope.EVERY_LAW:
            yield plan_kill_attempts(mutant, law, options.world_sizes, options.models)
        else:
            yield from (KillAttempts(mutant, law.name, (cell,)) for cell in plan_targets(mutant, law))


def select_remaining_cells(attempts: KillAttempts, records_by_id: dict[str, Record]) -> list[PlannedCell]:
    """Return the cells of ``attempts`` that have no record yet, or an empty list if one has killed the mutant."""
    records = [records_by_id[cell.cell.id] for cell in attempts.cells if cell.cell.id in records_by_id]
    if any(record.verdict.is_broken for record in records):
        return []
    return [cell for cell in attempts.cells if cell.cell.id not in records_by_id]
