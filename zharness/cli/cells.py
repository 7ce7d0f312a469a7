"""Commands on one cell: as a script, and as the smallest that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zharness.cli.options import OUTPUT, SECONDS
from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.export.verify import ScriptResult


@click.command()
@click.argument("case", required=False, metavar="CASE_ID")
@click.option("--seed", default=0, show_default=True, help="As `zharness check` was given it.")
@click.option("-o", "--output", type=OUTPUT, help="Where the script goes; standard output without it.")
@click.option("--no-verify", is_flag=True, help="Do not run the script.")
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="For the ranks of the cell.")
@click.option("--list", "listing", is_flag=True, help="Say of each law whether its script is short, and why not.")
def export(case: str | None, seed: int, output: Path | None, no_verify: bool, timeout: float, listing: bool) -> int:
    """Write a cell as a script that needs torch and the engine alone, and run it to see that it shows the same.

    CASE_ID is what the report of a failure prints. Exit code 1 when the script does not show the cell's verdict.
    """
    from zharness.cell import Cell
    from zharness.export import command
    from zharness.releases.rank_environment import get_release_environment

    if listing:
        click.echo(command.render_law_table())
        return 0
    if case is None:
        raise UsageError("no cell was named; paste the id that a report prints, as in training.grads[ddp-zero0-...]")
    options = command.ExportOptions(seed, timeout, output)
    return command.export(
        case, options, get_release_environment, None if no_verify else make_script_runner(Cell.parse(case).engine)
    )


@click.command()
@click.argument("case", metavar="CASE_ID")
@click.option("--seed", default=0, show_default=True, help="As `zharness check` was given it.")
@click.option(
    "--seconds",
    type=SECONDS,
    default=45.0,
    show_default=True,
    help="For the search, which ends with what it has by then.",
)
@click.option("-o", "--output", type=OUTPUT, help="Where the script goes; standard output without it.")
@click.option("--no-verify", is_flag=True, help="Do not run the script.")
@click.option("--timeout", type=SECONDS, default=30.0, show_default=True, help="For the ranks of one cell or program.")
def shrink(case: str, seed: int, seconds: float, output: Path | None, no_verify: bool, timeout: float) -> int:
    """Find the smallest that fails as a cell does, print the command that shows it, and export it as a script.

    Fewer ranks, a lower stage, fp32, a smaller model; then programs (see `zharness program`) that Hypothesis draws, cut
    down to what the failure takes. A failure is the same where the verdict is, and the part of the step that is wrong
    or the exception.
    """
    from zharness.export import command
    from zharness.releases.rank_environment import get_release_environment

    options = command.ExportOptions(seed, timeout, output)
    return command.shrink(case, options, seconds, get_release_environment, None if no_verify else make_script_runner)


def make_script_runner(engine: str) -> Callable[[Path], ScriptResult]:
    """Runs a script on the release of the engine ``name``, as those of repro/ are run."""
    from zharness import engines
    from zharness.engines import registry
    from zharness.export.verify import ScriptResult
    from zharness.releases import repros
    from zharness.releases.launch import CommandGroup
    from zharness.releases.release_environment import ReleaseEnvironment, prepare_release

    seconds = repros.TIMEOUT_SECONDS

    def run(path: Path) -> ScriptResult:
        found = (
            ReleaseEnvironment("")
            if registry.is_factory_path(engine)
            else prepare_release(engine, engines.info(engine).distribution)
        )
        running = CommandGroup()
        try:
            result = repros.run_repro(repros.parse_repro(path), engine, found, seconds, running)
        finally:
            running.terminate()
        return ScriptResult(result.verdict.value, result.evidence)

    return run
