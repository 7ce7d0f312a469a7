"""Find and start a browser for the tests of pages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The names of Chromium in distributions, and of Chrome on GitHub's runners.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60_000  # milliseconds to wait for an element; other tests may keep every core busy
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


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    """Start Chromium, whose pages are waited for with PATIENCE, and close it at the end."""
    assert not missing(), missing()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as tool:
        launched = tool.chromium.launch(executable_path=browser(), args=ARGUMENTS)
        yield launched
        launched.close()
