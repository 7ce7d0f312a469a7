"""Settings for the suites of this repository; the fixtures come from the package's pytest plugin."""

import gc
import os
import signal

import pytest
import torch

# In a GitHub workflow, the commands that tests run would otherwise write to the summary of the real workflow step.
os.environ.pop("GITHUB_STEP_SUMMARY", None)

# Ranks are forked from this process. If torch's thread pool had been used, a forked child would hang in its first
# parallel loop.
torch.set_num_threads(1)


EXHAUSTIVE = "exhaustive: a long test, or one of many similar tests; runs with --exhaustive"


def pytest_addoption(parser):
    """Add the option that also runs the longest tests."""
    parser.addoption("--exhaustive", action="store_true", help="also run the tests that are marked exhaustive")


def pytest_collection_modifyitems(config, items):
    """Skip the longest tests unless --exhaustive is given; the workflow of pull requests gives this option."""
    if not config.getoption("exhaustive"):
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="a long test: runs with --exhaustive"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Pin each xdist worker, with all processes that its tests start, to its share of the cores."""
    config.addinivalue_line("markers", EXHAUSTIVE)
    from zharness.world.cores import assign_cores, pin_to_cores, use_batch_scheduling

    use_batch_scheduling()

    worker = getattr(config, "workerinput", None)
    number = worker["workerid"].removeprefix("gw") if worker else ""
    if number.isdigit():
        pin_to_cores(assign_cores(int(number), worker["workercount"]))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Collect each script in `repro/` as a test that runs it with torchrun, instead of importing it as a module."""
    collectors = yield
    if file_path.parent != parent.config.rootpath / "repro" or file_path.suffix != ".py":
        return collectors
    from zharness.releases.repro_items import ReproFile

    return [ReproFile.from_parent(parent, path=file_path)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Exclude all collected tests from garbage collection in this process and in its forks.

    A garbage collection writes to every object it visits, so a forked process would copy their memory pages.
    """
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude objects that a test file has left in memory from garbage collection, as after the collection of tests.

    A forked session of pytest collects garbage five times at its end, each time over all objects that it has inherited.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def ctrl_c():
    """Make processes that the test starts react to Ctrl-C.

    A shell that runs pytest in the background ignores SIGINT, child processes inherit that, and Python then installs
    no handler.
    """
    original = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, original)
