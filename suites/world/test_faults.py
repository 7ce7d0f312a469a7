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
from suites.world.faults.judge import HEALTHY, LAST, Place, complaints, modules
from suites.world.faults.sessions import GONE, Done, Session, run

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
ENDING = {waits.EXITS.name: waits.EXITS, waits.INTERRUPTS.name: waits.INTERRUPTS}

# Cells that are known to be wrong: (fault, mode) and what is wrong. They are judged as all others are; when one of them
# is right, its line has to go.
KNOWN_WRONG: dict[tuple[str, str], str] = {}

PLACES = [
    pytest.param(Place(mode, world_size, culprit), id=f"{mode}-w{world_size}-rank{culprit}")
    for world_size in (2, 4)
    for culprit in range(world_size)
    for mode in ("fresh", "pooled")
]


@pytest.mark.parametrize("place", PLACES)
def test_every_fault_is_told_with_its_rank_and_its_cause_in_time(place: Place, tmp_path: Path) -> None:
    sessions = [start(tmp_path / f"part{at}", faults, place) for at, (faults, _) in enumerate(PARTS)]
    wrong: dict[str, list[str]] = {}
    for session, (faults, status) in zip(sessions, PARTS, strict=True):
        done = session.done()
        for fault in faults:
            found = list(judged(fault, place, done, session.folder))
            if found:
                wrong.setdefault(fault.name, []).extend(found)
        wrong.setdefault("the session", []).extend(of_session(done, faults, status))
    wrong = {name: found for name, found in wrong.items() if found}
    known = {name for name, mode in KNOWN_WRONG if mode == place.mode}
    assert not {name: found for name, found in wrong.items() if name not in known}, f"on {place}"
    assert known <= wrong.keys(), "right by now; take them out of KNOWN_WRONG"


def start(folder: Path, faults: tuple[Fault, ...], place: Place) -> Session:
    folder.mkdir()
    files = modules(faults, place)
    return Session(folder, files, "-p", "no:xdist", "--tb=short", f"--isolation={place.mode}")


def judged(fault: Fault, place: Place, done: Done, folder: Path) -> Iterator[str]:
    """What is wrong with the verdict on ``fault``, its time included."""
    told = done.tests.get(f"test_{fault.name}[w{place.world_size}]")
    if fault.name in ENDING:
        if f"rank {place.culprit}" not in done.output[-1000:] or fault.headline not in done.output[-1000:]:
            yield f"the end of the session does not name rank {place.culprit} and {fault.headline!r}"
        if told is None or told.reports:
            yield "expected no report of it, as without ranks"
    else:
        yield from complaints(fault, place, told, folder)
    if told is not None and told.seconds > fault.bar:
        # The other sessions share these cores: what takes too long among them is measured again by itself.
        again = start(folder / "again", (fault,), place).done().tests.get(f"test_{fault.name}[w{place.world_size}]")
        if again is None or again.seconds > fault.bar:
            yield f"took {told.seconds:.1f} s, and {again and again.seconds:.1f} s by itself; the bar is {fault.bar} s"


def of_session(done: Done, faults: tuple[Fault, ...], status: int) -> Iterator[str]:
    """What is wrong with the rest: the healthy tests, the exit status, what is left."""
    if done.status != status:
        yield f"exit status {done.status}, expected {status}: {done.output[-500:]}"
    ends_early = faults[-1].name in ENDING
    healthy = {name: told for name, told in done.tests.items() if name.startswith(HEALTHY)}
    if len(healthy) != len(faults) + (not ends_early):
        yield f"{len(healthy)} healthy tests have run beside {len(faults)} faults"
    for name, told in healthy.items():
        outcome = [report.outcome for report in told.reports]
        if outcome != ["passed"] * 3:
            yield f"{name}: {outcome} {[report.text for report in told.reports]}"
    yield from (f"left behind: {what}" for what in done.leftovers)
    if f"{HEALTHY}{LAST}" in done.output:
        yield "the last healthy test is named in the output"


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
        f"{mode}-w{world_size}": Session(
            tmp_path / f"{mode}-w{world_size}",
            {"test_it.py": HANG.format(world_size=world_size)},
            *("-p", "no:xdist", f"--isolation={mode}"),
        )
        for mode, world_size in (("fresh", 2), ("pooled", 4))
    }
    for place, session in sessions.items():
        ranks = [session.folder / f"rank{rank}" for rank in range(int(place[-1]))]
        until = time.monotonic() + 60
        while not all(path.exists() for path in ranks) and time.monotonic() < until:
            threading.Event().wait(0.05)
        assert len(session.processes()) >= 2 + len(ranks), f"{place}: pytest, its server and the ranks"
        session.process.send_signal(ended_by)
        began = time.monotonic()
        done = session.done()
        assert not done.leftovers, place
        assert time.monotonic() - began < GONE, place
        assert done.status == (2 if ended_by is signal.SIGINT else -ended_by), done.output
