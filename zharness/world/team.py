"""The ranks of one group: forked together, given work, ended together."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from zharness.world import rank as ranks
from zharness.world.messages import Leave
from zharness.world.orphans import end_process_group
from zharness.world.streams import Stream, echo_for
from zharness.world.work import Work


class CannotStart(Exception):
    """The machine has no room for the ranks."""


class Member:
    """One forked rank as its server sees it.

    ``ended`` becomes readable at the end of the process. ``closed`` tells whether the rank closed its end of the
    control pipe while it lived.
    """

    def __init__(self, rank: int, process: ForkProcess, control: Connection, streams: tuple[Stream, Stream]) -> None:
        self.rank = rank
        self.process = process
        self.control = control
        self.streams = streams
        self.ended = end_of(process)

    @property
    def pid(self) -> int:
        """The rank's process id."""
        assert self.process.pid is not None, "forked, so it has a pid"
        return self.process.pid

    @property
    def phase(self) -> str:
        """The label under which the rank prints."""
        return self.streams[1].label

    def tell(self, message: object) -> None:
        """Send; a rank that is gone, or that closed its pipe, hears nothing."""
        with suppress(OSError):
            self.control.send(message)

    def close(self) -> None:
        """Give back this process's ends of everything."""
        for stream in self.streams:
            stream.close()
        self.control.close()
        if self.ended != self.process.sentinel:
            os.close(self.ended)


STUCK = 5  # seconds without a byte in the middle of a message, after which its rank counts as gone


@dataclass(frozen=True)
class Event:
    """What a descriptor of the selector stands for: a member's ``control``, ``ended`` or stream, or the ``client``."""

    member: Member | None
    source: str | Stream


class Team:
    """``world_size`` ranks and the selector that watches them all. ``room`` is theirs alone."""

    def __init__(self, work: Work, inherited: Callable[..., Any] | None, room: Path, echo: bool) -> None:
        """Fork the ranks; each begins with ``work``. Raises CannotStart when the machine has no room for them."""
        try:
            self.room = Path(tempfile.mkdtemp(dir=room))
        except OSError as error:
            raise CannotStart(f"cannot start {work.world_size} ranks: {error}") from error
        self.members: list[Member] = []
        self.selector = selectors.DefaultSelector()
        try:
            for rank in range(work.world_size):
                self._fork(rank, work, inherited, echo)
        except OSError as error:
            self.end()
            raise CannotStart(f"cannot start {work.world_size} ranks: {error}") from error
        except BaseException:
            self.end()
            raise

    def _fork(self, rank: int, work: Work, inherited: Callable[..., Any] | None, echo: bool) -> None:
        ranks.stack_file(self.room, rank).touch()  # a rank may be asked for its stacks before it gets to run
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        give_up_after(ours, STUCK)
        (out, out_end), (err, err_end) = two_pipes()
        seat = ranks.Seat(rank, work.world_size, self.room, os.getpid())
        ends = ranks.Ends(theirs, out_end, err_end)

        def main() -> None:
            # Whoever else held these ends would keep a rank's pipes open after its death.
            for member in self.members:
                member.close()
            ours.close()
            os.close(out)
            os.close(err)
            self.selector.close()
            ranks.live(seat, ends, work, inherited)

        process = context.Process(target=main, name=f"rank {rank}")
        try:
            process.start()
        except OSError:
            os.close(out)
            os.close(err)
            raise
        finally:
            theirs.close()
            os.close(out_end)
            os.close(err_end)
        words = echo_for(rank) if echo else None
        member = Member(rank, process, ours, (Stream("stdout", out, words), Stream("stderr", err, words)))
        self.members.append(member)
        self._watch(member)

    def _watch(self, member: Member) -> None:
        register = self.selector.register
        register(member.control, selectors.EVENT_READ, Event(member, "control"))
        register(member.ended, selectors.EVENT_READ, Event(member, "ended"))
        for stream in member.streams:
            register(stream.source, selectors.EVENT_READ, Event(member, stream))

    def unwatch(self, descriptor: object) -> None:
        """Stop watching one descriptor, if it is watched."""
        with suppress(KeyError, ValueError):
            self.selector.unregister(descriptor)  # type: ignore[arg-type]  # Connection has fileno()

    def give(self, work: Work) -> None:
        """Hand ``work`` to ranks that wait for it."""
        for member in self.members:
            member.tell(work)

    def dismiss(self) -> None:
        """Tell every rank that there is nothing left to do."""
        for member in self.members:
            member.tell(Leave())

    def fit(self) -> bool:
        """Whether every rank lives, and their directory is there: a test may have removed it."""
        return self.room.is_dir() and not wait([member.ended for member in self.members], timeout=0)

    def end(self) -> None:
        """Kill whatever is left of the ranks, the children they started included, and forget them."""
        for member in self.members:
            if member.process.exitcode is None:
                member.process.kill()
        for member in self.members:
            member.process.join()
            end_process_group(member.pid)
            for descriptor in (member.control, member.ended, *(stream.source for stream in member.streams)):
                self.unwatch(descriptor)
            member.close()
            member.process.close()
        self.members = []
        self.selector.close()
        shutil.rmtree(self.room, ignore_errors=True)


def two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """The ends of two pipes, or of none."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for end in first:
            os.close(end)
        raise


def give_up_after(connection: Connection, seconds: int) -> None:
    """Have reads and writes of a started message fail once nothing moves: a stopped rank must not stop its server."""
    end = socket.socket(fileno=os.dup(connection.fileno()))
    with end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


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
