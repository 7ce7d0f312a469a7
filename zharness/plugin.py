"""The pytest plugin: tests in ranks (marker ``world_size``) and cells (marker ``cells``), as options and fixtures."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from zharness.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from zharness.comm import Comm
    from zharness.run import PlannedCell, Record

# Nothing of torch is imported here: every pytest run in the environment loads this file, also those of other projects.


def pytest_addoption(parser: pytest.Parser) -> None:
    """The axes that select cells."""
    group = parser.getgroup("zharness", "cells of engines beside vanilla PyTorch")
    group.addoption(
        "--engine",
        action="append",
        default=[],
        help="run this engine's cells; NAME, NAME==RELEASE, NAME@CHECKOUT or module:factory",
    )
    group.addoption("--stage", default="", help="run the cells of these ZeRO stages only, as in 0,1,2,3")
    group.addoption("--variant", default="", help="run the cells with these options of the engine, by name")
    group.addoption(
        "--expected-failures",
        "--excuses",
        action="append",
        default=[],
        dest="excuses",
        metavar="FILE",
        help="a file of your expected failures (TOML); may be repeated",
    )
    group.addoption("--cell-timeout", type=float, default=120.0, help="seconds for the ranks of one cell (%(default)s)")
    group.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the tests in another order, which follows from SEED"
    )
    ranks = parser.getgroup("ranks", "tests that run on several ranks (marker world_size)")
    ranks.addoption(
        "--isolation",
        choices=["fresh", "pooled"],
        default="fresh",
        help="new ranks for every test, or ranks that live on from one test to the next (%(default)s)",
    )
    ranks.addoption("--rank-timeout", type=seconds, default=60.0, help="seconds for one test in ranks (%(default)s)")
    ranks.addoption(
        "--collectives",
        choices=["checked", "trusted"],
        default="checked",
        help="compare every collective between the ranks before it runs, up to 16 ranks (%(default)s)",
    )
    ranks.addoption(
        "--pdb-rank", type=int, default=0, help="the rank that --pdb and breakpoint() stop on (%(default)s)"
    )


def seconds(text: str) -> float:
    """A time-out of the command line."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return value


CUDA_INIT_SOURCE = pytest.StashKey[str]()  # on the config: the file whose import initialised CUDA


MARKERS = (
    'cells(engine, world_sizes=(2,), dtypes=("fp32",), checks=(), models=(), stages=(), variant=""): parametrize the '
    "fixture `cell` with every planned case of an engine",
    "world_size(2, 4): run the test with all its fixtures inside each of that many ranks, once for each size",
    'isolation("fresh" or "pooled", group="kept", "new" or "none"): the ranks of this test, whatever --isolation says',
    "rank_timeout(S): seconds for this test in ranks, whatever --rank-timeout says",
    'collectives("checked" or "trusted"): whether they are compared in this test, whatever --collectives says',
    'warm("deepspeed"): fork the ranks of this test from a server that has imported this engine',
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from zharness.pytest_ranks.torchrun_plugin import register_torchrun_plugin

        register_torchrun_plugin(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each world size, and one for each planned cell; its id is the case's."""
    if metafunc.definition.get_closest_marker("world_size") is not None:
        from zharness.pytest_ranks.rank_requirements import parametrize_world_sizes

        try:
            parametrize_world_sizes(metafunc)
        except UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
    if "cell" in metafunc.fixturenames:
        from zharness.releases.rank_environment import get_release_environment
        from zharness.run.pytest_cells import plan_marked_cells

        try:
            cells = plan_marked_cells(
                metafunc.definition.iter_markers("cells"), metafunc.config, get_release_environment
            )
        except UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
        metafunc.parametrize("cell", cells, ids=[cell.cell.id for cell in cells])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Remember what was being imported when CUDA was initialised: ranks cannot be forked after that."""
    report = yield
    torch = sys.modules.get("torch")
    if torch is not None and CUDA_INIT_SOURCE not in collector.config.stash and torch.cuda.is_initialized():
        collector.config.stash[CUDA_INIT_SOURCE] = collector.nodeid or "a conftest.py or a plugin"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Another order of the tests, where one is asked for: every worker of xdist comes to the same."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)  # noqa: S311 - an order, no secret


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the rank servers now: after collection, before any fixture or test has run a tensor operation."""
    if getattr(session.config.pluginmanager.getplugin("zharness-attached"), "engaged", False):
        from zharness.releases.rank_environment import get_release_environment
        from zharness.run.torchrun_runner import start_torchrun_runner

        start_torchrun_runner(session, get_release_environment)
        return
    if not is_test_process(session.config):
        return
    if any(item.get_closest_marker("world_size") for item in session.items):
        from zharness.pytest_ranks.controller import RankTestController
        from zharness.world.server import refuse_cuda

        try:
            refuse_cuda(session.config.stash.get(CUDA_INIT_SOURCE, ""))
            # Registered last, so that it is asked first: pytest-forked would run the test in one process.
            session.config.pluginmanager.register(RankTestController(session), "zharness-conductor")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
    if any("cell" in getattr(getattr(item, "callspec", None), "params", ()) for item in session.items):
        from zharness.releases.rank_environment import get_release_environment
        from zharness.run.pytest_cells import start_servers

        start_servers(session, get_release_environment)


def is_test_process(config: pytest.Config) -> bool:
    """Whether tests run in this process: not while tests are only listed, and not in xdist's controller."""
    controls = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    return not (config.option.collectonly or controls)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the rank servers, where any were started."""
    session = sys.modules.get("zharness.run.pytest_cells")
    if session is not None:
        session.stop_servers(config)


@pytest.fixture
def record(cell: PlannedCell, pytestconfig: pytest.Config) -> Record:
    """The Record of the cell, run on ranks of its own; skipped or expected to fail as the record says."""
    from zharness.run.pytest_cells import run_cell

    return run_cell(cell, pytestconfig)


@pytest.fixture
def _world(request: pytest.FixtureRequest) -> int:
    """The parameter behind the marker ``world_size``."""
    return int(request.param)


@pytest.fixture(scope="session")
def rank() -> int:
    """This process's rank; 0 in a test that runs in pytest's own process."""
    from zharness.world.current_rank import current_rank, is_rank

    return current_rank().rank if is_rank() else 0


@pytest.fixture(scope="session")
def world_size() -> int:
    """How many ranks there are; 1 in a test that runs in pytest's own process."""
    from zharness.world.current_rank import current_rank, is_rank

    return current_rank().world_size if is_rank() else 1


@pytest.fixture(scope="session")
def device() -> torch.device:
    """This rank's device: a GPU of its own where ``ZHARNESS_DEVICE=cuda`` asks for it, else the CPU."""
    from zharness.pytest_ranks.fixtures import make_device

    return make_device()


@pytest.fixture
def comm() -> Comm:
    """The collectives of the test's default group, counted, and compared between the ranks at every world size."""
    from zharness.pytest_ranks.fixtures import make_comm

    return make_comm()


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A temporary directory that all ranks of the test share; ``tmp_path`` is private to each."""
    from zharness.pytest_ranks.fixtures import make_shared_tmp_path

    return make_shared_tmp_path(request)
