"""What the cache of releases holds, and taking it away again."""

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
    """One folder of the cache: a whole overlay, what is kept of a checkout, or what a killed install left behind.

    ``subject`` is the release as ``--engine`` spells it, or the folder's name; ``size`` is in bytes.
    """

    path: Path
    subject: str
    description: str
    size: int


def list_entries() -> list[CacheEntry]:
    """Everything in the cache that this package made, told by its stamp or by the prefix of unfinished installs."""
    kinds = (("releases", parse_overlay_entry), ("checkouts", parse_checkout_entry))
    found = [parse_unfinished_entry(path) or kind(path) for part, kind in kinds for path in _folders(part)]
    return [entry for entry in found if entry is not None]


def parse_unfinished_entry(path: Path) -> CacheEntry | None:
    """The entry of what a killed process left half made; None for what is whole."""
    if path.name.startswith(".") and overlay.BUILDING_INFIX in path.name:
        return CacheEntry(path, path.name, "unfinished install", folder_size(path))
    return None


def parse_overlay_entry(path: Path) -> CacheEntry | None:
    """The entry of an overlay; None for what is none."""
    try:
        stamp = overlay.Stamp(**json.loads((path / overlay.STAMP_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    subject = f"{stamp.distribution}=={stamp.release}"
    return CacheEntry(path, subject, f"Python {stamp.python}, torch {stamp.torch}", folder_size(path))


def parse_checkout_entry(path: Path) -> CacheEntry | None:
    """The entry of what is kept of a checkout; None for what is none."""
    try:
        return CacheEntry(
            path, (path / checkout.STAMP_FILE).read_text(), "links to a checkout, its extensions", folder_size(path)
        )
    except OSError:
        return None


def clean_cache(subjects: Sequence[str]) -> Iterator[tuple[CacheEntry, str]]:
    """Remove the entries whose subject is ``wanted``, all where none is named; each with what became of it.

    ``NAME`` stands for all releases of it. Raises UsageError for what the cache does not hold.
    """
    held = list_entries()
    chosen = [entry for entry in held if not subjects or any(is_entry_named(entry, text) for text in subjects)]
    for text in subjects:
        if not any(is_entry_named(entry, text) for entry in held):
            raise UsageError.unknown_name(
                "release in the cache", text, [entry.subject for entry in held] or "(it is empty)"
            )
    for entry in chosen:
        yield entry, remove_entry(entry)


def is_entry_named(entry: CacheEntry, text: str) -> bool:
    """Whether ``text`` speaks of ``entry``. A checkout is meant by any spelling of its path, be it there or not."""
    name, at, path = text.partition("@")
    text = f"{name}@{Path(path).expanduser().resolve()}" if at else text
    if text == entry.subject:
        return True
    return "==" not in text and "@" not in text and get_entry_package(entry) == text


def get_entry_package(entry: CacheEntry) -> str:
    """The package that an entry is of."""
    return (
        entry.subject.lstrip(".").partition("-")[0]
        if entry.subject.startswith(".")
        else split_release(entry.subject)[0]
    )


def remove_entry(entry: CacheEntry) -> str:
    """Remove one entry unless somebody is building it or runs on it; what became of it.

    It is renamed first: whatever stands under a release's own name is whole.
    """
    name = entry.path.name.lstrip(".").partition(overlay.BUILDING_INFIX)[0]
    lock = filelock.FileLock(str(entry.path.parent / f".{name}.lock"), timeout=0)
    try:
        with lock, usage_locks.try_exclusive(entry.path) as ours:
            if not ours:
                return "left alone: a process runs on it"
            beside = Path(tempfile.mkdtemp(prefix=f".{name}{overlay.BUILDING_INFIX}", dir=entry.path.parent))
            os.replace(entry.path, beside / "removed")
            shutil.rmtree(beside)
    except filelock.Timeout:
        return "left alone: another process is building it"
    except OSError as error:
        return f"not removed: {error}"
    return REMOVED


def folder_size(path: Path) -> int:
    """Bytes of all files below ``path``; links count for nothing."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _folders(kind: str) -> list[Path]:
    place = overlay.cache_folder() / kind
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []
