"""Run cells as pytest items: plan cells at collection, and run them on servers that are forked right afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from zharness.cell import parse_integers
from zharness.engines import Capabilities
from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError
from zharness.mesh import Mesh
from zharness.pytest_ranks.options import get_option
from zharness.run.cell_planner import PlannedCell
from zharness.run.claims import get_claims
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.plan import (
    ClaimsLookup,
    Request,
    choose_patterns,
    first_buildable_claims,
    plan,
    validate_request,
)
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.run.user_failures import read_expected_failures
from zharness.world import Isolation, RankServer

RUNNER_KEY = pytest.StashKey[Runner]()


@cache
def make_claims_lookup(get_environment: GetEnvironment) -> ClaimsLookup:
    """Return a cached lookup of claims, which starts a rank server if an engine must be built to know its claims."""

    @cache
    def claims(engine: str, stage: int) -> Capabilities:
        """Return the capabilities that ``engine`` claims at ``stage``."""
        return get_claims(engine, stage, lambda: RankServer(get_environment(engine)))

    return claims


def plan_marked_cells(
    markers: Iterable[pytest.Mark], config: pytest.Config, get_environment: GetEnvironment
) -> list[PlannedCell]:
    """Plan the cells of all ``cells`` markers of one test, restricted by the options ``--engine`` and ``--stage``.

    An engine of ``--engine`` that no marker names is planned with the marker's defaults. ``get_environment(engine)``
    returns the environment of an engine's rank server. Raises UsageError for an engine, release or stage that does not
    exist.
    """
    requests = [build_request(*marker.args, **marker.kwargs) for marker in markers]
    engine_names = tuple(get_option(config, "engine"))
    stages = parse_stages(get_option(config, "stage"))
    variant = get_option(config, "variant")
    expected_failures, claims = user_expected_failures(config), make_claims_lookup(get_environment)
    validate_request(Request(engines=engine_names or ("reference",), stages=stages))
    planned: list[PlannedCell] = []
    for request in narrow_to_engines(requests, engine_names) if engine_names else requests:
        (engine,) = request.engines
        get_environment(engine)  # raises UsageError for a release that cannot be installed
        marked_stages = request.stages or stages
        selected = tuple(stage for stage in marked_stages if stage in (stages or marked_stages))
        # A stage that the engine does not have is an error, unless only --stage asks for this stage.
        is_named = bool(engine_names or not stages)
        if not marked_stages or (
            selected and (is_named or first_buildable_claims(engine, selected, claims).stages.intersection(selected))
        ):
            narrowed = replace(request, stages=selected, engine_variant=variant or request.engine_variant)
            planned.extend(plan(narrowed, claims))
    cells = list({cell.cell: cell for cell in planned}.values())
    unmatched = describe_unmatched_failures(cells, claims, expected_failures)
    if unmatched:
        raise UsageError("\n".join(unmatched))
    return cells


@cache
def _read_expected_failures(paths: tuple[str, ...]) -> tuple[ExpectedFailure, ...]:
    """Read the files of expected failures, once per process."""
    return read_expected_failures(map(Path, paths))


def user_expected_failures(config: pytest.Config) -> tuple[ExpectedFailure, ...]:
    """Read the files of ``--expected-failures``. Raises UsageError for a file that cannot be used."""
    return _read_expected_failures(tuple(get_option(config, "expected-failures")))


def parse_stages(text: str) -> tuple[int, ...]:
    """Parse the value of ``--stage``, which may be empty. Raises UsageError if it contains anything but numbers."""
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
    laws: tuple[str, ...] = (),
    mesh: str = "",
) -> Request:
    """Build the request of one marker. ``laws`` are patterns; without a pattern, all laws are run.

    ``checks`` is the older name of ``laws``. Raises UsageError if both are given, or for a malformed mesh.
    """
    axes = (stages, world_sizes, dtypes, models, variant)
    return Request(choose_patterns(laws, checks), (engine,), *axes, mesh=Mesh.parse(mesh))


def narrow_to_engines(requests: list[Request], engine_names: tuple[str, ...]) -> list[Request]:
    """Return the requests for ``engine_names``.

    An engine that no marker names gets the default request.
    """
    marked = [request for request in requests if request.engines[0] in engine_names]
    return marked + [build_request(engine) for engine in engine_names if not any(engine in r.engines for r in marked)]


def start_servers(session: pytest.Session, get_environment: GetEnvironment) -> None:
    """Start the runner of the collected cells. Call this function only in a process that runs tests."""
    cells = [cell for cell in map(get_planned_cell, session.items) if cell is not None]
    names = sorted({planned.cell.engine for planned in cells if not planned.unsupported_reason})
    if names:
        timeout = get_option(session.config, "cell-timeout")
        isolation = Isolation(get_option(session.config, "isolation"))
        session.config.stash[RUNNER_KEY] = Runner(
            {name: get_environment(name) for name in names},
            timeout=timeout,
            isolation=isolation,
            user_expected_failures=user_expected_failures(session.config),
        )


def get_planned_cell(item: pytest.Item) -> PlannedCell | None:
    """Return the cell with which an item was parametrized, or None without a cell or with an empty parameter set."""
    callspec = getattr(item, "callspec", None)
    planned = callspec.params.get("cell") if callspec is not None else None
    return planned if isinstance(planned, PlannedCell) else None


def stop_servers(config: pytest.Config) -> None:
    """End the servers, if any were started."""
    runner = config.stash.get(RUNNER_KEY, None)
    if runner is not None:
        runner.close()


def run_cell(planned: PlannedCell, config: pytest.Config) -> Record:
    """Run one cell and return its record.

    The test of an unsupported cell is skipped before anything runs. The test of an expected failure is an xfail.
    """
    if planned.unsupported_reason:
        pytest.skip(planned.unsupported_reason)
    record = config.stash[RUNNER_KEY].run(planned)
    if record.verdict.is_broken and record.is_expected:
        pytest.xfail(f"{record.expected_failure}: {' '.join(record.cause.split())[:200]}")
    return record


def describe_problem(record: Record) -> str:
    """Return the reason why ``record`` fails its test, with the command that runs the cell again, or '' for a pass."""
    if record.is_expected and record.verdict is not Verdict.ERROR:
        return ""
    reason = record.stale_reason or record.pool_difference or record.cause
    return "\n".join(part for part in (reason, f"again: {record.command}", record.details) if part)
