"""Render the lists of ``zharness list`` as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from tabulate import tabulate

from zharness.engines import registered_engines
from zharness.errors import UsageError
from zharness.laws import LAWS
from zharness.laws.registry import matches_pattern
from zharness.mutants import MUTANTS
from zharness.workload import MODELS

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


def law_rows() -> Rows:
    """List every law, its group, and its tier on random weights."""
    return [
        {
            "check": law.name,
            "group": law.name.partition(".")[0],
            "law": law.statement,
            "tier": law.tier.value,
            "variants": ", ".join(variant.name for variant in law.variants if variant.name),
        }
        for law in LAWS.values()
    ]


def add_killed_mutants(rows: Rows) -> Rows:
    """Add to each law the mutants that name it as a target."""
    return [
        {**row, "kills": ", ".join(name for name, mutant in MUTANTS.items() if row["check"] in mutant.named_laws)}
        for row in rows
    ]


def filter_rows(rows: Rows, kind: str, patterns: tuple[str, ...]) -> Rows:
    """Return the rows whose first entry matches any pattern. Raises UsageError for a pattern without a match."""
    names = [next(iter(row.values())) for row in rows]
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in names):
            raise UsageError.unknown_name("law" if kind == "checks" else kind.removesuffix("s"), pattern, names)
    return [
        row
        for row, name in zip(rows, names, strict=True)
        if not patterns or any(matches_pattern(name, p) for p in patterns)
    ]


def model_rows() -> Rows:
    """List every model of the workload."""
    return [{"model": spec.name, "what": spec.summary} for spec in MODELS.values()]


def mutant_rows() -> Rows:
    """List every mutant."""
    return [
        {
            "mutant": mutant.name,
            "over": f"{mutant.over} {','.join(map(str, mutant.stages))}",
            "kind": mutant.kind.value,
            "what": mutant.description,
            "imitates": mutant.imitates,
        }
        for mutant in MUTANTS.values()
    ]


ROW_BUILDERS: dict[str, Callable[[], Rows]] = {
    "engines": engine_rows,
    "laws": law_rows,
    "checks": law_rows,  # the older name of laws
    "models": model_rows,
    "mutants": mutant_rows,
}


def render_rows(rows: Rows, as_json: bool) -> str:
    """Render rows as a table or as JSON."""
    if as_json:
        return json.dumps(rows, indent=2)
    # JSON keeps the keys "check" and "law" for the name and the statement of a law.
    renamed = {"check": "law", "law": "statement"} if rows and "check" in rows[0] else {}
    headers = {key: renamed.get(key, key) for key in (rows[0] if rows else {})}
    return tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=MAX_COLUMN_WIDTH, disable_numparse=True)
