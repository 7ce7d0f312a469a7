"""Define remote fixtures, which run on ranks of their own before the ranks of the test that requests them start.

[Note: a fixture on other ranks]
Ranks cannot start ranks, so a remote fixture does not run inside its test. Before the controller sends a test to its
ranks, it finds the remote fixtures that the test requests. For each remote fixture, the controller sets up the same
test, with its parameters and marks, on as many ranks as the fixture needs. There, only the remote fixture, the fixtures
that it needs and autouse fixtures are set up, and the test's body is not run. On the test's own ranks the remote
fixture does nothing. To pass data to the test, the remote fixture writes files into a directory that both groups of
ranks share.

A fixture of a test, of any scope, may also call the class of a remote fixture. The controller cannot see a call before
it happens, so the remote fixture is set up if the function of that fixture uses the class by its global name. A call
that comes after the setup of a test's fixtures would find that the remote fixture ran before the test, not at the call.
"""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from zharness.errors import UsageError
from zharness.pytest_ranks.merge_reports import merge_reports
from zharness.pytest_ranks.rank_requirements import RankRequirements
from zharness.world import GroupOutcome, Isolation, is_rank
from zharness.world.task import GroupMode

# On an item: the name of the remote fixture that this rank sets up; empty on the ranks of the test itself.
RUNNING_FIXTURE = pytest.StashKey[str]()


@dataclass(frozen=True)
class RemoteFixture:
    """The name of a remote fixture and the ranks on which it runs.

    If ``timeout`` is None, the test's timeout applies.
    """

    name: str
    world_size: int
    group: GroupMode = GroupMode.DEFAULT
    timeout: float | None = None

    def adapt_requirements(self, requirements: RankRequirements) -> RankRequirements:
        """Return the requirements of the fixture: those of the test, but with new ranks from the same rank server."""
        timeout = requirements.timeout if self.timeout is None else self.timeout
        return replace(
            requirements, world_size=self.world_size, isolation=Isolation.FRESH, group=self.group, timeout=timeout
        )


_remote_fixtures: dict[Callable[..., Any], RemoteFixture] = {}  # by the function that is registered with pytest
_remote_classes: dict[type, RemoteFixture] = {}


def define_remote_fixture(function: Callable[..., object], remote: RemoteFixture, owner: type) -> Any:
    """Return a pytest fixture with the value None that calls ``function`` on ranks of its own.

    The parameters of ``function`` have the names of fixtures, whose values are passed to ``function``. Instead of
    requesting the fixture, a fixture of the test may call the class ``owner``.
    """

    def fixture_function(request: pytest.FixtureRequest, **fixture_values: Any) -> None:
        # Its docstring is set below, to that of ``function``. On the ranks of the test it only checks the request.
        _require_rank(remote)
        running = request.node.stash.get(RUNNING_FIXTURE, "")
        if running == remote.name:
            function(**fixture_values)
        elif not running and remote not in find_remote_fixtures(request.node):
            raise UsageError(
                f"the fixture {remote.name} runs before its test, on {remote.world_size} ranks of its own, so a test "
                "must request it as a parameter; got request.getfixturevalue"
            )

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        and parameter.name != "request"
    ]
    request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # pytest reads the fixtures that a fixture needs from its signature, and sets them up first.
    fixture_function.__signature__ = inspect.Signature([request, *parameters])  # type: ignore[attr-defined]
    fixture_function.__name__ = fixture_function.__qualname__ = remote.name
    fixture_function.__doc__ = function.__doc__
    _remote_fixtures[fixture_function] = _remote_classes[owner] = remote
    return pytest.fixture(name=remote.name)(fixture_function)


def _require_rank(remote: RemoteFixture) -> None:
    """Raise UsageError unless this process is a rank."""
    if not is_rank():
        raise UsageError(
            f"the fixture {remote.name} runs on {remote.world_size} ranks of its own before a test on ranks, but "
            "this test runs in pytest's own process; mark the test with @pytest.mark.world_size(N)"
        )


def check_call(owner: type, request: pytest.FixtureRequest) -> None:
    """Raise UsageError unless a fixture calls the class ``owner`` in its setup, after its remote fixture has run."""
    item = request._pyfuncitem  # request.node is a class or module if the scope of the fixture is wider than a test
    remote, name = _remote_classes.get(owner), owner.__name__
    if remote is not None:
        _require_rank(remote)
    place, visited = os.environ.get("PYTEST_CURRENT_TEST", "no test"), set[str]()
    if place.endswith("(setup)"):
        place = f"the fixture {request.fixturename}"
        if item.stash.get(RUNNING_FIXTURE, "") == name:
            _collect_remote_fixtures(item, name, {}, visited)
        if request.fixturename in visited:
            place += f", which {name} needs"
        elif remote in find_remote_fixtures(item):
            return
        else:
            place += ", which was not found in advance"
    raise UsageError(
        f"got a call of the DistributedFixture {name} in {place}; {name} runs before the ranks of a test start, so "
        "only the setup of a fixture that the test requests as a parameter may call it, by its global name; give the "
        f"test a parameter named {name}, or that of such a fixture"
    )


def find_remote_fixtures(item: pytest.Item) -> list[RemoteFixture]:
    """Return the remote fixtures that a test requests or calls, each after the remote fixtures that it needs."""
    if not _remote_fixtures:
        return []
    remotes: dict[str, RemoteFixture | None] = {}
    visited: set[str] = set()
    for name in getattr(item, "fixturenames", ()):
        _collect_remote_fixtures(item, name, remotes, visited)
    return list(dict.fromkeys(remote for remote in remotes.values() if remote is not None))


def _collect_remote_fixtures(
    item: pytest.Item, name: str, remotes: dict[str, RemoteFixture | None], visited: set[str]
) -> None:
    """Add the fixtures that ``name`` needs or calls to ``remotes``, then ``name``; a non-remote fixture has None."""
    definition = None if name in visited else _find_definition(item, name)
    visited.add(name)
    if definition is None:
        return
    for needed in definition.argnames:
        _collect_remote_fixtures(item, needed, remotes, visited)
    for called in _find_called_fixtures(definition.func):
        _collect_remote_fixtures(item, called.name, remotes, visited)
        remotes.setdefault(called.name, called)
    remotes[name] = _remote_fixtures.get(definition.func)


def _find_definition(item: pytest.Item, name: str) -> pytest.FixtureDef[Any] | None:
    """Return the definition of the fixture ``name`` for the test, or None if there is none."""
    # There is no public way from a test to the definitions of its fixtures. The test's own list lacks fixtures that are
    # only called.
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return None
    manager = item.session._fixturemanager
    definitions = info.name2fixturedefs.get(name) or manager.getfixturedefs(name, item)
    return definitions[-1] if definitions else None


def _find_called_fixtures(function: Callable[..., Any]) -> Iterator[RemoteFixture]:
    """Yield the remote fixtures whose classes the function uses by their global names."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    for name in code.co_names if code is not None else ():
        value = function.__globals__.get(name)
        if isinstance(value, type) and value in _remote_classes:
            yield _remote_classes[value]


@contextmanager
def limit_to_fixture(item: pytest.Item, fixture_name: str) -> Iterator[None]:
    """Within the block, set up only the remote fixture ``fixture_name`` of ``item`` and the fixtures that it needs.

    If ``fixture_name`` is empty, the block changes nothing.
    """
    item.stash[RUNNING_FIXTURE] = fixture_name
    if not fixture_name:
        yield
        return
    info: Any = item._fixtureinfo  # type: ignore[attr-defined]
    needed = {fixture_name, *info.initialnames} - ({*info.argnames} - {fixture_name})
    names: list[str] = item.fixturenames  # type: ignore[attr-defined]
    original_names, option = list(names), item.config.option
    original_setuponly, option.setuponly = option.setuponly, True
    names[:] = [*(name for name in names if name in needed and name != fixture_name), fixture_name]
    try:
        yield
    finally:
        names[:] = original_names
        option.setuponly = original_setuponly


def make_skipped_call_report(item: pytest.Item, setup: pytest.TestReport) -> pytest.TestReport | None:
    """Return a passed call report for a rank that sets up a remote fixture and so does not run the test's body.

    Returns None for other ranks and after a failed setup. Without this report, the rank would fail because the report
    of its call is missing.
    """
    if not item.stash.get(RUNNING_FIXTURE, "") or not setup.passed:
        return None
    now = time.time()
    return pytest.TestReport(
        item.nodeid, item.location, keywords={}, outcome="passed", longrepr=None, when="call", start=now, stop=now
    )


def make_remote_setup_reports(
    item: pytest.Item, remote: RemoteFixture, outcome: GroupOutcome
) -> list[pytest.TestReport]:
    """Return the report of a test's setup for one remote fixture.

    If the fixture failed, also return a passed teardown report.
    """
    reports = merge_reports(item, outcome)
    failed = next((report for report in reports if not report.passed), None)
    setup = copy.copy(failed or reports[0])
    setup.when = "setup"
    setup.duration = outcome.seconds
    if failed is None:
        return [setup]
    setup.sections = [("Fixture", describe_remote_setup(remote, failed)), *failed.sections]
    teardown = copy.copy(reports[0])
    teardown.when, teardown.outcome, teardown.longrepr = "teardown", "passed", None
    teardown.sections, teardown.duration = [], 0.0
    vars(teardown).pop("wasxfail", None)
    return [setup, teardown]


def describe_remote_setup(remote: RemoteFixture, report: pytest.TestReport) -> str:
    """Describe the outcome of a remote fixture that did not pass."""
    ranks = "1 rank" if remote.world_size == 1 else f"{remote.world_size} ranks"
    return f"{remote.name} {report.outcome} on {ranks} of its own, in {report.when}; the test was not run"


def add_remote_setup(remote_reports: Sequence[pytest.TestReport], reports: Sequence[pytest.TestReport]) -> None:
    """Add the output of remote fixtures to all ``reports`` of a test, and their duration to the test's setup."""
    for report in reports:
        report.sections[:0] = [section for remote_report in remote_reports for section in remote_report.sections]
        if report.when == "setup":
            seconds = sum(remote_report.duration for remote_report in remote_reports)
            report.duration += seconds
            report.start -= seconds
