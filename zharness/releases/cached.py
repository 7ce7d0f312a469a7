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

from zharness.engines.registry import split
from zharness.errors import UsageError
from zharness.releases import checkout, in_use, overlay

REMOVED = "removed"


@dataclass(frozen=True)
class Entry:
    """One folder of the cache: a whole overlay, what is kept of a checkout, or what a killed install left behind.

    ``subject`` is the release as ``--engine`` spells it, or the folder's name; ``size`` is in bytes.
    """

    path: Path
    subject: str
    what: str
    size: int


def entries() -> list[Entry]:
    """Everything in the cache that this package made, told by its stamp or by the prefix of unfinished installs."""
    kinds = (("releases", of_overlay), ("checkouts", of_checkout))
    found = [unfinished(path) or kind(path) for part, kind in kinds for path in _folders(part)]
    return [entry for entry in found if entry is not None]


def unfinished(path: Path) -> Entry | None:
    """The entry of what a killed process left half made; None for what is whole."""
    if path.name.startswith(".") and overlay.BUILDING in path.name:
        return Entry(path, path.name, "unfinished install", size(path))
    return None


def of_overlay(path: Path) -> Entry | None:
    """The entry of an overlay; None for what is none."""
    try:
        stamp = overlay.Stamp(**json.loads((path / overlay.STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    subject = f"{stamp.distribution}=={stamp.release}"
    return Entry(path, subject, f"Python {stamp.python}, torch {stamp.torch}", size(path))


def of_checkout(path: Path) -> Entry | None:
    """The entry of what is kept of a checkout; None for what is none."""
    try:
        return Entry(path, (path / checkout.STAMP).read_text(), "links to a checkout, its extensions", size(path))
    except OSError:
        return None


def clean(wanted: Sequence[str]) -> Iterator[tuple[Entry, str]]:
    """Remove the entries whose subject is ``wanted``, all where none is named; each with what became of it.

    ``NAME`` stands for all releases of it. Raises UsageError for what the cache does not hold.
    """
    held = entries()
    chosen = [entry for entry in held if not wanted or any(meant(entry, text) for text in wanted)]
    for text in wanted:
        if not any(meant(entry, text) for entry in held):
            raise UsageError.unknown("release in the cache", text, [entry.subject for entry in held] or "(it is empty)")
    for entry in chosen:
        yield entry, removed(entry)


def meant(entry: Entry, text: str) -> bool:
    """Whether ``text`` speaks of ``entry``. A checkout is meant by any spelling of its path, be it there or not."""
    name, at, path = text.partition("@")
    text = f"{name}@{Path(path).expanduser().resolve()}" if at else text
    if text == entry.subject:
        return True
    return "==" not in text and "@" not in text and split_name(entry) == text


def split_name(entry: Entry) -> str:
    """The package that an entry is of."""
    return entry.subject.lstrip(".").partition("-")[0] if entry.subject.startswith(".") else split(entry.subject)[0]


def removed(entry: Entry) -> str:
    """Remove one entry unless somebody is building it or runs on it; what became of it.

    It is renamed first: whatever stands under a release's own name is whole.
    """
    name = entry.path.name.lstrip(".").partition(overlay.BUILDING)[0]
    lock = filelock.FileLock(str(entry.path.parent / f".{name}.lock"), timeout=0)
    try:
        with lock, in_use.taken(entry.path) as ours:
            if not ours:
                return "left alone: a process runs on it"
            beside = Path(tempfile.mkdtemp(prefix=f".{name}{overlay.BUILDING}", dir=entry.path.parent))
            os.replace(entry.path, beside / "removed")
            shutil.rmtree(beside)
    except filelock.Timeout:
        return "left alone: another process is building it"
    except OSError as error:
        return f"not removed: {error}"
    return REMOVED


def size(path: Path) -> int:
    """Bytes of all files below ``path``; links count for nothing."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _folders(part: str) -> list[Path]:
    place = overlay.cache() / part
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []
