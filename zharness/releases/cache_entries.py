"""List and remove the entries of the cache of releases."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.releases import checkout, overlay, usage_locks

REMOVED = "removed"


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache: an overlay, the links to a checkout, or the files of an interrupted install.

    ``subject`` is the release as the option ``--engine`` spells it; for an interrupted install it is the folder's name.
    ``size`` is in bytes.
    """

    path: Path
    subject: str
    description: str
    size: int


def list_entries() -> list[CacheEntry]:
    """Return all entries of the cache; a folder is an entry if it has a stamp or the name of an interrupted install."""
    kinds = (("releases", parse_overlay_entry), ("checkouts", parse_checkout_entry))
    entries = [parse_unfinished_entry(path) or parse(path) for part, parse in kinds for path in _folders(part)]
    return [entry for entry in entries if entry is not None]


def parse_unfinished_entry(path: Path) -> CacheEntry | None:
    """Return the entry of the interrupted install that left the folder ``path``, or None for any other folder."""
    if path.name.startswith(".") and overlay.BUILDING_INFIX in path.name:
        return CacheEntry(path, path.name, "unfinished install", folder_size(path))
    return None


def parse_overlay_entry(path: Path) -> CacheEntry | None:
    """Return the entry of the overlay in ``path``, or None if this folder has no valid stamp."""
    try:
        stamp = overlay.Stamp(**json.loads((path / overlay.STAMP_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    subject = f"{stamp.distribution}=={stamp.release}"
    return CacheEntry(path, subject, f"Python {stamp.python}, torch {stamp.torch}", folder_size(path))


def parse_checkout_entry(path: Path) -> CacheEntry | None:
    """Return the cache entry of a folder of links to a checkout, or None if the folder has no stamp file."""
    try:
        return CacheEntry(
            path, (path / checkout.STAMP_FILE).read_text(), "links to a checkout, its extensions", folder_size(path)
        )
    except OSError:
        return None


def clean_cache(subjects: Sequence[str]) -> Iterator[tuple[CacheEntry, str]]:
    """Remove the entries that ``subjects`` name, or all entries if none is named; yield each entry and the result.

    ``NAME`` without a release means all releases of NAME. Raises UsageError for a subject that is not in the cache.
    """
    entries = list_entries()
    chosen = [entry for entry in entries if not subjects or any(is_entry_named(entry, text) for text in subjects)]
    for text in subjects:
        if not any(is_entry_named(entry, text) for entry in entries):
            raise UsageError.unknown_name(
                "release in the cache", text, [entry.subject for entry in entries] or "(it is empty)"
            )
    for entry in chosen:
        yield entry, remove_entry(entry)


def is_entry_named(entry: CacheEntry, text: str) -> bool:
    """Return whether ``text`` names ``entry``.

    Any path to a checkout names the checkout's entry, even if the checkout no longer exists.
    """
    name, at, path = text.partition("@")
    text = f"{name}@{Path(path).expanduser().resolve()}" if at else text
    if text == entry.subject:
        return True
    return "==" not in text and "@" not in text and get_entry_package(entry) == text


def get_entry_package(entry: CacheEntry) -> str:
    """Return the name of the package to which ``entry`` belongs."""
    return (
        entry.subject.lstrip(".").partition("-")[0]
        if entry.subject.startswith(".")
        else split_release(entry.subject)[0]
    )


def remove_entry(entry: CacheEntry) -> str:
    """Remove one entry, unless a process builds or uses it, and return the result as text.

    The folder is renamed before its files are removed, so that a folder with a release's name is always complete.
    """
    name = entry.path.name.lstrip(".").partition(overlay.BUILDING_INFIX)[0]
    lock = filelock.FileLock(str(entry.path.parent / f".{name}.lock"), timeout=0)
    try:
        with lock, usage_locks.try_exclusive(entry.path) as is_unused:
            if not is_unused:
                return "not removed: a process uses it"
            discarded = Path(tempfile.mkdtemp(prefix=f".{name}{overlay.BUILDING_INFIX}", dir=entry.path.parent))
            os.replace(entry.path, discarded / "removed")
            shutil.rmtree(discarded)
    except filelock.Timeout:
        return "not removed: another process is building it"
    except OSError as error:
        return f"not removed: {error}"
    return REMOVED


def folder_size(path: Path) -> int:
    """Return the total size in bytes of all files below ``path``. Symbolic links are not followed."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _folders(kind: str) -> list[Path]:
    """Return the folders in the cache's subfolder ``kind``, sorted by name."""
    folder = overlay.cache_folder() / kind
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
