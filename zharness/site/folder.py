"""Write the files of a site beside its folder, and swap both when the site is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zharness.errors import UsageError
from zharness.run.files import unwritable_error

MARKER = "zharness-site.json"  # lists the files of the site, so that a later run replaces only these files
REMEDY = "name another folder, or move what you want to keep"


def require_replaceable(folder: Path) -> None:
    """Raise UsageError if ``folder`` is a file, or has a file that `zharness site` did not write.

    Call this function before a long run. An empty folder and a missing folder can be replaced.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"cannot write the site to {str(folder)!r}, which is not a folder; name a folder")
    known = {MARKER, *read_marker(folder)}
    foreign = next((name for name in list_files(folder) if name not in known), None)
    if foreign is not None:
        raise UsageError(
            f"the folder {str(folder)!r} has files that `zharness site` did not write, such as {foreign!r}; {REMEDY}"
        )


def read_marker(folder: Path) -> list[str]:
    """Return the paths of the files that `zharness site` wrote into ``folder``; none if the marker is missing."""
    try:
        plain = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return [str(name) for name in plain["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def list_files(folder: Path) -> Iterator[str]:
    """Yield the path of every file and link below ``folder``, relative to it, with slashes."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` that takes its place when the block ends without an exception.

    The old folder is removed after the swap, so a reader always finds a complete site, except between two renames.
    Raises UsageError if the folder cannot be written or must not be replaced.
    """
    target = folder.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    require_replaceable(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        yield beside
        (beside / MARKER).write_text(json.dumps({"files": sorted(list_files(beside))}), encoding="utf-8")
        require_replaceable(target)  # a file may have appeared while the site was written
        swap_folders(target, beside, old)
    except OSError as error:
        raise unwritable_error(folder, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def swap_folders(target: Path, new: Path, old: Path) -> None:
    """Rename ``new`` to ``target``, and remove the old ``target``. If a rename fails, restore the old ``target``."""
    if not target.exists():
        os.replace(new, target)
        return
    os.replace(target, old)
    try:
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
