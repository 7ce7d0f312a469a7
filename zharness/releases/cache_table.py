"""Render the contents of the cache of releases as text."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.releases import cache_entries, overlay
from zharness.releases.cache_entries import CacheEntry


def render_entries(subjects: Sequence[str]) -> str:
    """Return a table of the cache entries that ``subjects`` name, or of all entries if ``subjects`` is empty."""
    found = [
        entry
        for entry in cache_entries.list_entries()
        if not subjects or any(cache_entries.is_entry_named(entry, text) for text in subjects)
    ]
    body = [[entry.subject, entry.description, format_megabytes(entry.size)] for entry in found]
    total = format_megabytes(sum(entry.size for entry in found))
    table = tabulate(body, ["release", "for", "size"], disable_numparse=True)
    return f"{table}\n\n" * bool(body) + f"{len(found)} in {overlay.cache_folder()}, {total}"


def render_cleaned(removals: Sequence[tuple[CacheEntry, str]]) -> str:
    """Return one line for each removed entry, and a last line with the amount of freed space in MB."""
    freed = sum(entry.size for entry, result in removals if result == cache_entries.REMOVED)
    return "\n".join([*map(render_removal, removals), f"freed {format_megabytes(freed)} of {overlay.cache_folder()}"])


def render_removal(removal: tuple[CacheEntry, str]) -> str:
    """Return one line with a cache entry and the result of its removal."""
    entry, result = removal
    return f"{entry.subject} ({entry.description}): {result}"


def format_megabytes(size: int) -> str:
    """Return ``size``, a number of bytes, as text in MB."""
    return f"{size / 1e6:.1f} MB"
