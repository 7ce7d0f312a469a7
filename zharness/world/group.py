"""One group of ranks: forked, watched, ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from zharness.world import rank as ranks
from zharness.world.orphans import end_process_group
from zharness.world.outcome import End, GroupOutcome, RankOutcome, signal_name
from zharness.world.work import Work

GRACE = 2.0  # seconds that the other ranks get to end by themselves once one has failed
LAST_WORDS = 0.5  # seconds for a hung rank to write its stacks
FATAL = "Fatal Python error"  # faulthandler's first words, with the stack behind them
TAIL = 4000  # characters of a rank's output that a report carries


class Abandoned(Exception):
    """Whoever asked for the group is gone, so its ranks were ended."""


@dataclass(frozen=True)
class Member:
    """One forked rank, the pipe that carries its report, and the descriptor that becomes readable when it ends."""

    rank: int
    process: ForkProcess
    report: Connection
    ended: int


def run_group(work: Work, room: Path, client: Connection | None = None) -> GroupOutcome:
    """Fork ``work.world_size`` ranks, wait for the end of each, and leave no process behind.

    Raises Abandoned when ``client`` closes its end meanwhile.
    """
    began = time.monotonic()
    inside = Path(tempfile.mkdtemp(dir=room))
    members = [fork(work, rank, inside) for rank in range(work.world_size)]
    try:
        outcomes = watch(members, work, inside, client)
    finally:
        for member in members:
            finish(member)
    ordered = tuple(with_output(outcomes[member.rank], inside) for member in members)
    shutil.rmtree(inside, ignore_errors=True)
    return GroupOutcome(ordered, time.monotonic() - began)


def fork(work: Work, rank: int, room: Path) -> Member:
    """A new rank; the writing end of its pipe stays open in the rank alone, so that its death closes the pipe."""
    context = multiprocessing.get_context("fork")
    ranks.stack_file(room, rank).touch()  # a rank may be asked for its stacks before it gets to run
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=ranks.live, args=(work, rank, room, writer, os.getpid()), name=f"rank {rank}")
    process.start()
    writer.close()
    return Member(rank, process, reader, end_of(process))


def wait_for_end(process: ForkProcess, seconds: float) -> None:
    """Wait until ``process`` has ended, or for that many seconds."""
    if process.exitcode is not None:
        return
    ended = end_of(process)
    wait([ended], timeout=seconds)
    if ended != process.sentinel:
        os.close(ended)


def end_of(process: ForkProcess) -> int:
    """A descriptor that becomes readable at the end of ``process``.

    A pidfd where the system has them: the sentinel of multiprocessing is a pipe, which children that the rank leaves
    behind keep open.
    """
    if process.pid is None or not hasattr(os, "pidfd_open"):
        return process.sentinel
    return os.pidfd_open(process.pid)


def watch(members: list[Member], work: Work, room: Path, client: Connection | None) -> dict[int, RankOutcome]:
    """Every rank's outcome. A rank counts as ended only when its process has ended with status 0 after its report."""
    outcomes: dict[int, RankOutcome] = {}
    living = {member.rank: member for member in members}
    deadline = time.monotonic() + work.timeout
    while living:
        ready = wait(handles(living.values(), outcomes, client), timeout=max(0.0, deadline - time.monotonic()))
        if client is not None and client in ready and not client_is_there(client):
            raise Abandoned
        if not ready:
            outcomes.update(end_the_rest(living.values(), outcomes, work, room))
            return outcomes
        for member in list(living.values()):
            advance(member, ready, outcomes)
            if member.process.exitcode is not None:
                outcomes[member.rank] = judge_exit(member, outcomes.get(member.rank))
                del living[member.rank]
        if any(outcome.end is not End.RETURNED for outcome in outcomes.values()):
            deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def handles(
    living: Iterable[Member], outcomes: dict[int, RankOutcome], client: Connection | None
) -> list[Connection | int]:
    """What to wait for: each living rank's end, its report unless it is in, and the client's disappearance."""
    found: list[Connection | int] = [] if client is None else [client]
    for member in living:
        found.append(member.ended)
        if member.rank not in outcomes:
            found.append(member.report)
    return found


def client_is_there(client: Connection) -> bool:
    """False at the end of the pipe. The client sends nothing while a group runs, so readable means closed."""
    try:
        return bool(client.poll(0)) and client.recv_bytes() is not None
    except (EOFError, OSError):
        return False


def advance(member: Member, ready: Sequence[object], outcomes: dict[int, RankOutcome]) -> None:
    """Take in a report that has arrived, and reap a process that has ended."""
    if member.rank not in outcomes and (member.report in ready or member.ended in ready):
        outcome = received(member)
        if outcome is not None:
            outcomes[member.rank] = outcome
    if member.ended in ready:
        member.process.join()


def received(member: Member) -> RankOutcome | None:
    """The rank's report; None when it closed its pipe without one (its exit status then says why)."""
    try:
        if not member.report.poll(0):
            return None
        outcome = member.report.recv()
    except (EOFError, OSError):
        member.process.join(GRACE)
        return None
    return outcome if isinstance(outcome, RankOutcome) else None


def judge_exit(member: Member, outcome: RankOutcome | None) -> RankOutcome:
    """The report stands only if the process then ended with status 0."""
    code = member.process.exitcode
    assert code is not None, "judged before it ended"
    if outcome is not None and (code == 0 or outcome.end is not End.RETURNED):
        return outcome
    when = "after its function had returned" if outcome is not None else "before its function had returned"
    if code < 0:
        return RankOutcome(member.rank, End.SIGNALLED, time.monotonic_ns(), cause=f"{signal_name(-code)}, {when}")
    return RankOutcome(member.rank, End.EXITED, time.monotonic_ns(), cause=f"exit status {code}, {when}")


def end_the_rest(
    living: Iterable[Member], outcomes: dict[int, RankOutcome], work: Work, room: Path
) -> dict[int, RankOutcome]:
    """Ask every rank that is left where it stands, and name it as hung, or as stopped if another had failed."""
    rest = list(living)
    failed_before = any(outcome.end is not End.RETURNED for outcome in outcomes.values())
    end = End.STOPPED if failed_before else End.HUNG
    for member in rest:
        os.kill(member.process.pid or 0, signal.SIGUSR1)
    wait([member.ended for member in rest], timeout=LAST_WORDS)
    ended = {}
    for member in rest:
        if member.rank in outcomes and outcomes[member.rank].end is not End.RETURNED:
            continue
        stack = ranks.stack_file(room, member.rank).read_text(errors="replace")
        what = "its function had returned, its process did not end" if member.rank in outcomes else "its function ran"
        cause = f"{what} after {work.timeout:g} s" if end is End.HUNG else ""
        ended[member.rank] = RankOutcome(member.rank, end, time.monotonic_ns(), cause=cause, stack=stack)
    return ended


def finish(member: Member) -> None:
    """Kill whatever is left of a rank, the children it started included, and close its pipe."""
    pid = member.process.pid
    assert pid is not None, "forked, so it has a pid"
    if member.process.exitcode is None:
        member.process.kill()
        member.process.join()
    end_process_group(pid)
    member.report.close()
    if member.ended != member.process.sentinel:
        os.close(member.ended)
    member.process.close()


def with_output(outcome: RankOutcome, room: Path) -> RankOutcome:
    """A failed rank's outcome with what it printed: the end of it, or from where Python reported a fatal error."""
    if outcome.end is End.RETURNED:
        return outcome
    try:
        text = tail(ranks.output_file(room, outcome.rank), 16 * TAIL)
    except FileNotFoundError:
        return outcome  # it ended before it had redirected its output
    fatal = text.find(FATAL)
    if fatal < 0:
        return replace(outcome, output=text[-TAIL:].strip())
    frame = re.search(r'File "(.*?)", line (\d+) in (\S+)', text[fatal:])
    where = f", in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else ""
    return replace(outcome, cause=outcome.cause + where, output=text[fatal : fatal + TAIL].strip())


def tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read().decode(errors="replace")
