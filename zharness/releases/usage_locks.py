"""Which folders of the cache somebody runs on: locks that end with their processes, so that cleaning leaves them."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# A cache of another user, on a disk mounted for reading, or on one that has no locks.
UNLOCKABLE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK)

_LOCK_FILES: dict[Path, IO[str]] = {}


def mark_in_use(folder: Path) -> None:
    """Say that ``place`` is in use, until this process and every rank forked from it is gone.

    Hold it before looking whether it is there: what is held is not taken away in between. Waits while it is being
    removed. In a cache that this user cannot write to, or that has no locks, nothing is said.
    """
    if folder in _LOCK_FILES:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_path(folder).open("a")
        # Forks share the open file and with it the lock; what is started with exec does not, but its parent waits.
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in UNLOCKABLE_ERRORS:
            raise
    else:
        _LOCK_FILES[folder] = file


@contextmanager
def try_exclusive(folder: Path) -> Iterator[bool]:
    """A block that has ``place`` for itself, and whether it has: not where any process, this one too, holds it."""
    with _lock_path(folder).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.in_use.lock")
