"""The fault matrix: every fault is reported with its rank and cause, in time, and no process is left behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.world.faults import ends, waits
from suites.world.faults.fault import Fault
from suites.world.faults.judge import HEALTHY, FaultPlacement, build_modules, check_session_end, find_complaints
from suites.world.faults.sessions import LEFTOVER_TIMEOUT, RecordedTest, Report, Session, SessionResult, run

FAULTS = (
    *(*ends.RAISING, *ends.FIXTURES, *ends.DYING, *ends.MEMORY),
    *(*waits.HANGING, *waits.DISAGREEING, *waits.EXAMPLES, *waits.SKIPPING, *waits.LEAVING),
)
# Sessions that run at the same time, since they mostly wait, with their exit statuses. Each ends in a fault after which
# no test can run on the same ranks.
PARTS = (
    ((*FAULTS[0::3], waits.AT_EXIT), 1),
    ((*FAULTS[1::3], waits.EXITS), 7),
    ((*FAULTS[2::3], waits.INTERRUPTS), 2),
)
ENDING = (waits.EXITS.name, waits.INTERRUPTS.name)

# Faults whose report is known to be wrong: (fault, mode) and what is wrong. They are judged like all others; if one is
# right, its line has to be removed.
KNOWN_WRONG: dict[tuple[str, str], str] = {}

# The first rank and the last, which have peers on one side only, of four ranks and of two, in both modes.
PLACEMENTS = [
    pytest.param(FaultPlacement(mode, world_size, culprit), id=f"{mode}-w{world_size}-rank{culprit}")
    for mode, world_size, culprit in (("fresh", 4, 0), ("pooled", 2, 1))
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_fault_is_reported_with_its_rank_and_cause_in_time(placement: FaultPlacement, tmp_path: Path) -> None:
    sessions = [start_session(tmp_path / f"part{at}", faults, placement) for at, (faults, _) in enumerate(PARTS)]
    wrong: dict[str, list[str]] = {}
    for session, (faults, status) in zip(sessions, PARTS, strict=True):
        done = session.finish()
        complaints = {fault.name: list(judge_fault(fault, placement, done, session.folder)) for fault in faults}
        complaints[f"session {session.folder.name}"] = list(judge_session(done, faults, status))
        wrong |= {name: found for name, found in complaints.items() if found}
    known = {name for name, mode in KNOWN_WRONG if mode == placement.mode}
    unknown = "\n".join(f"{name}: {what}" for name, found in wrong.items() if name not in known for what in found)
    assert not unknown, f"on {placement}:\n{unknown}"
    assert known <= wrong.keys(), f"no longer wrong, remove from KNOWN_WRONG: {known - wrong.keys()}"


def start_session(folder: Path, faults: tuple[Fault, ...], placement: FaultPlacement) -> Session:
    """Start a session in ``folder`` with one module per fault."""
    folder.mkdir()
    files = build_modules(faults, placement)
    return Session(folder, files, "-p", "no:xdist", "--tb=short", f"--isolation={placement.mode}")


def judge_fault(fault: Fault, placement: FaultPlacement, done: SessionResult, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the report of ``fault``, including its time."""
    record = done.tests.get(f"test_{fault.name}[w{placement.world_size}]")
    if fault.name in ENDING:
        yield from check_session_end(fault, placement, record, done.output)
    else:
        yield from find_complaints(fault, placement, record, folder)
    if record is not None and record.seconds > fault.bar:
        # The other sessions share the cores, so a slow report is measured again alone.
        path = folder / f"again_{fault.name}"
        again = (
            start_session(path, (fault,), placement).finish().tests.get(f"test_{fault.name}[w{placement.world_size}]")
        )
        if again is None or again.seconds > fault.bar:
            alone = "was not recorded" if again is None else f"{again.seconds:.1f} s"
            yield f"took {record.seconds:.1f} s, and alone {alone}; the bar is {fault.bar} s"


def judge_session(done: SessionResult, faults: tuple[Fault, ...], status: int) -> Iterator[str]:
    """Yield what is wrong with the session: its healthy tests, its exit status, its leftovers."""
    if done.status != status:
        yield f"exit status {done.status}, expected {status}: {done.output[-300:]}"
    ends_early = faults[-1].name in ENDING
    healthy = {name: record for name, record in done.tests.items() if name.startswith(HEALTHY)}
    if len(healthy) != len(faults) + (not ends_early):
        yield f"{len(healthy)} healthy tests ran with {len(faults)} faults"
    for name, record in healthy.items():
        outcome = [report.outcome for report in record.reports]
        if outcome != ["passed"] * 3:
            yield f"{name}: {outcome} {[report.text for report in record.reports]}"
    yield from (f"left behind: {what}" for what in done.leftovers)


def make_record(*outcomes: str, headline: str = "", text: str = "") -> RecordedTest:
    """Return a record with the outcomes of setup, call and teardown."""
    phases = zip(("setup", "call", "teardown"), outcomes, strict=True)
    return RecordedTest([Report(when, outcome, headline, text or headline, (), None) for when, outcome in phases])


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (None, "was not run"),
        (make_record("passed", "passed", "passed"), "a false green"),
        (make_record("passed", "skipped", "passed"), "a false green"),
        (
            make_record("failed", "skipped", "passed", headline="rank 1 did not finish in time"),
            "expected ('passed', 'fail",
        ),
        (
            make_record("passed", "failed", "passed", headline="rank 0 did not finish in time"),
            "blames [0], expected [1]",
        ),
        (
            make_record("passed", "failed", "passed", headline="ranks 0-1 did not finish in time"),
            "blames [0, 1], expected",
        ),
        (make_record("passed", "failed", "passed", headline="rank 1: RuntimeError"), "the headline does not say"),
        (
            make_record("passed", "failed", "passed", headline="rank 1", text="stack of rank 1"),
            "stacks of ranks [1], exp",
        ),
        (make_record("passed", "failed", "passed", headline="rank 1", text="test_00.py:24"), "line 25 is not named"),
    ],
)
def test_the_judge_of_the_matrix_reports_a_wrong_verdict(
    record: RecordedTest | None, complaint: str, tmp_path: Path
) -> None:
    found = list(find_complaints(waits.HANGING[0], FaultPlacement("fresh", 2, 1), record, tmp_path))
    assert any(complaint in line for line in found), found


OUTPUT = """
    import os, sys
    from pathlib import Path
    import pytest

    def peak(pid):
        (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
        return int(line.split()[1]) / 1024

    @pytest.mark.world_size(2)
    def test_prints(rank):
        before = peak(os.getppid())
        if rank == 1:
            for _ in range(1024):
                os.write(1, b"x" * (1 << 20))
            print("the last words")
        grown = peak(os.getppid()) - before
        assert grown < 16, f"the server has grown by {grown} MiB"
        assert rank == 0
"""


def test_a_gigabyte_of_output_is_truncated_and_does_not_grow_the_server(tmp_path: Path) -> None:
    done = run(tmp_path / "session", OUTPUT, "-p", "no:xdist", "--tb=short")
    (report,) = [report for report in done.tests["test_prints[w2]"].reports if report.outcome == "failed"]
    assert report.headline.startswith("rank 1: assert 1 == 0")
    ((_, printed),) = report.sections
    assert "the last words" in printed
    assert "1,073,6" in printed
    assert "bytes left out" in printed
    assert len(printed) < 200_000
    assert not done.leftovers


HANG = """
    import os, threading
    from pathlib import Path
    import pytest, torch, torch.distributed as dist

    @pytest.mark.world_size({world_size})
    def test_passes():
        dist.barrier()

    @pytest.mark.world_size({world_size})
    def test_hangs(rank):
        dist.barrier()
        Path(__file__).with_name(f"rank{{rank}}").touch()
        if rank == 1:
            threading.Event().wait()
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_killing_pytest_while_ranks_hang_leaves_no_process(ended_by: signal.Signals, tmp_path: Path) -> None:
    sessions = {
        (mode, world_size): Session(
            tmp_path / f"{mode}-w{world_size}",
            {"test_it.py": HANG.format(world_size=world_size)},
            *("-p", "no:xdist", f"--isolation={mode}"),
        )
        for mode, world_size in (("fresh", 2), ("fresh", 4), ("pooled", 2), ("pooled", 4))
    }
    wrong = {}
    for (mode, world_size), session in sessions.items():
        ranks = [session.folder / f"rank{rank}" for rank in range(world_size)]
        until = time.monotonic() + 60
        while not all(path.exists() for path in ranks) and time.monotonic() < until:
            threading.Event().wait(0.05)
        assert len(session.processes()) >= 2 + len(ranks), "pytest, its server and the ranks"
        session.signal(ended_by)
        began = time.monotonic()
        while session.processes().keys() - {session.pid} and time.monotonic() < began + 2 * LEFTOVER_TIMEOUT:
            threading.Event().wait(0.05)
        seconds = time.monotonic() - began  # without pytest itself, which still writes its summary
        done = session.finish()
        status = 2 if ended_by is signal.SIGINT else -ended_by
        if done.leftovers or seconds > LEFTOVER_TIMEOUT or done.status != status:
            wrong[mode, world_size] = f"{done.leftovers}, {seconds:.1f} s, exit status {done.status}: {done.output}"
    assert not wrong
