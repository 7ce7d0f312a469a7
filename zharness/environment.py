"""Set environment variables for the time of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def restore_variables(*names: str) -> Iterator[None]:
    """Give the variables ``names`` back their values at the end of the block; those that were not set are removed."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside the block, and give them back their earlier values at its end."""
    with restore_variables(*values):
        os.environ.update(values)
        yield
