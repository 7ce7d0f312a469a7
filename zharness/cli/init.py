"""The command ``init``: write the first zharness.toml of an engine's repository."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cli.options import INPUT_FILE, OnceCommand


@click.command(cls=OnceCommand)
@click.argument("files", nargs=-1, required=True, metavar="RECORDS...", type=INPUT_FILE)
def init(files: tuple[Path, ...]) -> int:
    """Write zharness.toml into the current folder, from records of `zharness check --engine ENGINE --jsonl RECORDS`.

    The file pins the newest version of the law set, and has an expected failure for each cause of the failures in
    RECORDS, so that the next `zharness check` is green on the cells of RECORDS until something changes. Write the issue
    and the reason into each expected failure.
    """
    from zharness.report.first_project_file import write_project_file
    from zharness.run.record_reader import load_records

    loaded = load_records(files)
    path, entries = write_project_file(loaded.records, Path.cwd())
    click.echo(f"wrote {path}: {entries} expected failures; `zharness check` uses it in this folder and those below")
    if loaded.skipped_lines:
        click.echo(loaded.describe_skipped(), err=True)
    return 0
