"""Why a check is kept that is no mutant's only killer, in one line; the first pattern that matches holds."""

from __future__ import annotations

from fnmatch import fnmatchcase

KEPT: dict[str, str] = {
    "training.free_running": "it needs gradients and weights alone, of an engine that shows no optimizer state",
}


def reason_for(check: str) -> str:
    """The reason; the empty string where none is written."""
    return next((why for pattern, why in KEPT.items() if fnmatchcase(check, pattern)), "")
