"""Cells as pytest items: planned at collection, run on servers that were forked right after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from zharness import engines
from zharness.cell import parse_integers
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.run.expected_failures import ExpectedFailure, read_expected_failures
from zharness.run.plan import ClaimsLookup, PlannedCell, Request, first_buildable_claims, plan, validate_request
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner, probe_engine
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.world import Isolation, RankServer
from zharness.world.server import RankEnvironment

EnvironmentLookup = Callable[[str], RankEnvironment]

RUNNER_KEY = pytest.StashKey[Runner]()


@cache
def make_claims_lookup(get_environment: EnvironmentLookup) -> ClaimsLookup:
    """What an engine claims; one known by its factory alone is built once, in a rank of its own, to tell."""

    @cache
    def claims(engine: str, stage: int) -> Capabilities:
        known = engines.capabilities(engine, stage)
        if known is not None:
            return known
        with RankServer(get_environment(engine)) as server:
            return probe_engine(server, engine, stage)

    return claims


def plan_marked_cells(
    markers: Iterable[pytest.Mark], config: pytest.Config, get_environment: EnvironmentLookup
) -> list[PlannedCell]:
    """The cells of all ``cells`` markers of one test, as ``--engine`` and ``--stage`` narrow or replace them.

    ``place(engine)`` is what the rank server of an engine needs. Raises UsageError for an engine, a release or a stage
    that is not there.
    """
    requests = [build_request(*marker.args, **marker.kwargs) for marker in markers]
    asked = tuple(config.getoption("--engine"))
    stages = parse_stages(config.getoption("--stage"))
    variant = config.getoption("--variant")
    own, claims = user_expected_failures(config), make_claims_lookup(get_environment)
    validate_request(Request(engines=asked or ("reference",), stages=stages))
    found: list[PlannedCell] = []
    for request in narrow_to_engines(requests, asked) if asked else requests:
        (engine,) = request.engines
        get_environment(engine)
        marked = request.stages or stages
        wanted = tuple(stage for stage in marked if stage in (stages or marked))
        if not marked or (
            wanted and (asked or first_buildable_claims(engine, wanted, claims).stages.intersection(wanted))
        ):
            chosen = replace(request, stages=wanted, engine_variant=variant or request.engine_variant)
            found.extend(plan(chosen, claims))
    cells = list({cell.cell: cell for cell in found}.values())
    complaints = describe_unmatched_failures(cells, claims, own)
    if complaints:
        raise UsageError("\n".join(complaints))
    return cells


@cache
def _read_expected_failures(paths: tuple[str, ...]) -> tuple[ExpectedFailure, ...]:
    return read_expected_failures(map(Path, paths))


def user_expected_failures(config: pytest.Config) -> tuple[ExpectedFailure, ...]:
    """The excuses of ``--excuses``. Raises UsageError for a file that cannot be used."""
    return _read_expected_failures(tuple(config.getoption("--excuses")))


def parse_stages(text: str) -> tuple[int, ...]:
    """The stages of ``--stage``, none where it was not given. Raises UsageError for anything but numbers."""
    try:
        return parse_integers(text) if text else ()
    except UsageError as error:
        raise UsageError(f"--stage: {error}") from None


def build_request(
    engine: str,
    world_sizes: tuple[int, ...] = (2,),
    dtypes: tuple[str, ...] = ("fp32",),
    checks: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    stages: tuple[int, ...] = (),
    variant: str = "",
) -> Request:
    """What one marker asks for; ``checks`` are patterns, all checks when there is none."""
    return Request(checks, (engine,), stages, world_sizes, dtypes, models, variant)


def narrow_to_engines(requests: list[Request], engine_names: tuple[str, ...]) -> list[Request]:
    """The requests for the engines asked for; an engine that no marker names gets the default one."""
    marked = [request for request in requests if request.engines[0] in engine_names]
    return marked + [build_request(engine) for engine in engine_names if not any(engine in r.engines for r in marked)]


def start_servers(session: pytest.Session, get_environment: EnvironmentLookup) -> None:
    """Fork one server for each engine that the collected cells need; none where nothing is to be run here."""
    if session.config.option.collectonly or is_xdist_controller(session.config):
        return
    cells = [cell for cell in map(get_planned_cell, session.items) if cell is not None]
    names = sorted({planned.cell.engine for planned in cells if not planned.unsupported_reason})
    if names:
        timeout = session.config.getoption("--cell-timeout")
        isolation = Isolation(session.config.getoption("--isolation"))
        places = {name: get_environment(name) for name in names}
        own = user_expected_failures(session.config)
        session.config.stash[RUNNER_KEY] = Runner(
            places, timeout=timeout, isolation=isolation, user_expected_failures=own
        )


def get_planned_cell(item: pytest.Item) -> PlannedCell | None:
    """The cell that an item was parametrized with, if it was; an empty parameter set holds none."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("cell") if callspec is not None else None
    return found if isinstance(found, PlannedCell) else None


def is_xdist_controller(config: pytest.Config) -> bool:
    """Whether the tests run in other processes."""
    return getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")


def stop_servers(config: pytest.Config) -> None:
    """End the servers, if any were started."""
    runner = config.stash.get(RUNNER_KEY, None)
    if runner is not None:
        runner.close()


def run_cell(planned: PlannedCell, config: pytest.Config) -> Record:
    """The record of one cell. Unsupported is a skip, decided before acting; an excused failure an expected one."""
    if planned.unsupported_reason:
        pytest.skip(planned.unsupported_reason)
    record = config.stash[RUNNER_KEY].run(planned)
    if record.verdict.is_broken and record.is_expected:
        pytest.xfail(f"{record.expected_failure}: {' '.join(record.cause.split())[:200]}")
    return record


def describe_problem(record: Record) -> str:
    """Why a record fails its test, with the command that shows it again; the empty string when it does not."""
    if record.is_expected and record.verdict is not Verdict.ERROR:
        return ""
    what = record.stale_reason or record.cause
    return "\n".join(part for part in (what, f"again: {record.command}", record.details) if part)
