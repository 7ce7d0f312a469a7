"""The pytest.ini of pytest sessions that tests start: isolated from this repository, without unused plugins."""

from __future__ import annotations


def settings(*sources: str, addopts: str = "") -> str:
    """Return the text of a ``pytest.ini`` for test files with these sources.

    Disables anyio's plugin, and Hypothesis' unless a source uses it: at the end of a session Hypothesis' plugin imports
    the whole library, which is a third of the time of a small session.
    """
    unused = ("anyio",) if any("hypothesis" in source for source in sources) else ("anyio", "hypothesispytest")
    return "[pytest]\naddopts = " + " ".join([*(f"-p no:{plugin}" for plugin in unused), addopts]).strip() + "\n"
