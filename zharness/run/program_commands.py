"""The command ``zharness program``: run given programs, or search for the smallest one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import click

from zharness.engines.warm_up import GetEnvironment
from zharness.run.program_runner import ProgramOutcome, ProgramRunner
from zharness.run.program_search import SearchOptions, search_programs
from zharness.run.record import Verdict
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program


def run_given_programs(
    texts: Sequence[str],
    engine: str,
    stages: Sequence[int],
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    settings: Program,
    timeout: float,
    get_environment: GetEnvironment,
) -> int:
    """Parse ``texts`` as programs with ``settings``, run them at each stage, world size and dtype, and print outcomes.

    Returns the exit code. Raises UsageError for a text that is not a program or that the engine cannot run.
    """
    parsed = [parse_program(text, settings) for text in texts]
    groups = [
        [replace(program, stage=stage, world_size=size, dtype=dtype) for program in parsed]
        for stage, size, dtype in product(stages, world_sizes, dtypes)
    ]
    with ProgramRunner(get_environment(engine), timeout) as runner:
        outcomes = [runner.run(engine, programs) for programs in groups]
    for programs, outcome in zip(groups, outcomes, strict=True):
        click.echo(outcome.describe(engine, programs))
    return programs_exit_code(outcomes)


def programs_exit_code(outcomes: Sequence[ProgramOutcome]) -> int:
    """Return 0 if all programs pass, 3 if the harness itself failed, else 1."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return 3 if Verdict.ERROR in verdicts else int(verdicts != {Verdict.PASS})


def run_program_search(engine: str, options: SearchOptions, timeout: float, get_environment: GetEnvironment) -> int:
    """Draw programs, print the smallest that fails, and return the exit code.

    Raises UsageError if Hypothesis is not installed or an option has an unknown name.
    """
    with ProgramRunner(get_environment(engine), timeout) as runner:
        result = search_programs(runner, engine, options)
    click.echo(result.describe(engine))
    return int(bool(result.smallest))
