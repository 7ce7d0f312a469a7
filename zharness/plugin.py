"""Pytest plugin that runs tests on several ranks (marker ``world_size``) and runs cells as tests (marker ``cells``).

The plugin also defines the command-line options and the fixtures of both.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from zharness.environment import look_for_gpus_by_nvml
from zharness.errors import UsageError
from zharness.pytest_ranks.options import (
    add_free_short_names,
    add_prefixed_options,
    get_option,
    hide_values_from_paths,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from zharness.comm import Comm
    from zharness.run import PlannedCell, Record

# Do not import torch here: pytest loads this file in every project of the environment, and torch takes seconds.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options that select cells, and the options for tests that run on several ranks."""
    add_prefixed_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Add the options without prefix whose names no plugin and no conftest.py has taken.

    Before that, choose NVML for GPU queries: a query in a conftest.py would otherwise make GPUs unusable in ranks.
    """
    look_for_gpus_by_nvml()
    hide_values_from_paths(early_config, parser, args)
    yield
    add_free_short_names(parser)


INSTALLED_REPROS = os.path.join(os.path.dirname(__file__), "repro")  # in a wheel; a clone's conftest.py collects repro/
CUDA_INIT_SOURCE = pytest.StashKey[str]()  # on the config: the file whose import initialized CUDA


MARKERS = (
    'cells(engine, world_sizes=(2,), dtypes=("fp32",), laws=(), models=(), stages=(), variant="", mesh=""): '
    "parametrize the fixture `cell` with every planned cell of an engine",
    "world_size(2, 4): run the test and its fixtures on 2 ranks, then on 4 ranks",
    'isolation("fresh" or "pooled", group="kept", "new" or "none"): run this test on new ranks or on reused ones, and '
    "with a reused, a new or no process group; overrides --isolation",
    "rank_timeout(S): limit the time of this test on ranks to S seconds; overrides --rank-timeout",
    'collectives("checked" or "trusted"): whether to check that all ranks of this test call the same collectives; '
    "overrides --collectives",
    'warm("deepspeed"): fork the ranks of this test from a server that has imported this engine',
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers. In a process that torchrun started, also register the torchrun plugin."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from zharness.pytest_ranks.torchrun_plugin import register_torchrun_plugin

        register_torchrun_plugin(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect each reproduction that a wheel has installed as a test, for `pytest --pyargs zharness.repro`."""
    folder, name = os.path.split(file_path)
    if folder != INSTALLED_REPROS or not name.endswith(".py") or name == "__init__.py":
        return None
    from zharness.releases.repro_items import ReproFile

    collector: pytest.Collector = ReproFile.from_parent(parent, path=file_path)
    return collector


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test on ranks with its world sizes, and a test of cells with the planned cells and their ids."""
    if metafunc.definition.get_closest_marker("world_size") is not None:
        from zharness.pytest_ranks.rank_requirements import parametrize_world_sizes

        try:
            parametrize_world_sizes(metafunc)
        except UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
    if "cell" in metafunc.fixturenames:
        from zharness.releases.rank_environment import prepare_rank_environment
        from zharness.run.pytest_cells import plan_marked_cells

        try:
            cells = plan_marked_cells(
                metafunc.definition.iter_markers("cells"), metafunc.config, prepare_rank_environment
            )
        except UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None
        metafunc.parametrize("cell", cells, ids=[cell.cell.id for cell in cells])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the markers that a test class derives from its attributes, unless the test has a marker of that name."""
    list_markers = getattr(getattr(item, "cls", None), "_list_rank_markers", None)
    if list_markers is None:
        return
    from zharness.pytest_ranks.rank_requirements import get_closest_mark

    for marker in list_markers(item.name):
        if get_closest_mark(item, marker.name) is None or marker.name == "skip":
            item.add_marker(marker)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record the first file whose collection initialized CUDA, after which no rank can be forked from this process."""
    report = yield
    torch = sys.modules.get("torch")
    if torch is not None and CUDA_INIT_SOURCE not in collector.config.stash and torch.cuda.is_initialized():
        collector.config.stash[CUDA_INIT_SOURCE] = collector.nodeid or "a conftest.py or a plugin"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests with the seed of ``--shuffle``. Every xdist worker gets the same order, as xdist requires."""
    seed = get_option(config, "shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)  # noqa: S311 - not used for security


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    """Set no timer of pytest-timeout for a test on ranks: its seconds are the time limit of the ranks."""
    return True if item.get_closest_marker("world_size") is not None else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the rank servers after collection, before a fixture or a test can start torch's threads in this process."""
    if getattr(session.config.pluginmanager.getplugin("zharness-torchrun"), "engaged", False):
        from zharness.releases.rank_environment import prepare_rank_environment
        from zharness.run.torchrun_runner import start_torchrun_runner

        start_torchrun_runner(session, prepare_rank_environment)
        return
    if not is_test_process(session.config):
        return
    if any(item.get_closest_marker("world_size") for item in session.items):
        from zharness.pytest_ranks.controller import RankTestController
        from zharness.world.server import refuse_cuda

        try:
            refuse_cuda(session.config.stash.get(CUDA_INIT_SOURCE, ""))
            # pytest calls the plugin that was registered last first; otherwise pytest-forked would run the test itself.
            session.config.pluginmanager.register(RankTestController(session), "zharness-controller")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
    if any("cell" in getattr(getattr(item, "callspec", None), "params", ()) for item in session.items):
        from zharness.releases.rank_environment import prepare_rank_environment
        from zharness.run.pytest_cells import start_servers

        start_servers(session, prepare_rank_environment)


def is_test_process(config: pytest.Config) -> bool:
    """Return whether this process runs tests: False with ``--collect-only``, and in the controller process of xdist."""
    is_xdist_controller = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    return not (config.option.collectonly or is_xdist_controller)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the rank servers that were started to run cells."""
    pytest_cells = sys.modules.get("zharness.run.pytest_cells")
    if pytest_cells is not None:
        pytest_cells.stop_servers(config)


@pytest.fixture
def record(cell: PlannedCell, pytestconfig: pytest.Config) -> Record:
    """Run the cell and return its Record.

    The fixture skips the test of an unsupported cell, and xfails the test of an expected failure.
    """
    from zharness.run.pytest_cells import run_cell

    return run_cell(cell, pytestconfig)


@pytest.fixture
def _world(request: pytest.FixtureRequest) -> int:
    """Return the world size with which the test is parametrized, so that pytest shows it in the test's id."""
    return int(request.param)


@pytest.fixture(scope="session")
def rank() -> int:
    """Return the rank of this process; 0 if the test runs in pytest's own process."""
    from zharness.world.current_rank import current_rank, is_rank

    return current_rank().rank if is_rank() else 0


@pytest.fixture(scope="session")
def world_size() -> int:
    """Return the number of ranks of the test; 1 if the test runs in pytest's own process."""
    from zharness.world.current_rank import current_rank, is_rank

    return current_rank().world_size if is_rank() else 1


@pytest.fixture(scope="session")
def rank_device() -> torch.device:
    """Return the device of this rank: the CPU, or one GPU for each rank if ``ZHARNESS_DEVICE=cuda`` is set."""
    from zharness.pytest_ranks.fixtures import make_device

    return make_device()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> object:
    """Return the value of another plugin's fixture ``device``, or ``rank_device`` if no other plugin has one."""
    try:
        return request.getfixturevalue("device")  # that of pytest-playwright, even if this plugin was registered later
    except pytest.FixtureLookupError:
        return request.getfixturevalue("rank_device")


@pytest.fixture
def comm() -> Comm:
    """Return an object that runs collectives on the default group, counts them and compares them across ranks."""
    from zharness.pytest_ranks.fixtures import make_comm

    return make_comm()


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """Return a temporary directory that all ranks of the test share; ``tmp_path`` is private to each rank."""
    from zharness.pytest_ranks.fixtures import make_shared_tmp_path

    return make_shared_tmp_path(request)
