"""The faults of the matrix as data: the test that goes wrong on one rank, and all that has to be told of it.

A source is the text of a module. Before it stand its imports, ``CULPRIT`` (the rank that goes wrong), ``WORLD`` (the
world size) and ``note(text)``, which appends a line to a file that the judge reads. A line marked ``# site`` has to be
named in the report, by file and line.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

SETUP = ("failed", None, "passed")
CALL = ("passed", "failed", "passed")
TEARDOWN = ("passed", "passed", "failed")

SOON = 2.0  # seconds for a raise, a crash and a mismatched collective
TIMEOUT = 2.0  # seconds that a test which hangs is given
HUNG = TIMEOUT + 3.0
LATER = 5.0  # seconds for what the bars do not name
ANY_TIME = 60.0


@dataclass(frozen=True)
class Fault:
    """One way to go wrong.

    ``outcome`` is that of setup, call and teardown (None: no report; any: whichever). The failure begins with the ranks
    that are ``blamed``; ``headline`` (a pattern) is found in its first words, ``words`` anywhere in the report, and in
    both CULPRIT stands for the rank. ``stacks`` are the ranks whose stack is shown. ``bar`` is in seconds.
    """

    name: str
    source: str
    headline: str
    outcome: tuple[str, str | None, str] = CALL
    blamed: Literal["culprit", "all", "others", "either"] = "culprit"
    words: tuple[str, ...] = ()
    stacks: Literal["all", "others", "none"] = "none"
    bar: float = SOON


def fault(
    name: str,
    source: str,
    headline: str,
    outcome: tuple[str, str | None, str] = CALL,
    blamed: Literal["culprit", "all", "others", "either"] = "culprit",
    words: tuple[str, ...] = (),
    stacks: Literal["all", "others", "none"] = "none",
    bar: float = SOON,
) -> Fault:
    """A fault whose source is written indented."""
    return Fault(name, textwrap.dedent(source).strip("\n"), headline, outcome, blamed, words, stacks, bar)


def on_culprit(name: str, statement: str, headline: str, words: tuple[str, ...] = (), **more: float) -> Fault:
    """``statement`` on one rank, while its peers wait in a barrier."""
    source = f"""
        def test_{name}(rank):
            if rank == CULPRIT:
                {statement}  # site
            dist.barrier()
    """
    return fault(name, source, headline, words=words, **more)  # type: ignore[arg-type]


def in_fixture(name: str, scope: str, phase: str, statement: str, headline: str, **more: object) -> Fault:
    """``statement`` on one rank in a fixture, while its peers wait in a barrier of the fixture."""
    body = f"""
            if rank == CULPRIT:
                {statement}
            dist.barrier()
    """.strip("\n")
    before, after = (body, "") if phase == "setup" else ("", body)
    source = f"""
        @pytest.fixture(scope="{scope}")
        def broken(rank):
{before}
            yield
{after}

        def test_{name}(broken):
            dist.barrier()
    """
    return fault(name, source, headline, SETUP if phase == "setup" else TEARDOWN, **more)  # type: ignore[arg-type]
