"""Programs on the command line: what became of some, or the smallest of many that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import click

from zharness.run.program_runner import ProgramOutcome, ProgramRunner
from zharness.run.program_search import SearchOptions, search_programs
from zharness.run.record import Verdict
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program
from zharness.world.server import RankEnvironment


def run_given_programs(
    texts: Sequence[str],
    engine: str,
    stages: Sequence[int],
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    settings: Program,
    timeout: float,
    get_environment: Callable[[str], RankEnvironment],
) -> int:
    """Run the programs that ``texts`` write, with ``settings``, wherever it is asked for; the exit code.

    Raises UsageError.
    """
    written = [parse_program(text, settings) for text in texts]
    wanted = [
        [replace(one, stage=stage, world_size=size, dtype=dtype) for one in written]
        for stage, size, dtype in product(stages, world_sizes, dtypes)
    ]
    with ProgramRunner(get_environment(engine), timeout) as runner:
        found = [runner.run(engine, programs) for programs in wanted]
    for programs, outcome in zip(wanted, found, strict=True):
        click.echo(outcome.describe(engine, programs))
    return programs_exit_code(found)


def programs_exit_code(outcomes: Sequence[ProgramOutcome]) -> int:
    """0 where all pass, 3 where the harness itself failed, else 1, as of cells."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return 3 if Verdict.ERROR in verdicts else int(verdicts != {Verdict.PASS})


def run_program_search(
    engine: str, options: SearchOptions, timeout: float, get_environment: Callable[[str], RankEnvironment]
) -> int:
    """Draw programs and tell the smallest that fails; the exit code. Raises UsageError."""
    with ProgramRunner(get_environment(engine), timeout) as runner:
        found = search_programs(runner, engine, options)
    click.echo(found.describe(engine))
    return int(bool(found.smallest))
