"""Define the rank team: a set of ranks that are forked together, run tasks together and are ended together."""

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

# Every process group that a task leaves behind keeps about three threads of gloo: ranks that had run 200 tasks with a
# mesh had 640 threads each. Ranks with more threads than this are replaced; their groups are not destroyed, because a
# peer may still use a group. torch itself may have two pools of as many threads as there are cores.
MAX_THREADS = 64 + 2 * (os.cpu_count() or 1)


class CannotStart(Exception):
    """Raised when ranks cannot be forked: memory, processes or descriptors ran out, or a directory is missing."""


class TeamMember:
    """The rank server's handle on one forked rank.

    ``control`` is the pipe for messages. ``end_descriptor`` is a file descriptor that becomes readable when the rank's
    process ends.
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
        """Return the rank's process id."""
        assert self.process.pid is not None, "a started process has a pid"
        return self.process.pid

    @property
    def phase(self) -> str:
        """Return the test phase that the rank is in, from the last phase marker on its standard error."""
        return self.streams[1].phase

    def send(self, message: object) -> None:
        """Send a message to the rank. Does nothing if the rank has ended or has closed its pipe."""
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
    """The source of a selector event.

    For an event of a rank, ``source`` is ``"control"`` (its control pipe), ``"ended"`` (the end of its process) or an
    output stream. For an event of the client, ``source`` is ``"client"`` and ``member`` is None.
    """

    member: TeamMember | None
    source: str | RankStream


class RankTeam:
    """A team of forked ranks, with a selector for their events and a scratch directory that only these ranks use."""

    def __init__(
        self, task: RankTask, inherited_function: Callable[..., Any] | None, parent_dir: Path, echo: bool
    ) -> None:
        """Fork the ranks and make each of them run ``task`` first. Raises CannotStart if a fork fails."""
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
        """Open the pipes of one rank, fork the rank, and register its descriptors with the selector."""
        ranks.get_stack_path(self.scratch_dir, rank).touch()  # the file may be read before the rank has started
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        set_stall_timeout(ours, STALL_SECONDS)
        (out, out_end), (err, err_end) = open_two_pipes()
        slot = ranks.RankSlot(rank, task.world_size, self.scratch_dir, os.getpid())
        pipes = ranks.RankPipes(theirs, out_end, err_end)

        def main() -> None:
            """Close the descriptors that this forked process must not keep open, and run the rank."""
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
        """Remove a descriptor from the selector. Does nothing if the descriptor is not registered."""
        with suppress(KeyError, ValueError):
            self.selector.unregister(descriptor)  # type: ignore[arg-type]  # Connection has fileno()

    def send_task(self, task: RankTask) -> None:
        """Send ``task`` to every rank of the team. The ranks have to be idle."""
        for member in self.members:
            member.send(task)

    def send_shutdown(self) -> None:
        """Send the shutdown message to every rank of the team."""
        for member in self.members:
            member.send(ShutdownMessage())

    def is_reusable(self) -> bool:
        """Return whether every rank is alive, has at most MAX_THREADS threads, and still has its scratch directory."""
        return (
            self.scratch_dir.is_dir()
            and not wait([member.end_descriptor for member in self.members], timeout=0)
            and all(count_threads(member.pid) <= MAX_THREADS for member in self.members)
        )

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


def count_threads(pid: int) -> int:
    """Return the number of threads of a process; 0 where /proc does not exist, and for a process that has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def open_two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Open two pipes and return their ends. If the second pipe cannot be opened, close the first pipe."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for end in first:
            os.close(end)
        raise


def set_stall_timeout(connection: Connection, seconds: int) -> None:
    """Make reads and writes fail if no byte moves for ``seconds``, so that a stopped rank cannot block its server."""
    duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    with duplicate:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            duplicate.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def wait_for_end(process: ForkProcess, seconds: float) -> None:
    """Wait until ``process`` has ended, but at most ``seconds``."""
    if process.exitcode is not None:
        return
    descriptor = open_end_descriptor(process)
    wait([descriptor], timeout=seconds)
    if descriptor != process.sentinel:
        os.close(descriptor)


def open_end_descriptor(process: ForkProcess) -> int:
    """Return a file descriptor that becomes readable when ``process`` ends.

    The descriptor is a pidfd if the system supports pidfds. Otherwise it is multiprocessing's sentinel, a pipe, which
    becomes readable only when all children of the process have also ended.
    """
    if process.pid is None or not hasattr(os, "pidfd_open"):
        return process.sentinel
    return os.pidfd_open(process.pid)
