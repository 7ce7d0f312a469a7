"""Files that are whole or not there: written under a temporary name beside their own, and renamed."""

from __future__ import annotations

import os
from pathlib import Path

from zharness.errors import UsageError


def require_writable(path: Path) -> None:
    """Raises UsageError when no file can be written at ``path``: before a long run, not after it."""
    try:
        partial_path(path).touch()
        partial_path(path).unlink()
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}; name a writable place") from error


def partial_path(path: Path) -> Path:
    """The temporary name beside ``path``, links followed."""
    return path.resolve().with_name(path.name + ".partial")


def write_atomically(text: str, path: Path) -> None:
    """Write ``text`` to a temporary name and rename it. Raises UsageError when it cannot be written."""
    require_writable(path)
    partial = partial_path(path)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path.resolve())
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}; name a writable place") from error
    finally:
        partial.unlink(missing_ok=True)
