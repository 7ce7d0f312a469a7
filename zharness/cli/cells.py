"""Commands on one cell: export it as a script, and shrink it to the smallest failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zharness.cli.options import OUTPUT, SECONDS, NameChoice, OnceCommand
from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.export.command import ExportOptions
    from zharness.export.header import ScriptForm
    from zharness.export.verify import ScriptResult
    from zharness.releases.prepared_release import PreparedRelease

STANDALONE = click.option(
    "--standalone",
    is_flag=True,
    help="Copy all code that the script needs, except torch and the engine, into the script, which is then often 500 "
    "lines or longer; by default, the script imports zharness.",
)


def choose_form(standalone: bool) -> ScriptForm:
    """Return the form of a script that the option --standalone asks for."""
    from zharness.export.header import ScriptForm

    return ScriptForm.STANDALONE if standalone else ScriptForm.IMPORTED


@click.command(cls=OnceCommand)
@click.argument("cell_id", required=False, metavar="CELL_ID")
@click.option("--seed", default=0, show_default=True, help="The value of --seed with which `zharness check` was run.")
@click.option("-o", "--output", type=OUTPUT, help="Write the script to FILE; by default, print it to standard output.")
@click.option("--no-verify", is_flag=True, help="Do not run the script to verify that it shows the same verdict.")
@click.option(
    "--timeout", type=SECONDS, default=60.0, show_default=True, help="Time limit for the ranks of the cell, in seconds."
)
@click.option(
    "--list",
    "listing",
    is_flag=True,
    help="Print a table that says for each law whether its script is short or long, and why a script is long.",
)
@click.option(
    "--form",
    type=NameChoice(["script", "issue", "pytest"]),
    default="script",
    show_default=True,
    help="script: a script for torchrun. issue: a text for an upstream issue, with a script that needs torch and the "
    "engine alone, the expected and the actual output, and versions. pytest: a test in the style of the engine's suite "
    "(DeepSpeed's DistributedTest, PyTorch's MultiProcessTestCase), which fails until the bug is fixed.",
)
@STANDALONE
def export(
    cell_id: str | None,
    seed: int,
    output: Path | None,
    no_verify: bool,
    timeout: float,
    listing: bool,
    form: str,
    standalone: bool,
) -> int:
    """Write a cell as a script of at most 80 lines, and run the script to verify it.

    The script imports the harness's judge; with --standalone it needs torch and the engine alone. CELL_ID is the id
    that the report of a failure prints. The exit code is 1 if the script does not show the cell's verdict.
    """
    from zharness.cell import Cell

    if cell_id is not None:
        require_known_cell(cell_id)
    from zharness.export import command
    from zharness.releases.rank_environment import prepare_rank_environment

    if listing:
        click.echo(command.render_law_table())
        return 0
    if cell_id is None:
        raise UsageError(
            "no cell id was given; give the id that a report prints, such as training.grads[ddp-zero0-w2-fp32-mlp]"
        )
    options = command.ExportOptions(seed, timeout, output, choose_form(standalone))
    if form != "script":
        if standalone or no_verify:
            raise UsageError(
                f"--form {form} is standalone and verified already: leave out --standalone and --no-verify"
            )
        return export_published(cell_id, options, form)
    return command.export(
        cell_id,
        options,
        prepare_rank_environment,
        None if no_verify else make_script_runner(Cell.parse(cell_id).engine),
    )


@click.command(cls=OnceCommand)
@click.argument("cell_id", metavar="CELL_ID")
@click.option("--seed", default=0, show_default=True, help="The value of --seed with which `zharness check` was run.")
@click.option(
    "--seconds",
    type=SECONDS,
    default=45.0,
    show_default=True,
    help="Time limit for the search, in seconds; the result is the smallest failure found by then.",
)
@click.option("-o", "--output", type=OUTPUT, help="Write the script to FILE; by default, print it to standard output.")
@click.option("--no-verify", is_flag=True, help="Do not run the script to verify that it shows the same verdict.")
@click.option(
    "--timeout",
    type=SECONDS,
    default=30.0,
    show_default=True,
    help="Time limit for the ranks of one cell or program, in seconds.",
)
@STANDALONE
def shrink(
    cell_id: str, seed: int, seconds: float, output: Path | None, no_verify: bool, timeout: float, standalone: bool
) -> int:
    """Find the smallest failure like that of a cell, print the command that reproduces it, and export it as a script.

    The command tries fewer ranks, a lower stage, fp32 and smaller models, and then programs (see `zharness program`)
    that Hypothesis draws and shrinks. A failure is like that of the cell if it has the same verdict, and the same wrong
    part of the training step or the same exception.
    """
    require_known_cell(cell_id)
    from zharness.export import command
    from zharness.releases.rank_environment import prepare_rank_environment

    options = command.ExportOptions(seed, timeout, output, choose_form(standalone))
    return command.shrink(
        cell_id, options, seconds, prepare_rank_environment, None if no_verify else make_script_runner
    )


def export_published(cell_id: str, options: ExportOptions, form: str) -> int:
    """Write the cell as an issue or as a test of the engine's suite, and return the exit code."""
    from zharness.cell import Cell
    from zharness.export import command
    from zharness.export.published import PublishedForm
    from zharness.releases import repros
    from zharness.releases.launch import CommandGroup, run_command
    from zharness.releases.rank_environment import prepare_rank_environment

    cell, commands = Cell.parse(cell_id), CommandGroup()
    environment = prepare_engine(cell.engine)

    def run(path: Path) -> tuple[int | None, str]:
        """Run the script under torchrun, or the test under pytest, on the release of the engine."""
        try:
            if form == "issue":
                return repros.run_script(path, cell.world_size, environment, repros.TIMEOUT_SECONDS, commands)
            tests = path.parent / "unit"  # stands in for the folder of DeepSpeed's tests
            tests.mkdir()
            (tests / "common.py").write_text("from zharness.compat.deepspeed import DistributedTest\n")
            line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path.name]
            return run_command(
                line, environment.environment or os.environ, repros.TIMEOUT_SECONDS, commands, path.parent
            )
        finally:
            commands.terminate()

    return command.export_published(
        cell_id, options, PublishedForm(form), prepare_rank_environment, run, repros.describe_machine()
    )


def require_known_cell(cell_id: str) -> None:
    """Raise UsageError if ``cell_id`` is no cell id, or its law, engine or stage does not exist."""
    from zharness.cell import Cell
    from zharness.cli.name_index import require_known_names

    Cell.parse(cell_id)
    require_known_names(laws=[cell_id])


def prepare_engine(engine: str) -> PreparedRelease:
    """Return the release of ``engine``, ready to run; for a factory, which has no release, return an empty one."""
    from zharness import engines
    from zharness.engines import registry
    from zharness.releases.prepared_release import PreparedRelease, prepare_release

    if registry.is_factory_path(engine):
        return PreparedRelease("")
    return prepare_release(engine, engines.info(engine).distribution)


def make_script_runner(engine: str) -> Callable[[Path], ScriptResult]:
    """Return a function that runs a script on the release of ``engine``, in the same way as a reproduction."""
    from zharness.export.verify import ScriptResult
    from zharness.releases import repros
    from zharness.releases.launch import CommandGroup

    seconds = repros.TIMEOUT_SECONDS
    environment = prepare_engine(engine)

    def run(path: Path) -> ScriptResult:
        """Run the script at ``path`` and return its verdict and evidence."""
        commands = CommandGroup()
        try:
            result = repros.run_repro(repros.parse_repro(path), engine, environment, seconds, commands)
        finally:
            commands.terminate()
        return ScriptResult(result.verdict.value, result.evidence)

    return run
