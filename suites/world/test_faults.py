"""The fault matrix: whatever goes wrong on a rank is told with its rank and its cause, in time, and nothing remains."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.world.faults import ends, waits
from suites.world.faults.fault import Fault
from suites.world.faults.judge import HEALTHY, Place, complaints, modules, of_the_end
from suites.world.faults.sessions import LEFTOVER_TIMEOUT, Done, Report, Session, Told, run

FAULTS = (
    *(*ends.RAISING, *ends.FIXTURES, *ends.DYING, *ends.MEMORY),
    *(*waits.HANGING, *waits.DISAGREEING, *waits.SKIPPING, *waits.LEAVING),
)
# Sessions that run side by side, for their time goes into waiting. Each ends in a fault after which no test can follow
# in the same ranks.
PARTS = (
    ((*FAULTS[0::3], waits.AT_EXIT), 1),
    ((*FAULTS[1::3], waits.EXITS), 7),
    ((*FAULTS[2::3], waits.INTERRUPTS), 2),
)
ENDING = (waits.EXITS.name, waits.INTERRUPTS.name)

# Cells that are known to be wrong: (fault, mode) and what is wrong. They are judged as all others are; when one of them
# is right, its line has to go.
KNOWN_WRONG: dict[tuple[str, str], str] = {}

# The first rank and the last, which have others on one side alone, of four ranks and of two, in both modes.
PLACES = [
    pytest.param(Place(mode, world_size, culprit), id=f"{mode}-w{world_size}-rank{culprit}")
    for mode, world_size, culprit in (("fresh", 4, 0), ("pooled", 2, 1))
]


@pytest.mark.parametrize("place", PLACES)
def test_every_fault_is_told_with_its_rank_and_its_cause_in_time(place: Place, tmp_path: Path) -> None:
    sessions = [start(tmp_path / f"part{at}", faults, place) for at, (faults, _) in enumerate(PARTS)]
    wrong: dict[str, list[str]] = {}
    for session, (faults, status) in zip(sessions, PARTS, strict=True):
        done = session.done()
        found = {fault.name: list(judged(fault, place, done, session.folder)) for fault in faults}
        found[f"session {session.folder.name}"] = list(of_session(done, faults, status))
        wrong |= {name: words for name, words in found.items() if words}
    known = {name for name, mode in KNOWN_WRONG if mode == place.mode}
    words = "\n".join(f"{name}: {what}" for name, found in wrong.items() if name not in known for what in found)
    assert not words, f"on {place}:\n{words}"
    assert known <= wrong.keys(), f"right by now, take them out of KNOWN_WRONG: {known - wrong.keys()}"


def start(folder: Path, faults: tuple[Fault, ...], place: Place) -> Session:
    folder.mkdir()
    files = modules(faults, place)
    return Session(folder, files, "-p", "no:xdist", "--tb=short", f"--isolation={place.mode}")


def judged(fault: Fault, place: Place, done: Done, folder: Path) -> Iterator[str]:
    """What is wrong with the verdict on ``fault``, its time included."""
    told = done.tests.get(f"test_{fault.name}[w{place.world_size}]")
    if fault.name in ENDING:
        yield from of_the_end(fault, place, told, done.output)
    else:
        yield from complaints(fault, place, told, folder)
    if told is not None and told.seconds > fault.bar:
        # The other sessions share these cores: what takes too long among them is measured again by itself.
        path = folder / f"again_{fault.name}"
        again = start(path, (fault,), place).done().tests.get(f"test_{fault.name}[w{place.world_size}]")
        if again is None or again.seconds > fault.bar:
            alone = "is not told" if again is None else f"{again.seconds:.1f} s"
            yield f"took {told.seconds:.1f} s, and by itself {alone}; the bar is {fault.bar} s"


def of_session(done: Done, faults: tuple[Fault, ...], status: int) -> Iterator[str]:
    """What is wrong with the rest: the healthy tests, the exit status, what is left."""
    if done.status != status:
        yield f"exit status {done.status}, expected {status}: {done.output[-300:]}"
    ends_early = faults[-1].name in ENDING
    healthy = {name: told for name, told in done.tests.items() if name.startswith(HEALTHY)}
    if len(healthy) != len(faults) + (not ends_early):
        yield f"{len(healthy)} healthy tests have run beside {len(faults)} faults"
    for name, told in healthy.items():
        outcome = [report.outcome for report in told.reports]
        if outcome != ["passed"] * 3:
            yield f"{name}: {outcome} {[report.text for report in told.reports]}"
    yield from (f"left behind: {what}" for what in done.leftovers)


def told_of(*outcomes: str, headline: str = "", text: str = "") -> Told:
    phases = zip(("setup", "call", "teardown"), outcomes, strict=True)
    return Told([Report(when, outcome, headline, text or headline, (), None) for when, outcome in phases])


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (None, "was not run"),
        (told_of("passed", "passed", "passed"), "a false green"),
        (told_of("passed", "skipped", "passed"), "a false green"),
        (told_of("failed", "skipped", "passed", headline="rank 1 did not finish in time"), "expected ('passed', 'fail"),
        (told_of("passed", "failed", "passed", headline="rank 0 did not finish in time"), "blames [0], expected [1]"),
        (told_of("passed", "failed", "passed", headline="ranks 0-1 did not finish in time"), "blames [0, 1], expected"),
        (told_of("passed", "failed", "passed", headline="rank 1: RuntimeError"), "the headline does not say"),
        (told_of("passed", "failed", "passed", headline="rank 1", text="stack of rank 1"), "stacks of ranks [1], exp"),
        (told_of("passed", "failed", "passed", headline="rank 1", text="test_00.py:24"), "line 25 is not named"),
    ],
)
def test_the_judge_of_the_matrix_complains_of_a_wrong_verdict(
    told: Told | None, complaint: str, tmp_path: Path
) -> None:
    found = list(complaints(waits.HANGING[0], Place("fresh", 2, 1), told, tmp_path))
    assert any(complaint in words for words in found), found


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


def test_a_gigabyte_of_output_is_cut_and_takes_no_memory(tmp_path: Path) -> None:
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
def test_pytest_that_is_ended_while_ranks_hang_leaves_nothing(ended_by: signal.Signals, tmp_path: Path) -> None:
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
        seconds = time.monotonic() - began  # pytest itself takes its time to put its end into words
        done = session.done()
        status = 2 if ended_by is signal.SIGINT else -ended_by
        if done.leftovers or seconds > LEFTOVER_TIMEOUT or done.status != status:
            wrong[mode, world_size] = f"{done.leftovers}, {seconds:.1f} s, exit status {done.status}: {done.output}"
    assert not wrong
