"""The suites' own settings; the fixtures come with the plugin that the package registers."""

import gc
import os
import signal

import pytest
import torch

# Commands that the tests run would append what they find to the summary of the workflow's own step.
os.environ.pop("GITHUB_STEP_SUMMARY", None)

# Ranks are forked from this process: a child of one that has used torch's thread pool hangs in its first parallel loop.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Where xdist has a worker for every core, each keeps to one, with all that its tests start.

    Ranks that a test starts by a command of its own, torchrun's say, share it as those of the fixtures do.
    """
    from zharness.world.cores import assign_cores, pin_to_cores, use_batch_scheduling

    use_batch_scheduling()

    worker = getattr(config, "workerinput", None)
    number = worker["workerid"].removeprefix("gw") if worker else ""
    if number.isdigit():
        pin_to_cores(assign_cores(int(number), worker["workercount"]))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """`pytest repro`: torchrun runs the scripts, and pytest's own collector, which would import them, has none."""
    found = yield
    if file_path.parent != parent.config.rootpath / "repro" or file_path.suffix != ".py":
        return found
    from zharness.releases.repro_items import ReproFile

    return [ReproFile.from_parent(parent, path=file_path)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave thousands of tests out of every garbage collection, in this process and in those that it forks.

    A collection writes to all that it sees, so a forked process would copy it; what is garbage by now is kept.
    """
    gc.freeze()


@pytest.fixture
def ctrl_c():
    """Processes that the test starts hear Ctrl-C, though these tests may not: a shell that runs them in the background
    has SIGINT ignored, and what is ignored stays so in every process below, which Python then leaves as it is.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
