"""The command ``zharness site``: write a static site from the records of many runs."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cli.options import INPUT_FILE, OnceCommand
from zharness.cli.project_options import read_project_failures
from zharness.project_file import find_project_file


@click.command(cls=OnceCommand)
@click.argument("records", nargs=-1, required=True, type=INPUT_FILE, metavar="RECORDS...")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the site into FOLDER. The command replaces a site that it wrote there before, but never other files.",
)
@click.option(
    "--expected-failures",
    "--excuses",
    "expected_failures",
    multiple=True,
    type=INPUT_FILE,
    help="TOML file of expected failures whose reasons the pages show, beside those of zharness.toml in the current "
    "folder and of zharness. May be repeated.",
)
def site(records: tuple[Path, ...], folder: Path, expected_failures: tuple[Path, ...]) -> int:
    """Write a static site from records of any number of runs: engines, releases, and releases of torch.

    RECORDS are files that `zharness check --jsonl FILE` and `zharness releases --jsonl FILE` wrote:

    \b
    zharness check --engine fsdp2 --jsonl fsdp2.jsonl
    zharness check --engine deepspeed==0.18.8 --jsonl old.jsonl
    zharness check --engine deepspeed --jsonl new.jsonl
    zharness site fsdp2.jsonl old.jsonl new.jsonl -o site
    python -m http.server --directory site        or open site/index.html, which needs no server

    The site has a table of laws x engine releases, whose filters are kept in the address; a page for each law, with its
    statement and with the release on which each cell broke or was mended; a page for each finding that the records
    name, with its reason, issue and reproduction; a page for each contract, with its documentation and remedy; and a
    badge for each engine release (badges/*.svg). The site loads nothing from elsewhere, and can be served from any
    folder, for example by GitHub Pages.

    If a cell was run several times on one release, its worst record counts. Exit codes: 0 the site was written,
    whatever the verdicts are; 2 wrong usage, no record, or a line that is not a record (the site then says so).
    """
    from zharness.site.command import build_site

    failures = read_project_failures(find_project_file(Path.cwd()), expected_failures)
    return build_site(records, folder, failures)
