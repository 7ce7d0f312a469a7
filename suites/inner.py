"""The settings of a session of pytest within the tests: no others', and no plugin that has no part in it."""

from __future__ import annotations


def settings(*sources: str, addopts: str = "") -> str:
    """A ``pytest.ini``. Without Hypothesis's plugin, where no source uses it: it imports all of it at a session's end,
    which is a third of the time of a small one. anyio's is used by none."""
    idle = ("anyio",) if any("hypothesis" in source for source in sources) else ("anyio", "hypothesispytest")
    return "[pytest]\naddopts = " + " ".join([*(f"-p no:{plugin}" for plugin in idle), addopts]).strip() + "\n"
