"""Types and parsers of options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cell import parse_integers
from zharness.errors import UsageError

SECONDS = click.FloatRange(min=1.0, max=86_400.0)
OUTPUT = click.Path(dir_okay=False, path_type=Path)
INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def parse_integer_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Parse ``0,1,2`` as integers. Raises click.BadParameter for anything else."""
    try:
        return () if value is None else parse_integers(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def parse_name_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse ``fp32,bf16`` as names, each once."""
    return () if value is None else tuple(dict.fromkeys(part.strip() for part in value.split(",")))
