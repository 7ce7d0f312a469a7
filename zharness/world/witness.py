"""The witness of a rank: a process beside it that tells how the rank ended when the rank cannot.

[Note: witnesses]
The ranks of torchrun are not ours to start or to watch: the agent that did so tells nobody but its user, and on other
machines nobody at all. So each rank forks a witness before it does anything else. The rank writes down a pipe what it
begins, tells and finishes, and the witness puts that up in the store for rank 0. When the rank dies, the witness sees
it in the same instant and reads signal and status in /proc; when its time is up, it has the rank write its stacks by
SIGUSR1, which works while Python is stuck. It is no child of the rank and not in its process group, so that neither a
test nor the launcher takes it for one of theirs, and it never outlives the rank by more than a few seconds.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from zharness.world.deadline import BUILD_LIMIT, GRACE, RECHECK
from zharness.world.launched import Launch
from zharness.world.messages import Hold, Leave, Note
from zharness.world.outcome import End, Printed, RankOutcome, signal_name
from zharness.world.postmortem import FATAL, named, where
from zharness.world.stacks import is_building, main_thread, waiting_in, without_machinery
from zharness.world.store import Board, ended_key, pause
from zharness.world.watch import readable_dump

LOOK = 0.25  # seconds between two looks whether the launch is over
LAST_WORDS = 0.5  # seconds for a rank to write its stacks
CLOSING = 20.0  # seconds for rank 0 to write its report once the launch is over
PRINTED = 64 * 1024  # bytes of a rank's output, from its end
GONE = "its process is gone, and its launcher knows how it ended"
OVER, TOLD = "over", "told"  # keys of the board: why the launch is over, and that the report is written


@dataclass(frozen=True)
class Begin:
    """The rank begins its part of a piece of work; ``timeout`` in seconds."""

    serial: int
    title: str
    timeout: float


@dataclass(frozen=True)
class Over:
    """Why no more work can be done: a rank is ``lost``, or hangs, or the launcher ends all."""

    rank: int
    words: str
    hang: bool = False


@dataclass(frozen=True)
class Watched:
    """A rank as its witness knows it.

    ``room`` is its private directory, ``streams`` are descriptors of the files into which its output goes, which
    outlive it.
    """

    launch: Launch
    pid: int
    room: Path
    streams: Mapping[str, int]


def stacks_in(room: Path) -> Path:
    """The file into which a rank writes its stacks when it is asked with SIGUSR1, and when it dies of a fatal error."""
    return room / "stacks"


def start(launch: Launch, room: Path, streams: Mapping[str, int]) -> Connection:
    """Fork the witness of this process; the end of the pipe on which to tell it."""
    ours, theirs = Pipe()
    watched = Watched(launch, os.getpid(), room, streams)
    child = os.fork()
    if child == 0:
        # Twice, so that the witness is nobody's child: a test may count its own, and wait for all of them.
        os.setsid()
        if os.fork() == 0:
            ours.close()
            live(watched, theirs)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    return ours


def live(watched: Watched, pipe: Connection) -> NoReturn:
    """Stand by the rank until it has ended. Never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    last_resort = os.dup(2)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if watched.launch.rank:
        os.close(last_resort)  # whoever reads the launcher's output to its end need not wait for this process
        last_resort = nothing
    try:
        Witness(watched, pipe, last_resort).watch()
    except Exception:  # noqa: BLE001 - the store is gone, and with it the launch: a rank that still runs waits in vain
        with suppress(ProcessLookupError):
            os.kill(watched.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(watched.room, ignore_errors=True)
        os._exit(0)


class Witness:
    """Tells the board what becomes of one rank."""

    def __init__(self, watched: Watched, pipe: Connection, last_resort: int) -> None:
        self._watched = watched
        self._rank = watched.launch.rank
        self._pipe = pipe
        self._last_resort = last_resort
        self._ended = os.pidfd_open(watched.pid) if hasattr(os, "pidfd_open") else -1
        self._board = Board(watched.launch)
        self._work: Begin | None = None
        self._notes: list[Note] = []
        self._phase = ""
        self._held = False
        self._left = False
        self._began = self._end = 0.0
        self._busy = -1  # how often any rank had said that it builds, or is looked at, when this one last asked

    def watch(self) -> None:
        """Until the rank has ended, or was ended from here."""
        while not self._left:
            if self._gone():
                return self._bury()
            while self._pipe.poll():
                if not self._hear():
                    return self._bury()
            if self._board.has(OVER):
                return self._last_act(self._board.read(OVER))
            if self._work is not None and time.monotonic() > self._end - RECHECK:
                self._look(self._work)
        return None

    def _gone(self) -> bool:
        """Whether the process has ended; waits for that, and for something to hear, but not for long."""
        watched = [self._pipe.fileno()] + [self._ended] * (self._ended >= 0)
        ready, _, _ = select.select(watched, [], [], LOOK)
        return self._ended in ready

    def _hear(self) -> bool:
        """Take in one message; False at the end of the pipe."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Begin):
            self._work, self._notes, self._phase = message, [], ""
            self._began = time.monotonic()
            self._end = self._began + message.timeout
        elif isinstance(message, Note):
            self._notes.append(message)
        elif isinstance(message, str):
            self._phase = message
        elif isinstance(message, Hold):
            self._held = bool(message.reason)
            self._end = time.monotonic() + (self._work.timeout if self._work is not None else 0.0)
        elif isinstance(message, RankOutcome):
            self._settle(message)
        elif isinstance(message, Leave):
            self._left = True
        return True

    def _settle(self, outcome: RankOutcome) -> None:
        """Put up how the rank ended the work, with all that it told."""
        assert self._work is not None, "nothing is finished that was not begun"
        outcome = replace(outcome, notes=tuple(self._notes), phase=outcome.phase or self._phase)
        self._board.post(ended_key(f"work/{self._work.serial}", self._rank), outcome)
        self._work = None

    def _look(self, work: Begin) -> None:
        """The time is nearly up, or up: it goes on for all ranks while one of them builds or is looked at."""
        stack = self._stack()
        limit = self._began + work.timeout + BUILD_LIMIT
        if self._held or (is_building(main_thread(stack)) and time.monotonic() < limit):
            self._board.count("busy")
        busy = self._board.count("busy", 0)
        if busy != self._busy:
            self._busy = busy
            self._end = max(self._end, time.monotonic() + 2 * RECHECK)
        elif time.monotonic() > self._end:
            words = f"no end of {work.title} within {work.timeout:g} s"
            self._last_act(self._board.post_first(OVER, Over(self._rank, words, hang=True)), stack)
            self._left = True

    def _last_act(self, over: Over, stack: str = "") -> None:
        """The launch is over: tell where the rank stands, have rank 0 write its report, and end the rank."""
        until = time.monotonic() + (0.0 if over.hang else GRACE)
        while self._work is not None and (self._pipe.poll(max(0.0, until - time.monotonic()))) and self._hear():
            continue  # it may have come to its end just now, or may yet, with words of its own
        if self._work is not None:
            self._settle(self._unfinished(self._work, over, stack or self._stack()))
        if self._rank == 0:
            if not self._ends_within(CLOSING):
                self._say(f"{over.words}; rank 0 did not get to write its report", stack or self._stack())
        else:
            self._board.await_all([TOLD], lambda spent: spent > CLOSING)
            self._ends_within(GRACE)
        with suppress(ProcessLookupError):
            os.kill(self._watched.pid, signal.SIGKILL)

    def _ends_within(self, seconds: float) -> bool:
        if self._ended >= 0:
            return bool(select.select([self._ended], [], [], seconds)[0])
        until = time.monotonic() + seconds
        while time.monotonic() < until and alive(self._watched.pid):
            pause(0.02)
        return not alive(self._watched.pid)

    def _unfinished(self, work: Begin, over: Over, stack: str) -> RankOutcome:
        site = waiting_in(main_thread(stack))
        cause = where(work.timeout, stack, False) if over.hang else ""
        end = End.HUNG if over.hang else End.STOPPED
        return self._outcome(end, cause, stack=stack, site=site)

    def _outcome(self, end: End, cause: str, *, stack: str = "", site: str = "") -> RankOutcome:
        return RankOutcome(
            self._rank,
            end,
            time.monotonic_ns(),
            cause=cause,
            stack=stack,
            site=site,
            phase=self._phase,
            printed=tuple(self._printed()),
        )

    def _printed(self) -> list[Printed]:
        """What the rank printed in this phase. Read beside the file's position, which is the rank's."""
        found = []
        for name, descriptor in self._watched.streams.items():
            size = os.fstat(descriptor).st_size
            text = os.pread(descriptor, PRINTED, max(0, size - PRINTED)).decode(errors="replace")
            if text:
                found.append(Printed(self._phase, name.partition(" ")[0], text))
        return found

    def _stack(self) -> str:
        """The rank's stacks, down to the frame that runs the work."""
        before = self._written()
        try:
            os.kill(self._watched.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        found, until = "", time.monotonic() + LAST_WORDS
        while time.monotonic() < until:
            pause(0.02)
            text = self._written()[len(before) :]
            if text and text == found:
                break
            found = text
        return trimmed(found)

    def _written(self) -> str:
        try:
            return stacks_in(self._watched.room).read_text(errors="replace")
        except FileNotFoundError:  # a test has removed what it found among the temporary files
            return ""

    def _bury(self) -> None:
        """The rank's process has ended: take in what it still told, tell how it ended, and that all is over."""
        self._ends_within(LAST_WORDS)  # it closes its files a moment before it has ended
        # First, and at once: the launcher, its parent, asks ten times a second, and who asks second learns nothing.
        end, cause = how_it_ended(self._watched.pid) or told_by(self._dump())
        while self._pipe.poll() and self._hear():
            continue
        if self._left or self._board.has(TOLD):
            return
        words = f"rank {self._rank} {end.value}: {cause}"
        if self._work is not None:
            words = f"{words}, while {self._work.title} ran"
            outcome = self._outcome(end, f"{cause}, before its function had returned")
            dump = Printed(self._phase, "stderr", self._dump())
            self._settle(named(replace(outcome, printed=(*outcome.printed, readable_dump(dump))), None))
        if self._rank == 0:
            self._say(f"{words}; it was the one that writes the report", self._dump())
            self._board.post(TOLD, True)
        else:
            pause(GRACE)  # the others may end by themselves, each with its own words
        self._board.post_first(OVER, Over(self._rank, words))

    def _say(self, words: str, stack: str) -> None:
        """What is left to be said of rank 0 without its report, on its standard error."""
        os.write(self._last_resort, f"\nzharness: {words}\n{without_machinery(stack)}\n".encode())

    def _dump(self) -> str:
        """The stack that a fatal error of Python writes."""
        text = self._written()
        at = text.rfind(FATAL)
        return trimmed(text[at:]) if at >= 0 else ""


def how_it_ended(pid: int) -> tuple[End, str] | None:
    """By which signal or with which status; None once its parent has waited for it. Linux only."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    if alive(pid):
        return End.EXITED, "it closed the pipe on which it reports, and did not end"
    if status & 0x7F == signal.SIGTERM:
        return End.STOPPED, "SIGTERM, from the launcher"
    if status & 0x7F:
        return End.SIGNALLED, signal_name(status & 0x7F)
    return End.EXITED, f"exit status {status >> 8}"


# faulthandler's words for the signals that it hears of; from 3.13 on "Floating-point".
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}


def told_by(dump: str) -> tuple[End, str]:
    """How a process ended that wrote ``dump`` in a fatal error, or nothing that says it."""
    said = dump.rpartition(f"{FATAL}: ")[2].partition("\n")[0].replace("-", " ")
    return (End.SIGNALLED, _FATAL_SIGNALS[said].name) if said in _FATAL_SIGNALS else (End.EXITED, GONE)


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# What runs a piece of work in a rank: the frames behind these are the same in every stack.
_BELOW = ("/zharness/items/inside.py", "/zharness/world/attachment.py", "/zharness/world/leader.py")


def trimmed(text: str) -> str:
    """Stacks without the frames below the work, and without the threads that have no others."""
    blocks: list[list[str]] = [[]]
    below = False
    for line in text.splitlines():
        if not line.startswith("  "):
            blocks.append([])
            below = False
        below = below or any(part in line for part in _BELOW)
        if not below:
            blocks[-1].append(line)
    return "\n".join(line for block in blocks if not says_nothing(block) for line in block)


def says_nothing(block: list[str]) -> bool:
    """Whether it is a thread that only waits, with nobody but this package behind it."""
    frames = [line for line in block if line.startswith('  File "')]
    threads = bool(block) and is_headline(block[0])
    return threads and all("/threading.py" in frame or "/zharness/world/store.py" in frame for frame in frames)


def is_headline(line: str) -> bool:
    """Whether the frames of a thread follow."""
    return line.startswith(("Thread ", "Current thread "))
