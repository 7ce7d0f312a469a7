"""Runs a pytest file in a process of its own, and tells what became of each of its tests."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from suites import inner
from suites.world.faults.sessions import pytest

HEAD = """
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zharness.compat.deepspeed import DistributedFixture, DistributedTest
"""
# A package that sys.modules has as None is not found by anybody.
WITHOUT_DEEPSPEED = 'import sys\n\nsys.modules["deepspeed"] = None\n'


@dataclass(frozen=True)
class CaseResult:
    """One test's verdict (passed, failed, error, skipped), and what the report says."""

    verdict: str
    text: str


@dataclass(frozen=True)
class SessionRun:
    """A finished run: its tests by ``Class::name[id]``, its exit status and its output."""

    tests: dict[str, CaseResult]
    status: int
    output: str

    def verdicts(self, start: str) -> dict[str, str]:
        """The verdicts of the tests whose names start so, without that start."""
        return {
            name.removeprefix(start): result.verdict for name, result in self.tests.items() if name.startswith(start)
        }

    def text(self, name: str) -> str:
        """What the report of one test says."""
        return self.tests[name].text


def run(folder: Path, source: str, *options: str, conftest: str = WITHOUT_DEEPSPEED, **variables: str) -> SessionRun:
    """Write the test file and run it; ``variables`` go into the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_session.py").write_text(HEAD + textwrap.dedent(source))
    (folder / "pytest.ini").write_text(inner.settings(source, addopts="-p no:cacheprovider --strict-markers"))
    xml = folder / "session.xml"
    with pytest(folder, ["-q", f"--junitxml={xml}", f"--basetemp={folder / 'temp'}", *options], variables) as program:
        status = program.wait()
    return SessionRun(dict(read_junit_xml(xml)), status, (folder / "output.txt").read_text())


def read_junit_xml(xml: Path) -> list[tuple[str, CaseResult]]:
    """Every test of a JUnit file; an empty list where there is no file."""
    if not xml.exists():
        return []
    found = []
    for case in ElementTree.parse(xml).iter("testcase"):  # noqa: S314 - written by pytest, a moment ago
        name = "::".join([*case.get("classname", "").split(".")[1:], case.get("name", "")])
        result = [child for child in case if child.tag in ("failure", "error", "skipped")]
        verdict = {"failure": "failed"}.get(result[0].tag, result[0].tag) if result else "passed"
        found.append(
            (name, CaseResult(verdict, "\n".join(f"{child.get('message')}\n{child.text}" for child in result)))
        )
    return found
