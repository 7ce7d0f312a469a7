"""A team: ranks that are forked together, run tasks together and are ended together."""

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
    """The ranks cannot be forked: too little memory, too few processes or descriptors, or no directory."""


class TeamMember:
    """The server's handle on one forked rank; ``end_descriptor`` becomes readable when the process ends."""

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
        """Return the rank's process id."""
        assert self.process.pid is not None, "a started process has a pid"
        return self.process.pid

    @property
    def phase(self) -> str:
        """Return the phase that the rank marked last on its standard error."""
        return self.streams[1].phase

    def send(self, message: object) -> None:
        """Send a message; does nothing if the rank has ended or closed its pipe."""
        with suppress(OSError):
            self.control.send(message)

    def close(self) -> None:
        """Close this process's ends of the rank's pipes."""
        for stream in self.streams:
            stream.close()
        self.control.close()
        if self.end_descriptor != self.process.sentinel:
            os.close(self.end_descriptor)


STALL_SECONDS = 5  # time without a byte in the middle of a message, after which the pipe counts as broken


@dataclass(frozen=True)
class SelectorEvent:
    """The source of an event: a member's ``control`` pipe, its end (``ended``) or a stream; or the ``client``."""

    member: TeamMember | None
    source: str | RankStream


class RankTeam:
    """The ranks of one group, their selector, and their private scratch directory."""

    def __init__(
        self, task: RankTask, inherited_function: Callable[..., Any] | None, parent_dir: Path, echo: bool
    ) -> None:
        """Fork the ranks; each begins with ``task``. Raises CannotStart if they cannot be forked."""
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
        """Fork one rank with its pipes and register them with the selector."""
        ranks.get_stack_path(self.scratch_dir, rank).touch()  # its stacks may be read before it has started
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        set_stall_timeout(ours, STALL_SECONDS)
        (out, out_end), (err, err_end) = open_two_pipes()
        slot = ranks.RankSlot(rank, task.world_size, self.scratch_dir, os.getpid())
        pipes = ranks.RankPipes(theirs, out_end, err_end)

        def main() -> None:
            """Run the rank in the forked process."""
            # Open duplicates in this rank would keep the other ranks' pipes open after their death.
            for member in self.members:
                member.close()
            ours.close()
            os.close(out)
            os.close(err)
            self.selector.close()
            ranks.run_rank(slot, pipes, task, inherited_function)

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
        write_echo = make_echo(rank) if echo else None
        streams = (RankStream("stdout", out, write_echo), RankStream("stderr", err, write_echo))
        member = TeamMember(rank, process, ours, streams)
        self.members.append(member)
        self._register(member)

    def _register(self, member: TeamMember) -> None:
        """Register the control pipe, the end descriptor and the streams of a rank with the selector."""
        register = self.selector.register
        register(member.control, selectors.EVENT_READ, SelectorEvent(member, "control"))
        register(member.end_descriptor, selectors.EVENT_READ, SelectorEvent(member, "ended"))
        for stream in member.streams:
            register(stream.descriptor, selectors.EVENT_READ, SelectorEvent(member, stream))

    def unregister(self, descriptor: object) -> None:
        """Remove a descriptor from the selector, if it is there."""
        with suppress(KeyError, ValueError):
            self.selector.unregister(descriptor)  # type: ignore[arg-type]  # Connection has fileno()

    def send_task(self, task: RankTask) -> None:
        """Send ``task`` to the idle ranks."""
        for member in self.members:
            member.send(task)

    def send_shutdown(self) -> None:
        """Send every rank the message to end."""
        for member in self.members:
            member.send(ShutdownMessage())

    def is_reusable(self) -> bool:
        """Return whether every rank is alive and the scratch directory exists, which a test may have removed."""
        return self.scratch_dir.is_dir() and not wait([member.end_descriptor for member in self.members], timeout=0)

    def close(self) -> None:
        """Kill the ranks and their process groups, close their pipes and remove the scratch directory."""
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
    """Open two pipes and return their ends; leaves none open if the second one fails."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for end in first:
            os.close(end)
        raise


def set_stall_timeout(connection: Connection, seconds: int) -> None:
    """Make reads and writes fail after ``seconds`` without a byte, so that a stopped rank cannot block its server."""
    duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    with duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def wait_for_end(process: ForkProcess, seconds: float) -> None:
    """Wait until ``process`` has ended, at most ``seconds``."""
    if process.exitcode is not None:
        return
    descriptor = open_end_descriptor(process)
    wait([descriptor], timeout=seconds)
    if descriptor != process.sentinel:
        os.close(descriptor)


def open_end_descriptor(process: ForkProcess) -> int:
    """Return a descriptor that becomes readable when ``process`` ends.

    It is a pidfd if the system supports pidfds. Otherwise it is multiprocessing's sentinel, a pipe, which stays open
    while children that the rank left behind are alive.
    """
    if process.pid is None or not hasattr(os, "pidfd_open"):
        return process.sentinel
    return os.pidfd_open(process.pid)
