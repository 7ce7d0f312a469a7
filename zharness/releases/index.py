"""The releases that the package index has."""

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
    """Every release of ``distribution`` but pre-releases, the oldest first. Raises UsageError when none can be had."""
    overlay.check_name(distribution)
    command = [sys.executable, "-m", "pip", "index", "versions", distribution, "--disable-pip-version-check"]
    subject = f"the index's list of releases of {distribution}"
    told = _AVAILABLE_VERSIONS.search(overlay.run_isolated([*command, "--no-input"], None, _SECONDS, subject).stdout)
    if told is None:
        raise UsageError(
            f"{subject} cannot be had: no such package, or no network; "
            f"name the releases, or once it is there, try: python -m pip index versions {distribution}"
        )
    return sort_releases(told[1].split(", "))


def get_newest_release(distribution: str) -> str:
    """The newest release. Raises UsageError when it cannot be told."""
    return list_releases(distribution)[-1]


def sort_releases(texts: list[str]) -> tuple[str, ...]:
    """Releases, the oldest first. Raises UsageError for what is none."""
    try:
        return tuple(sorted(texts, key=Version))
    except InvalidVersion as error:
        raise UsageError(f"{error}; expected releases such as 0.18.8") from None
