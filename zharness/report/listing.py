"""Render the lists of ``zharness list`` as tables or JSON. The module does not import torch."""

from __future__ import annotations

import json

from tabulate import tabulate

from zharness.engines import registered_engines
from zharness.errors import UsageError
from zharness.names import matches_pattern

Rows = list[dict[str, str]]
MAX_COLUMN_WIDTH = 60  # characters; longer entries are wrapped, so that the last columns stay in sight


def engine_rows() -> Rows:
    """List every registered engine with its version, or with the command that installs a missing engine."""
    return [
        {
            "engine": info.name,
            "version": info.version() or "not installed",
            "what": info.summary,
            "to install": "" if info.version() else info.install,
        }
        for info in registered_engines().values()
    ]


def filter_rows(rows: Rows, kind: str, patterns: tuple[str, ...]) -> Rows:
    """Return the rows whose first entry matches any pattern. Raises UsageError for a pattern without a match."""
    names = [next(iter(row.values())) for row in rows]
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in names):
            singular = "law" if kind == "checks" else kind.removesuffix("s")
            remedy = f"`zharness list {kind}` prints every {singular}"
            raise UsageError.unknown_name(singular, pattern, names, remedy)
    return [
        row
        for row, name in zip(rows, names, strict=True)
        if not patterns or any(matches_pattern(name, p) for p in patterns)
    ]


def render_rows(rows: Rows, as_json: bool) -> str:
    """Render rows as a table or as JSON."""
    if as_json:
        return json.dumps(rows, indent=2)
    # JSON keeps the keys "check" and "law" for the name and the statement of a law.
    renamed = {"check": "law", "law": "statement"} if rows and "check" in rows[0] else {}
    headers = {key: renamed.get(key, key) for key in (rows[0] if rows else {})}
    return tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=MAX_COLUMN_WIDTH, disable_numparse=True)
