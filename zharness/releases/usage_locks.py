"""Lock cache folders that are in use, so that `zharness` does not remove them when it cleans the cache.

A lock ends when all processes that hold it have ended.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# The cache belongs to another user, is mounted read-only, or its file system has no locks.
UNLOCKABLE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK)

_LOCK_FILES: dict[Path, IO[str]] = {}


def mark_in_use(folder: Path) -> None:
    """Mark ``folder`` as in use until this process and every rank forked from it have ended.

    Call this function before testing whether the folder exists, so that no process can remove the folder in between.
    The function waits while another process removes the folder. It does nothing if the cache is read-only or its file
    system does not support locks.
    """
    if folder in _LOCK_FILES:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_path(folder).open("a")
        # Forked processes share the open file and its lock; processes started with exec do not, but their parent waits.
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in UNLOCKABLE_ERRORS:
            raise
    else:
        _LOCK_FILES[folder] = file


@contextmanager
def try_exclusive(folder: Path) -> Iterator[bool]:
    """Try to lock ``folder`` exclusively, and yield whether the lock was acquired.

    The lock cannot be acquired while any process, even this one, uses the folder.
    """
    with _lock_path(folder).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _lock_path(folder: Path) -> Path:
    """Return the path of the lock file that belongs to ``folder``."""
    return folder.with_name(f".{folder.name}.in_use.lock")
