"""Rare faults of tests on ranks, through pytest itself: each is reported for its own test and for no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from suites.world.faults.sessions import RecordedTest, Session, SessionResult, run

MODES = ("fresh", "pooled")
HEAD = """
    import os, select, shutil, signal, threading
    from pathlib import Path
    import pytest, torch, torch.distributed as dist
    from zharness.world import exchange
    from zharness.world.current_rank import current_rank

    PYTEST = os.getpid()
    FOLDER = Path(__file__).parent
    pooled = pytest.mark.isolation("pooled")

    def note():
        with (FOLDER / "notes" / f"{os.getpid()}.pids").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def meet(rank, world_size):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert exchange(total.item()) == [sum(range(world_size))] * world_size
"""
# Every test_then has to pass on the ranks that the test before it left, or on new ones.
THEN = """
    {marks}
    @pytest.mark.world_size(2)
    def test_then_{name}(rank, world_size):
        meet(rank, world_size)
"""


def then(name: str, marks: str = "") -> str:
    return THEN.format(name=name, marks=marks)


# SIGALRM does what pytest-timeout does with its method "signal"; SIGUSR2 raises an error that pytest does not expect.
PLUGIN = """
    import signal
    import pytest

    def give_up(*_):
        pytest.fail("planted: given up")

    def raise_an_error(*_):
        raise TimeoutError("planted: took too long")

    def pytest_sessionstart():
        signal.signal(signal.SIGALRM, give_up)
        signal.signal(signal.SIGUSR2, raise_an_error)
"""
GIVEN_UP = """
    @pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR2], ids=["fails", "raises"])
    @pytest.mark.world_size(2)
    def test_is_given_up(number, rank):
        note()
        dist.barrier()
        if rank == 0:
            os.kill(PYTEST, number)
        threading.Event().wait()
"""
ROOM = """
    @pytest.mark.rank_timeout(0.5)
    @pytest.mark.world_size(2)
    def test_removes_a_directory(rank):
        note()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(current_rank().channel._slot.scratch_dir)
        threading.Event().wait()
"""
FORKS = """
    @pytest.mark.world_size(2)
    def test_forks_a_child_that_returns():
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70
"""
SLOW = """
    @pytest.fixture
    def slow(rank):
        yield
        threading.Event().wait(1.6)
        (FOLDER / f"finalised{rank}").touch()

    @pytest.mark.world_size(2)
    def test_fails_before_a_slow_finaliser(slow, rank):
        assert rank == 0, "planted"

    def test_then_it_is_finalised():
        assert (FOLDER / "finalised1").exists()
"""
DIES_LATER = """
    @pooled
    @pytest.mark.world_size(2)
    def test_dies_later(rank):
        (FOLDER / f"rank{rank}").write_text(str(os.getpid()))

    def test_kills_it():
        pid = int((FOLDER / "rank1").read_text())
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([ended], [], [])
"""
DESTROYS = """
    @pooled
    @pytest.mark.world_size(2)
    def test_destroys_its_group(rank):
        if rank == 1:
            dist.destroy_process_group()
"""
SOURCE = "".join(
    (
        *(HEAD, GIVEN_UP, then("given_up"), ROOM, then("directory"), FORKS, then("fork"), SLOW, then("slow")),
        *(DIES_LATER, then("death", "@pooled"), DESTROYS, then("destroyed", "@pooled")),
    )
)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, SessionResult]:
    """Run one session in each mode at the same time; return the results by mode."""
    files = {"test_it.py": SOURCE, "plant.py": PLUGIN}
    folders = {mode: tmp_path_factory.mktemp(mode) for mode in MODES}
    arguments = ("-p", "plant", "-p", "no:xdist", "--tb=short")
    started = {mode: Session(folders[mode], files, *arguments, f"--isolation={mode}") for mode in MODES}
    return {mode: session.finish() for mode, session in started.items()}


@pytest.fixture(params=MODES)
def done(request: pytest.FixtureRequest, sessions: Mapping[str, SessionResult]) -> SessionResult:
    return sessions[request.param]


def failure_text(test: RecordedTest, when: str = "call") -> str:
    """Return the text of the only failure, which has to be in phase ``when``; assert that no rank is left."""
    (report,) = (report for report in test.reports if report.outcome == "failed")
    assert report.when == when
    assert not test.leftover_pids
    return report.text


def test_every_test_after_a_faulty_one_passes_and_no_process_is_left(done: SessionResult) -> None:
    after = {name: verdict for name, verdict in done.verdicts().items() if name.startswith("test_then_")}
    assert set(after.values()) == {"passed"}, done.output
    assert len(after) == SOURCE.count("def test_then_")
    assert done.status == 1
    assert "INTERNALERROR" not in done.output
    assert not done.leftovers


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("test_is_given_up[w2-fails]", "Failed: planted: given up"),
        ("test_is_given_up[w2-raises]", "TimeoutError: planted: took too long"),
    ],
)
def test_an_exception_from_a_signal_handler_of_pytest_fails_the_running_test(
    done: SessionResult, name: str, error: str
) -> None:
    assert error in failure_text(done.tests[name], "setup"), done.output


def test_removing_the_scratch_directory_is_reported(done: SessionResult) -> None:
    text = failure_text(done.tests["test_removes_a_directory[w2]"], "setup")
    assert "did a test remove" in text
    assert "cannot start" not in text


def test_a_forked_child_that_returns_from_the_test_reports_nothing(done: SessionResult) -> None:
    test = done.tests["test_forks_a_child_that_returns[w2]"]
    assert [report.outcome for report in test.reports] == ["passed"] * 3, done.output


def test_a_rank_that_fails_before_a_slow_teardown_is_reported_with_that_failure_only(done: SessionResult) -> None:
    test = done.tests["test_fails_before_a_slow_finaliser[w2]"]
    assert "rank 1 failed first, in call: AssertionError: planted" in failure_text(test)


def test_a_rank_that_dies_between_two_tests_is_reported_with_the_last_test_it_ran(done: SessionResult) -> None:
    text = failure_text(done.tests["test_dies_later[w2]"], "teardown")
    assert "while the rank pool was torn down; this was the last test that it ran" in text
    assert "rank 1 was ended by a signal: SIGKILL" in text
    assert "rank 0" not in text


# Ranks whose tests changed process state are not used again. This plugin reuses them, and records the changes.
SPY = """
    from pathlib import Path
    from zharness.pytest_ranks.controller import RankTestController
    from zharness.pytest_ranks.rank_protocol import RankTestRunner
    from zharness.world.current_rank import current_rank

    collect_side_effects = RankTestRunner._collect_side_effects

    def spied(self, reporter, stop, changed, leftovers):
        with Path(__file__).with_name(f"changed{current_rank().rank}").open("a") as file:
            file.write(f"{changed}\\n")
        return collect_side_effects(self, reporter, stop, changed, leftovers)

    RankTestRunner._collect_side_effects = spied
    RankTestController._retire_pool = lambda self, key: None
"""
CHANGES = """
    import os
    import pytest, torch

    pytestmark = [pytest.mark.world_size(2), pytest.mark.isolation("pooled")]

    def test_changes():
        os.environ["PLANTED"] = "1"

    def test_changes_nothing():
        pass

    def test_changes_more():
        torch.set_default_dtype(torch.float64)

    def test_changes_nothing_again():
        pass
"""


def test_changed_process_state_is_reported_for_the_test_that_changed_it_only(tmp_path: Path) -> None:
    done = run(tmp_path, {"test_it.py": CHANGES, "plant.py": SPY}, "-p", "plant", "-p", "no:xdist")
    assert done.status == 0, done.output
    for rank in range(2):
        changes = (tmp_path / f"changed{rank}").read_text().splitlines()
        assert changes[:4] == ["environment", "", "default dtype", ""]
