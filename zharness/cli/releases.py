"""The commands about releases of engines."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import click

from zharness.cli.options import OUTPUT


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "every", is_flag=True, help="Run every reproduction there is; with --on those of its engines.")
@click.option(
    "--on",
    "--engine",
    "on",
    multiple=True,
    metavar="NAME==RELEASE|NAME@CHECKOUT",
    help="A release, installed into a folder of its own, or a source checkout; NAME alone is the installed release. "
    "May be repeated.",
)
@click.option("--jobs", type=click.IntRange(1), help="Runs at a time; one for each core.")
@click.option("--jsonl", type=OUTPUT, help="Write one JSON line for each run.")
@click.option("--markdown", is_flag=True, help="Print bugs x releases as a table in Markdown.")
def repro(
    ids: tuple[str, ...], every: bool, on: tuple[str, ...], jobs: int | None, jsonl: Path | None, markdown: bool
) -> int:
    """Show real bugs of real engines, by the number of their issue.

    Each runs on the sides that its header names: a release with the bug, and where there is one a release with the fix.
    The verdict is reproduced, not reproduced or failed otherwise, by the error's signature. `zharness list repros` says
    which there are; each is a script in repro/ that runs under plain torchrun too.

    Exit codes: 0 every release showed what it should, 1 one did not, 3 a run failed otherwise or its release could not
    be had.
    """
    from zharness.releases import repro_runs, repro_table
    from zharness.run.record import record_file

    runs = repro_runs.chosen(ids, every, on)
    began = time.monotonic()
    with ExitStack() as stack:
        file = stack.enter_context(record_file(jsonl)) if jsonl else None
        found = repro_runs.results(runs, jobs, file.add if file else None)
    if markdown:
        click.echo(repro_table.markdown(found))
    else:
        click.echo(f"{repro_table.table(found)}\n\n{repro_table.summary(found, time.monotonic() - began)}")
    return repro_table.exit_code(found)
