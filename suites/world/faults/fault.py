"""The faults of the matrix as data: a test that goes wrong on one rank, and what its report has to say.

A source is the text of a test module. The judge puts before it the imports, ``CULPRIT`` (the rank that goes wrong),
``WORLD`` (the world size) and ``note(text)``, which appends a line to a file that the judge reads. The report has to
name every line marked ``# site``, by file and line.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

SETUP = ("failed", None, "passed")
CALL = ("passed", "failed", "passed")
TEARDOWN = ("passed", "passed", "failed")

SOON = 2.0  # seconds for a raise, a crash and a mismatched collective
TIMEOUT = 2.0  # time-out in seconds of a test that hangs
HUNG = TIMEOUT + 3.0
LATER = 5.0  # seconds for other faults
ANY_TIME = 60.0


@dataclass(frozen=True)
class Fault:
    """One way in which a test goes wrong.

    ``outcome`` is that of setup, call and teardown (None: no report; ``any``: not compared). The failure's message
    begins with the ranks that are ``blamed``. The pattern ``headline`` has to match that message, the patterns
    ``patterns`` the whole report; CULPRIT in them stands for the rank. ``stacks`` are the ranks whose stack is shown.
    ``bar`` is the time limit in seconds for the report.
    """

    name: str
    source: str
    headline: str
    outcome: tuple[str, str | None, str] = CALL
    blamed: Literal["culprit", "all", "others", "either"] = "culprit"
    patterns: tuple[str, ...] = ()
    stacks: Literal["all", "others", "none"] = "none"
    bar: float = SOON


def fault(
    name: str,
    source: str,
    headline: str,
    outcome: tuple[str, str | None, str] = CALL,
    blamed: Literal["culprit", "all", "others", "either"] = "culprit",
    patterns: tuple[str, ...] = (),
    stacks: Literal["all", "others", "none"] = "none",
    bar: float = SOON,
) -> Fault:
    """Return a fault; ``source`` may be indented."""
    return Fault(name, textwrap.dedent(source).strip("\n"), headline, outcome, blamed, patterns, stacks, bar)


def on_culprit(name: str, statement: str, headline: str, patterns: tuple[str, ...] = (), **more: float) -> Fault:
    """Return the fault in which one rank runs ``statement`` while its peers wait in a barrier."""
    source = f"""
        def test_{name}(rank):
            if rank == CULPRIT:
                {statement}  # site
            dist.barrier()
    """
    return fault(name, source, headline, patterns=patterns, **more)  # type: ignore[arg-type]


def in_fixture(name: str, scope: str, phase: str, statement: str, headline: str, **more: object) -> Fault:
    """Return the fault in which one rank runs ``statement`` in a fixture while its peers wait in a barrier there."""
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
