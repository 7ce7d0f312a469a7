"""Pytest plugin that selects tests, and writes each outcome to a file.

The outcomes reach the file one by one, so those of a session that is killed are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from _pytest.skipping import evaluate_skip_marks

CONTROLLER = os.getpid()  # ranks are other processes
# The classes of DeepSpeed and of PyTorch that start ranks; the drop-ins have the same names.
RANK_CLASSES = {"DistributedTest", "MultiProcessTestCase", "MultiProcContinuousTest"}
# What PyTorch's classes report of a rank: a traceback, of which the line of the exception says what happened.
RANK_ERROR = re.compile(
    r"(?:exited with error code \d+ and exception|Exception in worker process):\s.*?"
    r"^(\w[\w.]*(?:Error|Exception|Failure|SkipTest)\b.*?)$",
    re.MULTILINE | re.DOTALL,
)
WORLD_SIZE_ID = re.compile(r"(?<=\[)w\d+(?:-|(?=\]))|\[w\d+\]$")  # in the ids of the drop-in for DistributedTest


def find_test_name(nodeid: str) -> str:
    """Return the part of ``nodeid`` after the file, without the world size, so that it is the same in all ways."""
    return WORLD_SIZE_ID.sub("", nodeid.partition("::")[2])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the environment variables select.

    Of a sample, tests on ranks that no marker skips come first, then other tests on ranks, and the rest only in a file
    without any.
    """
    selection = json.loads(os.environ["BOTH_WAYS_SELECTION"])
    size, seed, kept = selection["size"], selection["seed"], set(selection["only"])
    on_ranks = [item for item in items if is_on_ranks(item)]
    Path(os.environ["BOTH_WAYS_ON_RANKS"]).write_text(json.dumps([find_test_name(item.nodeid) for item in on_ranks]))
    candidates = [item for item in on_ranks if not is_skipped(item)] or on_ranks or items
    names = sorted({find_test_name(item.nodeid) for item in candidates})
    if not kept and size and len({find_test_name(item.nodeid) for item in items}) > size:
        kept = set(draw_names(names, size, seed))
    if kept:
        config.hook.pytest_deselected(items=[item for item in items if find_test_name(item.nodeid) not in kept])
        items[:] = [item for item in items if find_test_name(item.nodeid) in kept]


def draw_names(names: list[str], size: int, seed: int | None) -> list[str]:
    """Return ``size`` of the sorted names, spread evenly, or in an order that the seed decides.

    The larger of two samples with one seed has the tests of the smaller, and a test keeps its place where others are
    added or removed.
    """
    if seed is None:
        return [names[index * len(names) // size] for index in range(size)]
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:size]


def is_on_ranks(item: pytest.Item) -> bool:
    """Return whether the class of the test starts ranks; PyTorch's LocalDTensorTestBase simulates them."""
    cls = getattr(item, "cls", None) or object
    names = {base.__name__ for base in cls.__mro__}
    return bool(names & RANK_CLASSES) and "LocalDTensorTestBase" not in names


def is_skipped(item: pytest.Item) -> bool:
    """Return whether a marker of pytest or a decorator of unittest skips the test before it starts."""
    owners = (getattr(item, "obj", None), getattr(item, "cls", None))
    return evaluate_skip_marks(item) is not None or any(getattr(owner, "__unittest_skip__", False) for owner in owners)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file could not be collected, or that it skips itself as a whole, with the reason."""
    if not report.passed and report.nodeid:
        message = describe_problem(report).rpartition("\nE ")[2]
        write_record("(collection)", report.outcome, message)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the verdict of one phase of one test, if it is the call or did not pass."""
    if os.getpid() == CONTROLLER and (report.when == "call" or not report.passed):
        write_record(find_test_name(report.nodeid), report.outcome, describe_problem(report))


def write_record(name: str, verdict: str, message: str) -> None:
    """Append one outcome to the file of outcomes."""
    with Path(os.environ["BOTH_WAYS_OUTCOMES"]).open("a") as file:
        file.write(json.dumps([name, verdict, message[:400]]) + "\n")


def describe_problem(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip or the message of a failure."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash else report.longrepr).strip()
    in_rank = RANK_ERROR.search(message)
    return in_rank[1] if in_rank else message
