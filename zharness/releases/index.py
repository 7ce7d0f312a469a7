"""Query the package index for the releases of a package."""

from __future__ import annotations

import re
import sys
from functools import cache

from packaging.version import InvalidVersion, Version

from zharness.errors import UsageError
from zharness.releases import overlay

_AVAILABLE_VERSIONS = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_SECONDS = 120.0


@cache
def list_releases(distribution: str) -> tuple[str, ...]:
    """Return all releases of ``distribution`` on the package index, without pre-releases, the oldest first.

    Raises UsageError if the index cannot be read.
    """
    overlay.check_name(distribution)
    command = [sys.executable, "-m", "pip", "index", "versions", distribution, "--disable-pip-version-check"]
    subject = f"the index's list of releases of {distribution}"
    match = _AVAILABLE_VERSIONS.search(overlay.run_isolated([*command, "--no-input"], None, _SECONDS, subject).stdout)
    if match is None:
        raise UsageError(
            f"{subject} cannot be read: no such package, or no network; "
            f"name the releases, or try: python -m pip index versions {distribution}"
        )
    return sort_releases(match[1].split(", "))


def get_newest_release(distribution: str) -> str:
    """Return the newest release of ``distribution``. Raises UsageError if the package index cannot be read."""
    return list_releases(distribution)[-1]


def sort_releases(texts: list[str]) -> tuple[str, ...]:
    """Return the releases ``texts``, the oldest first. Raises UsageError for a text that is not a version."""
    try:
        return tuple(sorted(texts, key=Version))
    except InvalidVersion as error:
        raise UsageError(f"{error}; expected releases such as 0.18.8") from None
