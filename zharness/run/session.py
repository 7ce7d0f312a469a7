"""Cells as pytest items: planned at collection, run on servers that were forked right after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from zharness import engines
from zharness.case import numbers
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.run.excuses import Excuse, read_excuses
from zharness.run.plan import Claims, Planned, Request, any_claims, plan, validate
from zharness.run.record import Record, Verdict
from zharness.run.runner import Runner, probed
from zharness.run.unmatched import unmatched
from zharness.world import Isolation, RankServer
from zharness.world.server import Surroundings

Place = Callable[[str], Surroundings]

RUNNER = pytest.StashKey[Runner]()


@cache
def claims_by(place: Place) -> Claims:
    """What an engine claims; one known by its factory alone is built once, in a rank of its own, to tell."""

    @cache
    def claims(engine: str, stage: int) -> Capabilities:
        known = engines.capabilities(engine, stage)
        if known is not None:
            return known
        with RankServer(place(engine)) as server:
            return probed(server, engine, stage)

    return claims


def planned_for(markers: Iterable[pytest.Mark], config: pytest.Config, place: Place) -> list[Planned]:
    """The cells of all ``cells`` markers of one test, as ``--engine`` and ``--stage`` narrow or replace them.

    ``place(engine)`` is what the rank server of an engine needs. Raises UsageError for an engine, a release or a stage
    that is not there.
    """
    requests = [request_of(*marker.args, **marker.kwargs) for marker in markers]
    asked = tuple(config.getoption("--engine"))
    stages = stages_from(config.getoption("--stage"))
    variant = config.getoption("--variant")
    own, claims = own_excuses(config), claims_by(place)
    validate(Request(engines=asked or ("reference",), stages=stages))
    found: list[Planned] = []
    for request in narrowed(requests, asked) if asked else requests:
        (engine,) = request.engines
        place(engine)
        marked = request.stages or stages
        wanted = tuple(stage for stage in marked if stage in (stages or marked))
        if not marked or (wanted and (asked or any_claims(engine, wanted, claims).stages.intersection(wanted))):
            chosen = replace(request, stages=wanted, engine_variant=variant or request.engine_variant)
            found.extend(plan(chosen, claims))
    cells = list({cell.case: cell for cell in found}.values())
    complaints = unmatched(cells, claims, own)
    if complaints:
        raise UsageError("\n".join(complaints))
    return cells


@cache
def _read(paths: tuple[str, ...]) -> tuple[Excuse, ...]:
    return read_excuses(map(Path, paths))


def own_excuses(config: pytest.Config) -> tuple[Excuse, ...]:
    """The excuses of ``--excuses``. Raises UsageError for a file that cannot be used."""
    return _read(tuple(config.getoption("--excuses")))


def stages_from(text: str) -> tuple[int, ...]:
    """The stages of ``--stage``, none where it was not given. Raises UsageError for anything but numbers."""
    try:
        return numbers(text) if text else ()
    except UsageError as error:
        raise UsageError(f"--stage: {error}") from None


def request_of(
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


def narrowed(requests: list[Request], asked: tuple[str, ...]) -> list[Request]:
    """The requests for the engines asked for; an engine that no marker names gets the default one."""
    marked = [request for request in requests if request.engines[0] in asked]
    return marked + [request_of(engine) for engine in asked if not any(engine in r.engines for r in marked)]


def start_servers(session: pytest.Session, place: Place) -> None:
    """Fork one server for each engine that the collected cells need; none where nothing is to be run here."""
    if session.config.option.collectonly or is_xdist_controller(session.config):
        return
    cells = [cell for cell in map(cell_of, session.items) if cell is not None]
    names = sorted({planned.case.engine for planned in cells if not planned.unsupported})
    if names:
        timeout = session.config.getoption("--cell-timeout")
        isolation = Isolation(session.config.getoption("--isolation"))
        places = {name: place(name) for name in names}
        own = own_excuses(session.config)
        session.config.stash[RUNNER] = Runner(places, timeout=timeout, isolation=isolation, own_excuses=own)


def cell_of(item: pytest.Item) -> Planned | None:
    """The cell that an item was parametrized with, if it was; an empty parameter set holds none."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("cell") if callspec is not None else None
    return found if isinstance(found, Planned) else None


def is_xdist_controller(config: pytest.Config) -> bool:
    """Whether the tests run in other processes."""
    return getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")


def stop_servers(config: pytest.Config) -> None:
    """End the servers, if any were started."""
    runner = config.stash.get(RUNNER, None)
    if runner is not None:
        runner.close()


def run_cell(planned: Planned, config: pytest.Config) -> Record:
    """The record of one cell. Unsupported is a skip, decided before acting; an excused failure an expected one."""
    if planned.unsupported:
        pytest.skip(planned.unsupported)
    record = config.stash[RUNNER].run(planned)
    if record.verdict.broken and record.expected:
        pytest.xfail(f"{record.excuse}: {' '.join(record.cause.split())[:200]}")
    return record


def problem(record: Record) -> str:
    """Why a record fails its test, with the command that shows it again; the empty string when it does not."""
    if record.expected and record.verdict is not Verdict.ERROR:
        return ""
    what = record.stale or record.cause
    return "\n".join(part for part in (what, f"again: {record.command}", record.details) if part)
