"""The pytest plugin: options, the ``cells`` marker, and the ``record`` fixture that runs a cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from zharness.errors import UsageError

if TYPE_CHECKING:
    from zharness.run import Planned, Record

# Nothing of torch is imported here: every pytest run in the environment loads this file, also those of other projects.


def pytest_addoption(parser: pytest.Parser) -> None:
    """The axes that select cells."""
    group = parser.getgroup("zharness", "cells of engines beside vanilla PyTorch")
    group.addoption("--engine", action="append", default=[], help="run this engine's cells; NAME or module:factory")
    group.addoption("--stage", default="", help="run the cells of these ZeRO stages only, as in 0,1,2,3")
    group.addoption("--cell-timeout", type=float, default=120.0, help="seconds for the ranks of one cell (%(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "cells(engine, world_sizes=(2,)): parametrize the fixture `cell` with every planned case of an engine",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each planned cell; its id is the case's."""
    if "cell" in metafunc.fixturenames:
        from zharness.run.session import planned_for

        try:
            cells = planned_for(metafunc.definition.iter_markers("cells"), metafunc.config)
        except UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
        metafunc.parametrize("cell", cells, ids=[cell.case.id for cell in cells])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the rank servers now: after collection, before any fixture or test has run a tensor operation."""
    if any("cell" in getattr(getattr(item, "callspec", None), "params", ()) for item in session.items):
        from zharness.run.session import start_servers

        start_servers(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the rank servers, where any were started."""
    session = sys.modules.get("zharness.run.session")
    if session is not None:
        session.stop_servers(config)


@pytest.fixture
def record(cell: Planned, pytestconfig: pytest.Config) -> Record:
    """The Record of the cell, run on ranks of its own; skipped or expected to fail as the record says."""
    from zharness.run.session import run_cell

    return run_cell(cell, pytestconfig)
