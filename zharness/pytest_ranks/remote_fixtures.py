"""Fixtures that run elsewhere: on ranks of their own, before those of the test that asks for them.

[Note: a fixture on other ranks]
Ranks cannot start ranks, so nothing of this happens inside the test. Before the conductor sends a test out, it looks
for such fixtures among those the test asks for, and for each of them it has the same test set up on as many ranks as
the fixture wants: with the test's parameters and marks, without its body, and with no more fixtures than this one, what
it needs, and those that are used without being asked for. There the fixture's function runs; in the test's own ranks
it is an empty fixture. What the one group leaves for the other it writes into a directory that both can see.
"""

from __future__ import annotations

import copy
import inspect
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
from zharness.world.task import Group

RUNNING_FIXTURE = pytest.StashKey[
    str
]()  # on an item, in a rank that is there for one fixture: the name of that fixture


@dataclass(frozen=True)
class RemoteFixture:
    """A fixture and the ranks it runs on. ``timeout`` None is the test's own; ``name`` is the one tests ask for."""

    name: str
    world_size: int
    group: Group = Group.DEFAULT
    timeout: float | None = None

    def adapt_requirements(self, requirements: RankRequirements) -> RankRequirements:
        """Its ranks: new ones, forked by the server of the test."""
        timeout = requirements.timeout if self.timeout is None else self.timeout
        return replace(
            requirements, world_size=self.world_size, isolation=Isolation.FRESH, group=self.group, timeout=timeout
        )


_remote_fixtures: dict[Callable[..., Any], RemoteFixture] = {}  # by the function that pytest knows as the fixture's


def define_remote_fixture(function: Callable[..., object], remote: RemoteFixture) -> Any:
    """A pytest fixture that runs ``function`` elsewhere; its parameters are fixtures, and its value is None."""

    def stand_in(request: pytest.FixtureRequest, **fixture_values: Any) -> None:
        if not is_rank():
            raise UsageError(
                f"the fixture {remote.name} runs on {remote.world_size} ranks of its own, before those of a test in "
                "ranks; got a test in pytest's own process; mark it with @pytest.mark.world_size(N)"
            )
        running = request.node.stash.get(RUNNING_FIXTURE, "")
        if running == remote.name:
            function(**fixture_values)
        elif not running and remote.name not in request.node.fixturenames:
            raise UsageError(
                f"the fixture {remote.name} runs before its test, on {remote.world_size} ranks of its own, so a test "
                "asks for it as a parameter; got request.getfixturevalue"
            )

    wanted = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=inspect.Parameter.empty)
        for one in inspect.signature(function).parameters.values()
        if one.default is inspect.Parameter.empty and one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # pytest reads a fixture's needs from its signature; so what the function needs is set up first, and parametrized.
    stand_in.__signature__ = inspect.Signature([request, *(one for one in wanted if one.name != "request")])  # type: ignore[attr-defined]
    stand_in.__name__ = stand_in.__qualname__ = remote.name
    stand_in.__doc__ = function.__doc__
    _remote_fixtures[stand_in] = remote
    return pytest.fixture(name=remote.name)(stand_in)


def find_remote_fixtures(item: pytest.Item) -> list[RemoteFixture]:
    """The fixtures that a test asks for and that run elsewhere, each behind those it asks for itself."""
    if not _remote_fixtures:
        return []
    found: dict[str, RemoteFixture | None] = {}
    for name in getattr(item, "fixturenames", ()):
        _collect_remote_fixtures(item, name, found)
    return [where for where in found.values() if where is not None]


def _collect_remote_fixtures(item: pytest.Item, name: str, remotes: dict[str, RemoteFixture | None]) -> None:
    # There is no public way from a test to the definitions of its fixtures.
    info = getattr(item, "_fixtureinfo", None)
    known = info.name2fixturedefs.get(name, ()) if info is not None else ()
    if name in remotes or not known:
        return
    for needed in known[-1].argnames:
        if needed != name:
            _collect_remote_fixtures(item, needed, remotes)
    remotes[name] = _remote_fixtures.get(known[-1].func)


@contextmanager
def limit_to_fixture(item: pytest.Item, fixture_name: str) -> Iterator[None]:
    """In a rank that is there for the fixture ``name``: within it, no more of ``item`` is run than that needs."""
    item.stash[RUNNING_FIXTURE] = fixture_name
    if not fixture_name:
        yield
        return
    info: Any = item._fixtureinfo  # type: ignore[attr-defined]
    wanted = {fixture_name, *info.initialnames} - ({*info.argnames} - {fixture_name})
    fixtures: list[str] = item.fixturenames  # type: ignore[attr-defined]
    all_of_them, option = list(fixtures), item.config.option
    before, option.setuponly = option.setuponly, True
    fixtures[:] = [one for one in fixtures if one in wanted]
    try:
        yield
    finally:
        fixtures[:] = all_of_them
        option.setuponly = before


def make_skipped_call_report(item: pytest.Item, setup: pytest.TestReport) -> pytest.TestReport | None:
    """The report of the body that such a rank leaves out, so that nobody misses it; None where none was left out."""
    if not item.stash.get(RUNNING_FIXTURE, "") or not setup.passed:
        return None
    now = time.time()
    return pytest.TestReport(
        item.nodeid, item.location, keywords={}, outcome="passed", longrepr=None, when="call", start=now, stop=now
    )


def make_remote_setup_reports(
    item: pytest.Item, remote: RemoteFixture, outcome: GroupOutcome
) -> list[pytest.TestReport]:
    """The report of the test's setup as far as it got, and behind one that did not pass that of its teardown."""
    reports = merge_reports(item, outcome)
    first = next((report for report in reports if not report.passed), None)
    setup = copy.copy(first or reports[0])
    setup.when = "setup"
    setup.duration = outcome.seconds
    if first is None:
        return [setup]
    setup.sections = [("Fixture", describe_remote_setup(remote, first)), *first.sections]
    teardown = copy.copy(reports[0])
    teardown.when, teardown.outcome, teardown.longrepr = "teardown", "passed", None
    teardown.sections, teardown.duration = [], 0.0
    vars(teardown).pop("wasxfail", None)
    return [setup, teardown]


def describe_remote_setup(remote: RemoteFixture, report: pytest.TestReport) -> str:
    """The sentence that tells this setup from one of the test's own ranks."""
    many = "1 rank" if remote.world_size == 1 else f"{remote.world_size} ranks"
    return f"{remote.name} {report.outcome} on {many} of its own, in {report.when}; the test was not run"


def add_remote_setup(remote_reports: Sequence[pytest.TestReport], reports: Sequence[pytest.TestReport]) -> None:
    """Make what fixtures elsewhere took and printed part of the setup that ``reports`` tell of."""
    for report in reports:
        report.sections[:0] = [section for before in remote_reports for section in before.sections]
        if report.when == "setup":
            spent = sum(before.duration for before in remote_reports)
            report.duration += spent
            report.start -= spent
