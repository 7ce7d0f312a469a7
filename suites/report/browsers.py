"""A browser for the tests of the page, and whether there is one."""

from __future__ import annotations

import importlib.util
import os
import shutil

# The distributions' names of Chromium, and the one that GitHub's runners have.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run"),
    *("--disable-component-update", "--disable-sync"),
]


def browser() -> str | None:
    """Where Chromium is; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str:
    """Why the page cannot be opened here, with the remedy; the empty string where it can."""
    if importlib.util.find_spec("playwright") is None:
        return 'playwright is not installed; install it with: pip install "zharness[test]"'
    if browser() is None:
        return f"no browser is installed (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
    return ""


def must_be_there() -> bool:
    """Whether the absence of a browser is a failure: in CI, where nobody reads of a skip."""
    return os.environ.get("CI", "").lower() == "true"
