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
from zharness.world.messages import ShutdownMessage
from zharness.world.orphans import kill_process_group
from zharness.world.streams import RankStream, make_echo
from zharness.world.task import RankTask


class CannotStart(Exception):
    """The machine has no room for the ranks."""


class TeamMember:
    """One forked rank as its server sees it.

    ``ended`` becomes readable at the end of the process. ``closed`` tells whether the rank closed its end of the
    control pipe while it lived.
    """

    def __init__(
        self, rank: int, process: ForkProcess, control: Connection, streams: tuple[RankStream, RankStream]
    ) -> None:
        self.rank = rank
        self.process = process
        self.control = control
        self.streams = streams
        self.end_descriptor = open_end_descriptor(process)

    @property
    def pid(self) -> int:
        """The rank's process id."""
        assert self.process.pid is not None, "forked, so it has a pid"
        return self.process.pid

    @property
    def phase(self) -> str:
        """The label under which the rank prints."""
        return self.streams[1].phase

    def send(self, message: object) -> None:
        """Send; a rank that is gone, or that closed its pipe, hears nothing."""
        with suppress(OSError):
            self.control.send(message)

    def close(self) -> None:
        """Give back this process's ends of everything."""
        for stream in self.streams:
            stream.close()
        self.control.close()
        if self.end_descriptor != self.process.sentinel:
            os.close(self.end_descriptor)


STALL_SECONDS = 5  # seconds without a byte in the middle of a message, after which its rank counts as gone


@dataclass(frozen=True)
class SelectorEvent:
    """What a descriptor of the selector stands for: a member's ``control``, ``ended`` or stream, or the ``client``."""

    member: TeamMember | None
    source: str | RankStream


class RankTeam:
    """``world_size`` ranks and the selector that watches them all. ``room`` is theirs alone."""

    def __init__(
        self, task: RankTask, inherited_function: Callable[..., Any] | None, parent_dir: Path, echo: bool
    ) -> None:
        """Fork the ranks; each begins with ``work``. Raises CannotStart when the machine has no room for them."""
        try:
            self.scratch_dir = Path(tempfile.mkdtemp(dir=parent_dir))
        except OSError as error:
            raise CannotStart(f"cannot start {task.world_size} ranks: {error}") from error
        self.members: list[TeamMember] = []
        self.selector = selectors.DefaultSelector()
        try:
            for rank in range(task.world_size):
                self._fork_rank(rank, task, inherited_function, echo)
        except OSError as error:
            self.close()
            raise CannotStart(f"cannot start {task.world_size} ranks: {error}") from error
        except BaseException:
            self.close()
            raise

    def _fork_rank(self, rank: int, task: RankTask, inherited_function: Callable[..., Any] | None, echo: bool) -> None:
        ranks.get_stack_path(self.scratch_dir, rank).touch()  # a rank may be asked for its stacks before it gets to run
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        set_stall_timeout(ours, STALL_SECONDS)
        (out, out_end), (err, err_end) = open_two_pipes()
        seat = ranks.RankSlot(rank, task.world_size, self.scratch_dir, os.getpid())
        ends = ranks.RankPipes(theirs, out_end, err_end)

        def main() -> None:
            # Whoever else held these ends would keep a rank's pipes open after its death.
            for member in self.members:
                member.close()
            ours.close()
            os.close(out)
            os.close(err)
            self.selector.close()
            ranks.run_rank(seat, ends, task, inherited_function)

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
        words = make_echo(rank) if echo else None
        member = TeamMember(rank, process, ours, (RankStream("stdout", out, words), RankStream("stderr", err, words)))
        self.members.append(member)
        self._register(member)

    def _register(self, member: TeamMember) -> None:
        register = self.selector.register
        register(member.control, selectors.EVENT_READ, SelectorEvent(member, "control"))
        register(member.end_descriptor, selectors.EVENT_READ, SelectorEvent(member, "ended"))
        for stream in member.streams:
            register(stream.descriptor, selectors.EVENT_READ, SelectorEvent(member, stream))

    def unregister(self, descriptor: object) -> None:
        """Stop watching one descriptor, if it is watched."""
        with suppress(KeyError, ValueError):
            self.selector.unregister(descriptor)  # type: ignore[arg-type]  # Connection has fileno()

    def send_task(self, task: RankTask) -> None:
        """Hand ``work`` to ranks that wait for it."""
        for member in self.members:
            member.send(task)

    def send_shutdown(self) -> None:
        """Tell every rank that there is nothing left to do."""
        for member in self.members:
            member.send(ShutdownMessage())

    def is_reusable(self) -> bool:
        """Whether every rank lives, and their directory is there: a test may have removed it."""
        return self.scratch_dir.is_dir() and not wait([member.end_descriptor for member in self.members], timeout=0)

    def close(self) -> None:
        """Kill whatever is left of the ranks, the children they started included, and forget them."""
        for member in self.members:
            if member.process.exitcode is None:
                member.process.kill()
        for member in self.members:
            member.process.join()
            kill_process_group(member.pid)
            for descriptor in (
                member.control,
                member.end_descriptor,
                *(stream.descriptor for stream in member.streams),
            ):
                self.unregister(descriptor)
            member.close()
            member.process.close()
        self.members = []
        self.selector.close()
        shutil.rmtree(self.scratch_dir, ignore_errors=True)


def open_two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """The ends of two pipes, or of none."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for end in first:
            os.close(end)
        raise


def set_stall_timeout(connection: Connection, seconds: int) -> None:
    """Have reads and writes of a started message fail once nothing moves: a stopped rank must not stop its server."""
    end = socket.socket(fileno=os.dup(connection.fileno()))
    with end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def wait_for_end(process: ForkProcess, seconds: float) -> None:
    """Wait until ``process`` has ended, or for that many seconds."""
    if process.exitcode is not None:
        return
    ended = open_end_descriptor(process)
    wait([ended], timeout=seconds)
    if ended != process.sentinel:
        os.close(ended)


def open_end_descriptor(process: ForkProcess) -> int:
    """A descriptor that becomes readable at the end of ``process``.

    A pidfd where the system has them: the sentinel of multiprocessing is a pipe, which children that the rank leaves
    behind keep open.
    """
    if process.pid is None or not hasattr(os, "pidfd_open"):
        return process.sentinel
    return os.pidfd_open(process.pid)
