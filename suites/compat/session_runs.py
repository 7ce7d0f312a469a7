"""Run a pytest file in a process of its own and read the result of each test from its JUnit report."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from suites import inner
from suites.world.faults.sessions import start_pytest

HEAD = """
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zharness.compat.deepspeed import DistributedFixture, DistributedTest
"""
# With None in sys.modules, importing the package raises ModuleNotFoundError.
WITHOUT_DEEPSPEED = 'import sys\n\nsys.modules["deepspeed"] = None\n'


@dataclass(frozen=True)
class CaseResult:
    """The verdict of one test (passed, failed, error, skipped) and the text of its report."""

    verdict: str
    text: str


@dataclass(frozen=True)
class SessionRun:
    """A finished session: results by ``Class::name[id]``, exit status and output."""

    tests: dict[str, CaseResult]
    status: int
    output: str

    def verdicts(self, prefix: str) -> dict[str, str]:
        """Return the verdicts of the tests whose names start with ``prefix``, by the rest of the name."""
        return {
            name.removeprefix(prefix): result.verdict for name, result in self.tests.items() if name.startswith(prefix)
        }

    def text(self, name: str) -> str:
        """Return the text of one test's report."""
        return self.tests[name].text


def run(
    folder: Path, source: str, *options: str, conftest: str = WITHOUT_DEEPSPEED, head: str = HEAD, **variables: str
) -> SessionRun:
    """Write the test file, which begins with ``head``, and run it with these environment ``variables``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_session.py").write_text(head + textwrap.dedent(source))
    (folder / "pytest.ini").write_text(inner.settings(source, addopts="-p no:cacheprovider --strict-markers"))
    xml = folder / "session.xml"
    with start_pytest(
        folder, ["-q", f"--junitxml={xml}", f"--basetemp={folder / 'temp'}", *options], variables
    ) as program:
        status = program.wait()
    return SessionRun(dict(read_junit_xml(xml)), status, (folder / "output.txt").read_text())


def read_junit_xml(xml: Path) -> list[tuple[str, CaseResult]]:
    """Return the name and result of every test in a JUnit file; an empty list if the file does not exist."""
    if not xml.exists():
        return []
    results = []
    for element in ElementTree.parse(xml).iter("testcase"):  # noqa: S314 - written by our own pytest session
        name = "::".join([*element.get("classname", "").split(".")[1:], element.get("name", "")])
        problems = [child for child in element if child.tag in ("failure", "error", "skipped")]
        verdict = {"failure": "failed"}.get(problems[0].tag, problems[0].tag) if problems else "passed"
        text = "\n".join(f"{child.get('message')}\n{child.text}" for child in problems)
        results.append((name, CaseResult(verdict, text)))
    return results
