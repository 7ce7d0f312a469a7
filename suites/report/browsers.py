"""Find a browser for the tests of the page."""

from __future__ import annotations

import importlib.util
import os
import shutil

# The names of Chromium in distributions, and of Chrome on GitHub's runners.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run"),
    *("--disable-component-update", "--disable-sync"),
]


def browser() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str:
    """Return why the page cannot be opened in a browser, with a remedy; the empty string if it can."""
    if importlib.util.find_spec("playwright") is None:
        return 'playwright is not installed; install it with: pip install "zharness[test]"'
    if browser() is None:
        return f"no browser is installed (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
    return ""


def must_be_there() -> bool:
    """Return whether a missing browser fails the tests instead of skipping them: in CI, where skips go unread."""
    return os.environ.get("CI", "").lower() == "true"
