"""Ranks that a launcher started: rank 0 leads and hands out work, the others follow.

[Note: attached to torchrun]
Every process runs the same command line. Rank 0 becomes the ``Leader`` (``leader.py``): a rank server
like any other, whose ranks are there already, itself among them. It alone plans, judges and writes, so the processes
have nothing to disagree about. The others become a ``Follower``, which takes work until it is told to leave, and with
what exit status. How every rank ended its part comes from the ranks' witnesses (``witness.py``). What cannot be done
here is to replace a rank: one that hangs or dies is named, rank 0 writes what it has, and the launch is over.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

# torch.distributed's names for these are public, but have no stubs.
from torch._C._distributed_c10d import PrefixStore, get_debug_level, set_debug_level

from zharness.world import witness
from zharness.world.deadline import GRACE
from zharness.world.here import Here, become, resign
from zharness.world.launched import Launch
from zharness.world.messages import Leave
from zharness.world.outcome import End, Printed, RankOutcome
from zharness.world.rank import LAST_RESORT, by_inheritance, debug_level, raised, rank_device
from zharness.world.store import Board, StoreChannel
from zharness.world.witness import Begin
from zharness.world.work import Group, Work

# Keys of the board, in the order in which they are put up.
QUESTION, ANSWER, START, CLOCK = "question", "answer", "start", "clock"


@dataclass(frozen=True)
class Farewell:
    """The leader's last message: end with this exit status."""

    status: int


@dataclass(frozen=True)
class Assignment:
    """One piece of work with its number, its name, and the port of a store of its own (0 for none)."""

    serial: int
    work: Work
    title: str
    port: int = 0


class Attachment:
    """One rank of a launch, from the moment it is attached; made in the main thread, before any tensor operation."""

    def __init__(
        self, launch: Launch, inherited: Callable[..., Any] | None = None, captured: Mapping[str, IO[Any]] | None = None
    ) -> None:
        """``inherited`` runs work that says ``by_inheritance``. ``captured`` are files into which output goes."""
        self.launch = launch
        self._inherited = inherited
        self._sockets: set[tuple[int, str]] = set()
        self._saved: dict[int, int] = {}
        # A private directory of this rank, which the witness removes, also when this process is killed.
        self._room = Path(tempfile.mkdtemp(prefix="zharness-"))
        self._stacks = witness.stacks_in(self._room).open("a")
        self._output = {name: tempfile.TemporaryFile("w+") for name in ("stdout", "stderr")}  # noqa: SIM115 - lives on
        files = {**self._output, **{f"{name} (captured)": file for name, file in (captured or {}).items()}}
        streams = {name: file.fileno() for name, file in files.items()}
        self._witness = witness.start(launch, self._room, streams)
        self.board = Board(launch, serve=launch.rank == 0)
        faulthandler.enable(file=self._stacks)
        # A forked child's fatal error is not the rank's: in that file it would be taken for one.
        os.register_at_fork(after_in_child=partial(faulthandler.enable, file=2))
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        torch.set_num_threads(1)

    def perform(self, task: Assignment) -> StoreChannel:
        """Do this rank's part of a piece of work; the witness puts up how it ended."""
        rank, world_size = self.launch.rank, task.work.world_size
        channel = StoreChannel(self.board, self._witness, task.serial, rank, world_size, self._room)
        self._witness.send(Begin(task.serial, task.title, task.work.timeout))
        become(Here(rank, world_size, channel))
        try:
            with self._surroundings(task), self._redirected(task.work):
                outcome = self._attempt(task)
        finally:
            resign()
        if outcome.end is End.RAISED:
            channel.left = True
            outcome = replace(outcome, printed=tuple(self._printed()))
        self._witness.send(outcome)
        return channel

    def _attempt(self, task: Assignment) -> RankOutcome:
        """The outcome of this rank's part; every exception but an interrupt becomes part of it."""
        work = task.work
        function = self._inherited if work.function is by_inheritance and self._inherited else work.function
        try:
            self._form_group(task)
            payload = pickle.dumps(function(*work.args))
            return RankOutcome(self.launch.rank, End.RETURNED, time.monotonic_ns(), payload=payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended its part
            return raised(self.launch.rank, error)

    def _form_group(self, task: Assignment) -> None:
        """Have the default group that the work asks for, over whatever interface the user's environment names."""
        work, rank = task.work, self.launch.rank
        level = debug_level(work)
        if dist.is_initialized():
            if work.group is Group.KEPT and get_debug_level() == level:
                return
            self.part()
        self._sockets = open_sockets()
        if work.group is Group.NONE:
            return
        set_debug_level(level)
        device = rank_device(rank, work.world_size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"group/{task.serial}", self.board.store),
            rank=rank,
            world_size=work.world_size,
            timeout=LAST_RESORT,
            device_id=device if device.type == "cuda" else None,
        )

    def part(self) -> None:
        """Give the default group up, once every rank has ended the work."""
        if dist.is_initialized():
            with suppress(Exception):  # a group that a dead peer was in
                dist.destroy_process_group()

    def hang_up(self, serial: int) -> None:
        """Give the group up while peers may wait in it: they raise "Connection closed by peer" then.

        A group that something refers to, such as a local of the frame that raised, lives on in torch; so the sockets
        that were opened since it was formed are shut down. No peer that gets on without this rank notices.
        """
        self.board.post(hung_key(serial), True)
        for descriptor, _ in open_sockets() - self._sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()  # raises for a listening one, of which gloo expects no end
                    found.shutdown(socket.SHUT_RDWR)
        self.part()

    @contextmanager
    def _surroundings(self, task: Assignment) -> Iterator[None]:
        """The variables that launchers set, as for a launch of this work's world size."""
        size = task.work.world_size
        wanted = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(min(size, self.launch.local_world_size)),
            "MASTER_PORT": str(task.port or self.launch.port),
        }
        before = {name: os.environ[name] for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            os.environ.update(before)

    @contextmanager
    def _redirected(self, work: Work) -> Iterator[None]:
        """Keep what is printed off the report; pytest, whose tests are run by inheritance, does that by itself."""
        if work.function is by_inheritance:
            yield
            return
        self._saved = {number: os.dup(number) for number in (1, 2)}
        for (number, file), stream in zip(enumerate(self._output.values(), 1), (sys.stdout, sys.stderr), strict=True):
            stream.flush()
            file.truncate(0)
            file.seek(0)
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            self.undo_redirection()

    def undo_redirection(self) -> None:
        """Have standard output and error be what they were before this work; by any thread."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            saved = self._saved.pop(number, None)
            if saved is not None:
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)

    def _printed(self) -> Iterator[Printed]:
        for name, file in self._output.items():
            file.seek(0)
            text = file.read()
            if text:
                yield Printed("", name, text[-witness.PRINTED :])


class Follower(Attachment):
    """A rank other than 0: it does what the leader says."""

    def meet(self, answer: Callable[[Any], object]) -> None:
        """Answer the leader's one question before all work, unless it leaves without one."""
        if not self.board.await_all([QUESTION], lambda _: self.board.has("work/1")):
            return
        self.board.post(f"{ANSWER}/{self.launch.rank}", answer(self.board.read(QUESTION)))
        if self.board.await_all([START], lambda _: self.board.has("work/1")):
            self.board.post(f"{CLOCK}/{self.launch.rank}", time.monotonic_ns())

    def follow(self) -> int:
        """Take work until the leader says to leave; the exit status that it says."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the witness tells of it
        serial, channel = 0, None
        while True:
            serial += 1
            message = self._next(serial, channel)
            if isinstance(message, Farewell):
                self._witness.send(Leave())
                self.part()
                return message.status
            if message.work.group is not Group.KEPT:
                self.part()
            channel = self.perform(message) if self.launch.rank < message.work.world_size else None

    def _next(self, serial: int, channel: StoreChannel | None) -> Farewell | Assignment:
        """The next message. Meanwhile a rank that has left the work, and is waited for by peers, hangs up."""
        key = f"work/{serial}"
        if channel is not None and channel.left and not self.board.await_all([key], lambda spent: spent > GRACE):
            self.hang_up(serial - 1)
        self.board.await_all([key])
        if channel is not None:
            channel.tidy()
        message: Farewell | Assignment = self.board.read(key)
        if self.board.count(f"{key}/read") == self.launch.world_size - 1:
            self.board.drop(key, f"{key}/read")
        return message


def hung_key(serial: int) -> str:
    """Where a rank puts up that it has hung up on its peers."""
    return f"work/{serial}/hung"


def open_sockets() -> set[tuple[int, str]]:
    """This process's sockets: descriptor and what it links to. Linux only; elsewhere none are found."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:"):
                found.add((int(link.name), target))
    return found
