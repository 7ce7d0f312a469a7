"""The command ``zharness site``: load records, render the pages, and replace the folder of the site."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

import click
from tqdm import tqdm

from zharness.errors import UsageError
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.record_reader import load_records
from zharness.site.folder import replace_folder, require_replaceable
from zharness.site.pages import MISSING_JINJA_MESSAGE, Site

PROGRESS_DELAY_SECONDS = 2.0
Item = TypeVar("Item")


def build_site(paths: Sequence[Path], folder: Path, user_failures: Sequence[ExpectedFailure] = ()) -> int:
    """Write the site of the records in ``paths`` into ``folder``, and return the exit code.

    ``user_failures`` are the user's own expected failures, whose reasons are shown.
    The exit code is 0 for all verdicts, and 2 if a line of the files is not a record; then the site is written without
    that line and says so. Raises UsageError if there is no record, jinja2 is missing, or the folder must not be
    replaced.
    """
    if find_spec("jinja2") is None:
        raise UsageError(MISSING_JINJA_MESSAGE)
    require_replaceable(folder.resolve())
    with show_progress("reading", "line") as bar:
        loaded = load_records(paths, lambda lines: count_taken(lines, bar))
    site = Site(loaded.records, loaded.skipped_lines, user_failures)
    size = 0
    with replace_folder(folder) as beside, show_progress("writing", "file", site.size) as bar:
        for file in count_taken(site.render(), bar):
            target = beside / file.path
            target.parent.mkdir(exist_ok=True)
            target.write_text(file.text, encoding="utf-8")
            size += target.stat().st_size
    records = f"{len(loaded.records)} record{'s' if len(loaded.records) > 1 else ''}"
    click.echo(f"{folder / 'index.html'}: {records}, {site.size} files, {size / 1e6:.1f} MB")
    if loaded.skipped_lines:
        click.echo(loaded.describe_skipped(), err=True)
        click.echo("exit code 2: the site was written without the lines that could not be read", err=True)
        return 2
    return 0


def show_progress(verb: str, unit: str, total: int | None = None) -> tqdm[NoReturn]:
    """Return a progress bar that counts units on a terminal; it appears only after two seconds."""
    return tqdm(
        desc=verb,
        unit=f" {unit}",
        total=total,
        delay=PROGRESS_DELAY_SECONDS,
        leave=False,
        disable=not sys.stderr.isatty(),
    )


def count_taken(items: Iterable[Item], bar: tqdm[NoReturn]) -> Iterator[Item]:
    """Yield ``items``, and count each item on ``bar`` when the next item is requested."""
    for item in items:
        yield item
        bar.update()
