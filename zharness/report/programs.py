"""Programs on the command line: what became of some, or the smallest of many that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import click

from zharness.run.programs import Outcome, ProgramRunner
from zharness.run.record import Verdict
from zharness.run.search import Search, search
from zharness.workload.program_text import parse
from zharness.workload.programs import Program
from zharness.world.server import Surroundings


def run_given(
    texts: Sequence[str],
    engine: str,
    stages: Sequence[int],
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    settings: Program,
    timeout: float,
    place: Callable[[str], Surroundings],
) -> int:
    """Run the programs that ``texts`` write, with ``settings``, wherever it is asked for; the exit code.

    Raises UsageError.
    """
    written = [parse(text, settings) for text in texts]
    wanted = [
        [replace(one, stage=stage, world_size=size, dtype=dtype) for one in written]
        for stage, size, dtype in product(stages, world_sizes, dtypes)
    ]
    with ProgramRunner(place(engine), timeout) as runner:
        found = [runner.run(engine, programs) for programs in wanted]
    for programs, outcome in zip(wanted, found, strict=True):
        click.echo(outcome.words(engine, programs))
    return exit_code(found)


def exit_code(found: Sequence[Outcome]) -> int:
    """0 where all pass, 3 where the harness itself failed, else 1, as of cells."""
    verdicts = {outcome.verdict for outcome in found}
    return 3 if Verdict.ERROR in verdicts else int(verdicts != {Verdict.PASS})


def run_search(engine: str, wanted: Search, timeout: float, place: Callable[[str], Surroundings]) -> int:
    """Draw programs and tell the smallest that fails; the exit code. Raises UsageError."""
    with ProgramRunner(place(engine), timeout) as runner:
        found = search(runner, engine, wanted)
    click.echo(found.words(engine))
    return int(bool(found.smallest))
