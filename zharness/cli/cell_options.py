"""The options that choose the cells of releases and how they run, for releases, bisect and compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from zharness.cell import is_cell_id
from zharness.cli.options import (
    OUTPUT,
    SECONDS,
    IntegerRange,
    NameChoice,
    add_mesh_option,
    parse_integer_option,
    parse_name_option,
    refuse_axes_beside_cells,
)
from zharness.errors import UsageError
from zharness.mesh import Mesh

if TYPE_CHECKING:
    from zharness.releases.history import RunRequest
    from zharness.run import Record, Request
    from zharness.run.changed_cells import ChangeSelection
    from zharness.run.check_loop import RunResult
    from zharness.run.expected_failures import ExpectedFailure

    RunCells = Callable[[Request, ChangeSelection | None, float], RunResult]


def add_cell_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that choose the cells of every release and how they run."""
    options = (
        click.option(
            "--stage",
            "stages",
            callback=parse_integer_option,
            metavar="0,1,2,3",
            help="ZeRO stages to run; by default all stages of the engine.",
        ),
        click.option(
            "--world-size",
            "world_sizes",
            callback=parse_integer_option,
            default="2",
            show_default=True,
            metavar="1,2,4",
            help="World sizes: the numbers of ranks on which each law runs.",
        ),
        add_mesh_option(),
        click.option(
            "--dtype",
            "dtypes",
            callback=parse_name_option,
            default="fp32",
            show_default=True,
            metavar="fp32,bf16",
            help="Dtypes in which the models train.",
        ),
        click.option(
            "--model",
            "models",
            callback=parse_name_option,
            metavar="NAME,...",
            help="Models to train; by default all models.",
        ),
        click.option(
            "--timeout",
            type=SECONDS,
            default=60.0,
            show_default=True,
            help="Time limit for the ranks of one cell, in seconds.",
        ),
        click.option(
            "--isolation",
            type=NameChoice(["fresh", "pooled"]),
            default="pooled",
            show_default=True,
            help="fresh: fork new ranks for every cell. pooled: reuse ranks for the cells of one release and stage "
            "(fsdp2: of all stages).",
        ),
        click.option(
            "--jobs", type=IntegerRange(1), help="Number of cells to run at the same time; by default one per core."
        ),
        click.option("--jsonl", type=OUTPUT, help="Write the record of each cell to FILE, as one line of JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class CellOptions:
    """The values of the options that ``add_cell_options`` adds; the fields have the names of the parameters."""

    stages: tuple[int, ...]
    world_sizes: tuple[int, ...]
    mesh: Mesh
    dtypes: tuple[str, ...]
    models: tuple[str, ...]
    timeout: float
    isolation: str
    jobs: int | None
    jsonl: Path | None

    def build_request(self, patterns: tuple[str, ...]) -> Request:
        """Build a request without an engine; the caller adds the engine later.

        Raises UsageError before any release is fetched: for a law, stage, dtype or model that does not exist, for a
        mesh that does not fit, and for an option beside cell ids that the ids set themselves.
        """
        from zharness.cli.name_index import require_known_names

        if patterns and all(map(is_cell_id, patterns)) and click.get_current_context(silent=True):
            refuse_axes_beside_cells()
        require_known_names(laws=patterns, models=self.models, stages=self.stages, dtypes=self.dtypes)
        from zharness.run import Request
        from zharness.run.plan import validate_request

        request = Request(patterns, (), self.stages, self.world_sizes, self.dtypes, self.models, mesh=self.mesh)
        validate_request(request)
        return request

    def build_change_request(self, patterns: tuple[str, ...]) -> Request:
        """Build the request for the recorded cells that reach a change, including the cells of a covering array.

        A mesh has no covering array. The options --world-size and --dtype limit the cells if they are given; otherwise
        cells of every world size and dtype in the record run. Raises UsageError as ``build_request`` does.
        """
        from zharness.laws import DTYPES
        from zharness.run.plan import ARRAY_WORLD_SIZES

        return replace(
            self.build_request(patterns),
            depth=1 if self.mesh.sizes else 2,
            array_world_sizes=self.world_sizes if is_on_command_line("world_sizes") else ARRAY_WORLD_SIZES,
            array_dtypes=self.dtypes if is_on_command_line("dtypes") else tuple(DTYPES),
        )

    def build_run(self, stack: ExitStack, user_failures: tuple[ExpectedFailure, ...] = ()) -> RunCells:
        """Return a function that runs the cells of a request, or only the cells of it that a change selects.

        The function writes the records of all its runs to one file, which ``stack`` closes.
        """
        from zharness.releases.rank_environment import prepare_rank_environment
        from zharness.run.check_loop import RunOptions, Stop, open_optional_record_file, run_request
        from zharness.world import Isolation

        open_sink = cache(partial(open_optional_record_file, stack, self.jsonl))
        options = RunOptions(
            self.timeout, jobs=self.jobs or 0, isolation=Isolation(self.isolation), user_expected_failures=user_failures
        )

        def run(request: Request, changes: ChangeSelection | None, max_seconds: float) -> RunResult:
            """Run the cells of ``request``; if ``max_seconds`` is not 0, start no further cell after that time."""
            limited = replace(options, changes=changes, stop=Stop(seconds=max_seconds))
            return run_request(request, limited, open_sink, prepare_rank_environment)

        return run

    def build_measure(self, stack: ExitStack, user_failures: tuple[ExpectedFailure, ...] = ()) -> RunRequest:
        """Return a function that runs the cells of a request.

        The function writes all records to one file, which ``stack`` closes.
        """
        return make_measure(self.build_run(stack, user_failures))


def make_measure(run: RunCells) -> RunRequest:
    """Return a function that calls ``run`` for all cells of a request and returns their records.

    The function prints each expected failure that matches no cell once on standard error.
    """
    print_once = cache(partial(click.echo, err=True))

    def measure(request: Request) -> list[Record]:
        """Run the cells of ``request`` and return their records."""
        result = run(request, None, 0.0)
        for description in result.unmatched_failures:
            print_once(f"UNMATCHED {description}")
        return result.records

    return measure


def is_on_command_line(name: str) -> bool:
    """Return whether the current command's command line sets the parameter ``name``; False without a command."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def reject_cell_options(identifier: str) -> None:
    """Raise UsageError if the command line of the current command has options that choose cells or how they run."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in {field.name for field in fields(CellOptions)} and is_on_command_line(parameter.name)
    ]
    if given:
        raise UsageError(
            f"got {', '.join(given)} with reproduction {identifier}, but these options apply only to laws; leave them "
            "out, or name a law"
        )
