"""Write files atomically: under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import os
from pathlib import Path

from zharness.errors import UsageError


def require_writable(path: Path) -> None:
    """Raise UsageError if no file can be written at ``path``. Call this function before a long run."""
    try:
        partial_path(path).touch()
        partial_path(path).unlink(missing_ok=True)  # under torchrun another rank may have removed it
    except OSError as error:
        raise unwritable_error(path, error) from error


def unwritable_error(path: Path, error: OSError) -> UsageError:
    """Build the UsageError for a file that cannot be written."""
    return UsageError(f"cannot write {str(path)!r}: {error.strerror}; name a path that can be written")


def partial_path(path: Path) -> Path:
    """Return the path of the temporary file in the folder of ``path``, with symbolic links resolved."""
    return path.resolve().with_name(path.name + ".partial")


def write_atomically(text: str, path: Path) -> None:
    """Write ``text`` into a temporary file and rename the file to ``path``. Raises UsageError if writing fails."""
    require_writable(path)
    partial = partial_path(path)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path.resolve())
    except OSError as error:
        raise unwritable_error(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
