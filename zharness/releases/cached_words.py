"""The cache of releases, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.releases import cached, overlay
from zharness.releases.cached import Entry


def listed(wanted: Sequence[str]) -> str:
    """What the cache holds of ``wanted``, or of everything."""
    found = [entry for entry in cached.entries() if not wanted or any(cached.meant(entry, text) for text in wanted)]
    body = [[entry.subject, entry.what, megabytes(entry.size)] for entry in found]
    total = megabytes(sum(entry.size for entry in found))
    table = tabulate(body, ["release", "for", "size"], disable_numparse=True)
    return f"{table}\n\n" * bool(body) + f"{len(found)} in {overlay.cache()}, {total}"


def cleaned(done: Sequence[tuple[Entry, str]]) -> str:
    """What became of each, and how much was freed."""
    freed = sum(entry.size for entry, what in done if what == cached.REMOVED)
    return "\n".join([*map(line, done), f"freed {megabytes(freed)} of {overlay.cache()}"])


def line(done: tuple[Entry, str]) -> str:
    """What became of one entry."""
    entry, what = done
    return f"{entry.subject} ({entry.what}): {what}"


def megabytes(size: int) -> str:
    """Bytes in MB."""
    return f"{size / 1e6:.1f} MB"
