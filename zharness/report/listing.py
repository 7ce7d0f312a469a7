"""What there is, as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from tabulate import tabulate

from zharness.checks import CHECKS
from zharness.engines import registered
from zharness.workload import MODELS

Rows = list[dict[str, str]]


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


LISTS: dict[str, Callable[[], Rows]] = {"engines": engines, "checks": checks, "models": models}


def listing(what: str, as_json: bool) -> str:
    """The list called ``what``, one of LISTS, as a table or as JSON."""
    rows = LISTS[what]()
    if as_json:
        return json.dumps(rows, indent=2)
    widths = [None, 70] if what == "checks" else None
    return tabulate(rows, headers="keys", tablefmt="simple", maxcolwidths=widths)
