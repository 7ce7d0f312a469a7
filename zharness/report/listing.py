"""What there is, as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from tabulate import tabulate

from zharness.checks import CHECKS
from zharness.engines import registered
from zharness.mutants import MUTANTS
from zharness.workload import MODELS

Rows = list[dict[str, str]]
WIDEST = 60  # characters of a column, so that a law does not push the rest out of sight


def engines() -> Rows:
    """Every registered engine, its version, and the command that installs a missing one."""
    return [
        {
            "engine": info.name,
            "version": info.version() or "not installed",
            "what": info.summary,
            "to install": "" if info.version() else info.install,
        }
        for info in registered().values()
    ]


def checks() -> Rows:
    """Every law."""
    return [
        {
            "check": check.name,
            "law": check.law,
            "tier": check.tier.value,
            "variants": ", ".join(name for name, _ in check.variants if name),
        }
        for check in CHECKS.values()
    ]


def models() -> Rows:
    """Every model of the workload."""
    return [{"model": spec.name, "what": spec.summary} for spec in MODELS.values()]


def mutants() -> Rows:
    """Every engine broken on purpose."""
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


LISTS: dict[str, Callable[[], Rows]] = {"engines": engines, "checks": checks, "models": models, "mutants": mutants}


def as_text(rows: Rows, as_json: bool) -> str:
    """Rows as a table or as JSON."""
    if as_json:
        return json.dumps(rows, indent=2)
    return tabulate(rows, headers="keys", tablefmt="simple", maxcolwidths=WIDEST, disable_numparse=True)
