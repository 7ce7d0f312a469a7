"""The command ``compare``: what a change of an engine breaks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zharness.cli.cell_options import CellOptions, add_cell_options, make_measure
from zharness.cli.check import SECONDS_OF_A_CHANGE
from zharness.cli.options import INPUT_FILE, OUTPUT, SECONDS, OnceCommand, add_law_option, require_commit_with_reach

if TYPE_CHECKING:
    from zharness.run import Request
    from zharness.run.check_loop import RunResult


@click.command(cls=OnceCommand)
@click.argument("base")
@click.argument("change")
@add_law_option(cell_ids=True)
@click.option(
    "--expected-failures",
    "--excuses",
    "expected_failures",
    multiple=True,
    type=OUTPUT,
    help="TOML file of failures that the change is expected to cause; may be repeated.",
)
@click.option(
    "--changed",
    "commit",
    metavar="COMMIT",
    help="On CHANGE, run only the cells that reach a function which has changed since its branch left COMMIT; cells "
    "that are likely to fail run first. On BASE, run only the cells that fail on CHANGE. Needs --reach.",
)
@click.option(
    "--reach",
    "reach_file",
    type=INPUT_FILE,
    metavar="FILE",
    help="File that `zharness check --record-reach FILE` wrote in an earlier run.",
)
@click.option(
    "--max-seconds",
    type=SECONDS,
    default=SECONDS_OF_A_CHANGE,
    show_default=True,
    help="With --changed: start no further cell of CHANGE after this number of seconds, and report which laws did not "
    "run.",
)
@add_cell_options
def compare(
    base: str,
    change: str,
    checks: tuple[str, ...],
    expected_failures: tuple[Path, ...],
    commit: str | None,
    reach_file: Path | None,
    max_seconds: float,
    **options: Any,
) -> int:
    """Run the same cells on BASE and on CHANGE, a changed engine, and fail only if the change breaks a cell.

    BASE and CHANGE are NAME@CHECKOUT, NAME==RELEASE or NAME. Cells that the change breaks are run once more on both,
    and are reported only if they break again. Exit codes: 0 the change breaks no cell, 1 the change breaks a cell that
    is not broken on BASE, 2 BASE or CHANGE cannot be run or they share no cell, 3 the harness itself failed.

    \b
    zharness compare deepspeed@base deepspeed@change --expected-failures ci/expected_failures.toml
    zharness compare deepspeed@base deepspeed@change --changed HEAD^1 --reach reach.jsonl
    zharness compare deepspeed@base deepspeed@change --mesh tp2 --world-size 4
    """
    require_commit_with_reach(commit, reach_file)
    from zharness.releases import compare_releases
    from zharness.releases.claimed_meshes import require_mesh_of_any
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.run.changed_cells import ChangeSelection
    from zharness.run.user_failures import read_expected_failures

    cell_options, user_failures = CellOptions(**options), read_expected_failures(expected_failures)
    request = (cell_options.build_change_request if commit else cell_options.build_request)(checks)
    for engine in (base, change):  # an engine that does not claim the mesh would have no cell to compare
        request = require_mesh_of_any((engine,), request)
    for engine in (base, change):
        prepare_rank_environment(engine)  # raises here, before the cells of the other engine have run for a minute
    changes = ChangeSelection(commit, reach_file) if commit is not None and reach_file is not None else None
    with ExitStack() as stack:
        run = cell_options.build_run(stack, user_failures)

        def run_changed(request: Request) -> RunResult:
            """Run the cells of ``request`` that reach the change."""
            return run(request, changes, max_seconds)

        return compare_releases.compare_releases(
            base, change, request, make_measure(run), user_failures, run_changed if changes else None
        )
