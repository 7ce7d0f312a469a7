"""Ranks that a launcher started: rank 0 leads and hands out work, the others follow.

[Note: attached to torchrun]
Every process runs the same command line. Rank 0 becomes the ``Leader``: a rank server like any other, whose ranks are
there already, itself among them. It alone plans, judges and writes, so the processes have nothing to disagree about.
The others become a ``Follower``, which takes work until it is told to leave, and the exit status with that. How every
rank ended its part comes from the ranks' witnesses (``witness.py``). What cannot be done here is to replace a rank: one
that hangs or dies is named, rank 0 writes what it has, and the launch is over.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, set_debug_level, set_debug_level_from_env  # public, without stubs
from torch.distributed import PrefixStore, TCPStore

from zharness.errors import WorldError
from zharness.world import witness
from zharness.world.deadline import GRACE
from zharness.world.here import Here, become, resign
from zharness.world.launched import Launch
from zharness.world.messages import Leave, Standing
from zharness.world.outcome import End, GroupOutcome, Printed, RankOutcome
from zharness.world.rank import LAST_RESORT, by_inheritance, raised, rank_device
from zharness.world.server import RankServer
from zharness.world.store import FASTEST, PATIENCE, SLOWEST, Board, StoreChannel, ended_key, pause
from zharness.world.witness import CLOSING, LOOK, OVER, TOLD, Begin, Over
from zharness.world.work import CHECKED_UP_TO, Collectives, Group, Work

# Ends of a rank that no longer takes work.
LOST = (End.SIGNALLED, End.EXITED, End.HUNG, End.STOPPED)
MARGIN = 3.0  # seconds for the witnesses to tell where their ranks stand, once the launch is over
SILENT = 30.0  # seconds beyond its time-out after which nothing more is expected from a rank, nor from its witness
NO_WORD = "nothing was heard of it, and nothing of its witness: its machine may be gone"


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
        self._stacks = tempfile.NamedTemporaryFile("a", prefix="zharness-stacks-")  # noqa: SIM115 - lives on
        self._output = {name: tempfile.TemporaryFile("w+") for name in ("stdout", "stderr")}  # noqa: SIM115 - lives on
        files = {**self._output, **{f"{name} (captured)": file for name, file in (captured or {}).items()}}
        streams = {name: file.fileno() for name, file in files.items()}
        self._witness = witness.start(launch, Path(self._stacks.name), streams)
        self.board = Board(launch, serve=launch.rank == 0)
        faulthandler.enable(file=self._stacks)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        torch.set_num_threads(1)

    def perform(self, task: Assignment) -> StoreChannel:
        """Do this rank's part of a piece of work; the witness puts up how it ended."""
        rank, world_size = self.launch.rank, task.work.world_size
        channel = StoreChannel(self.board, self._witness, task.serial, rank, world_size)
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
        if work.group is Group.KEPT and dist.is_initialized():
            return
        self._sockets = open_sockets()
        if work.group is Group.NONE:
            return
        set_debug_level_from_env()
        checked = work.collectives is Collectives.CHECKED and work.world_size <= CHECKED_UP_TO
        if checked and "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
            set_debug_level(DebugLevel.DETAIL)
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

    def hang_up(self) -> None:
        """Give the group up while peers may wait in it: they raise "Connection closed by peer" then.

        A group that something refers to, such as a local of the frame that raised, lives on in torch; so the sockets
        that were opened since it was formed are shut down. No peer that gets on without this rank notices.
        """
        for descriptor in open_sockets() - self._sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
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
        saved = {number: os.dup(number) for number in (1, 2)}
        for (number, file), stream in zip(enumerate(self._output.values(), 1), (sys.stdout, sys.stderr), strict=True):
            stream.flush()
            file.truncate(0)
            file.seek(0)
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                stream.flush()
                os.dup2(saved[number], number)
                os.close(saved[number])

    def _printed(self) -> Iterator[Printed]:
        for name, file in self._output.items():
            file.seek(0)
            text = file.read()
            if text:
                yield Printed("", name, text[-witness.PRINTED :])


class Follower(Attachment):
    """A rank other than 0: it does what the leader says."""

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
            self.hang_up()
        self.board.await_all([key])
        if channel is not None:
            channel.tidy()
        message: Farewell | Assignment = self.board.read(key)
        if self.board.count(f"{key}/read") == self.launch.world_size - 1:
            self.board.drop(key, f"{key}/read")
        return message


LastWords = Callable[["GroupOutcome | None", str], int]


class Leader(Attachment, RankServer):
    """Rank 0: a rank server whose ranks are all the launch's, and which takes part itself.

    ``last_words(outcome, words)`` is called when the launch is over before its time: it writes what there is, in any
    thread, and returns the exit status. ``outcome`` is that of the work in hand, or None.
    """

    def __init__(
        self,
        launch: Launch,
        last_words: LastWords,
        inherited: Callable[..., Any] | None = None,
        captured: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        Attachment.__init__(self, launch, inherited, captured)
        self.status = 3  # what the followers end with, unless somebody says otherwise
        self.title = ""  # of the work to come, for the messages
        self._last_words = last_words
        self._serial = 0
        self._formed = 0  # the world size of the group that stands and may be kept
        self._hand: Assignment | None = None
        self._armed = True
        self._closed = False
        # Held by the main thread but while it runs work: whoever has it may write the report.
        self._pen = threading.Lock()
        self._pen.acquire()
        self._zeros: dict[int, int] = {}
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)
        self._wake_end = wake
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._guard, name="zharness guard", daemon=True).start()

    def submit(self, work: Work) -> GroupOutcome:
        """The outcome of ``work`` on the first ranks of the launch. Does not return when one of them is lost."""
        if work.world_size > self.launch.world_size:
            raise WorldError(f"world size {work.world_size} on {self.launch.describe()}")
        keeps = work.group is Group.KEPT and self._formed == work.world_size and dist.is_initialized()
        group = work.group if keeps or work.group is Group.NONE else Group.DEFAULT
        if not keeps:
            self.part()
        self._serial += 1
        task = Assignment(self._serial, replace(work, group=group), self.title or "the work")
        with own_store(self.launch, group) as port:
            task = replace(task, port=port)
            self._hand = task
            self.board.post(f"work/{task.serial}", task)
            self._pen.release()
            try:
                channel = self.perform(task)
                outcome = self._gathered(task, channel)
            finally:
                self._pen.acquire()  # for good, when the launch is over: another thread is writing then
        self._hand = None
        self._formed = work.world_size if all(rank.sound for rank in outcome.ranks) and group is not Group.NONE else 0
        return outcome

    def dismiss(self, pool: str, world_size: int) -> GroupOutcome | None:
        """There are no pools: all ranks live on."""
        return None

    def close(self) -> None:
        """Let every follower leave with ``status``."""
        if self._closed or not self._armed and self._hand is not None:
            return
        self._closed = True
        self.disarm()
        if self._hand is not None:  # an interrupt: the others are in the middle of something
            self.board.post_first(OVER, Over(0, "rank 0 was interrupted"))
            self.board.post(TOLD, True)
        self.board.post(f"work/{self._serial + 1}", Farewell(self.status))
        self._witness.send(Leave())
        self.part()
        if not self.launch.agent_store and self._hand is None:  # the store is this process's
            key = f"work/{self._serial + 1}/read"
            self.board.await_all([], lambda spent: spent > CLOSING or self.board.count(key, 0) in (0, self._others))

    @property
    def _others(self) -> int:
        return self.launch.world_size - 1

    def disarm(self) -> None:
        """From now on nobody but the main thread writes, whatever happens to the launch."""
        self._armed = False

    def _gathered(self, task: Assignment, channel: StoreChannel) -> GroupOutcome:
        """Every rank's end; a rank that was lost is the end of all."""
        began = time.monotonic()
        keys = [ended_key(f"work/{task.serial}", rank) for rank in range(task.work.world_size)]
        if channel.left and not self.board.await_all(keys, lambda spent: spent > GRACE):
            self.hang_up()
        busy, until = -1, time.monotonic() + task.work.timeout + SILENT
        while not self.board.await_all(keys, lambda _: time.monotonic() > until):
            busy, before = self.board.count("busy", 0), busy
            if busy == before:
                self.board.post_first(OVER, Over(0, f"not every rank has told of the end of {task.title}"))
                self._conclude(self.board)
            until = time.monotonic() + SILENT
        channel.tidy()
        outcome = self._read(self.board, task, time.monotonic() - began)
        if any(rank.end in LOST for rank in outcome.ranks):
            self._conclude(self.board)
        self.board.drop(*keys)
        return outcome

    def _read(self, board: Board, task: Assignment, seconds: float) -> GroupOutcome:
        """What the witnesses have put up, with times as of this machine's clock."""
        ranks = []
        for rank in range(task.work.world_size):
            key = ended_key(f"work/{task.serial}", rank)
            if board.has(key):
                ranks.append(shifted(board.read(key), self._zeros.get(rank, 0)))
            else:
                ranks.append(RankOutcome(rank, End.HUNG, time.monotonic_ns(), cause=NO_WORD))
        return GroupOutcome(in_words(tuple(ranks)), seconds)

    def _guard(self) -> None:
        """In a thread of its own: hear of the launch's end while the main thread runs work, or is stuck in it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
        board = Board(self.launch)
        self._wake.settimeout(LOOK)
        while self._armed:
            with suppress(TimeoutError):
                if signal.SIGTERM in self._wake.recv(64):
                    board.post_first(OVER, Over(0, "torchrun ended the ranks (SIGTERM)"))
            if self._armed and board.has(OVER):
                self._conclude(board)

    def _conclude(self, board: Board) -> NoReturn:
        """Write what there is and end the process. Whoever comes second waits for the end."""
        self._pen.acquire(timeout=-1 if threading.current_thread() is threading.main_thread() else MARGIN)
        self._armed, hand = False, self._hand
        if not board.has(OVER):
            board.post_first(OVER, Over(0, ""))
        faulthandler.dump_traceback_later(CLOSING, exit=True)
        outcome = None
        if hand is not None:
            keys = [ended_key(f"work/{hand.serial}", rank) for rank in range(hand.work.world_size)]
            board.await_all(keys, lambda spent: spent > MARGIN)
            outcome = self._read(board, hand, 0.0)
        lost = next((rank for rank in outcome.failures if rank.end in LOST), None) if outcome is not None else None
        words = board.read(OVER).words or (f"{lost.words()}" if lost is not None else "a rank was lost")
        status = 3
        try:
            status = self._last_words(outcome, f"{words}; torchrun's ranks cannot be replaced, so nothing more is run")
        finally:
            board.post(TOLD, True)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)

    def synchronize(self, zeros: Mapping[int, int]) -> None:
        """Take each rank's clock reading of one and the same moment, so that times can be compared."""
        self._zeros = {rank: zero - zeros[0] for rank, zero in zeros.items()}


def shifted(outcome: RankOutcome, by: int) -> RankOutcome:
    """The outcome with its times ``by`` nanoseconds earlier."""
    notes = tuple(replace(note, at_ns=note.at_ns - by) for note in outcome.notes)
    return replace(outcome, at_ns=outcome.at_ns - by, notes=notes)


def in_words(ranks: tuple[RankOutcome, ...]) -> tuple[RankOutcome, ...]:
    """Ranks that the launcher ended are consequences, unless nothing else is there to be one of."""
    if all(rank.end is End.STOPPED or rank.sound for rank in ranks):
        return tuple(replace(rank, end=End.SIGNALLED) if rank.end is End.STOPPED else rank for rank in ranks)
    return ranks


@contextmanager
def own_store(launch: Launch, group: Group) -> Iterator[int]:
    """The port of a store for work that forms its own group by ``env://``: in the launch's, keys of the last one stay.

    0 where none is needed, and where the launch's address is not this machine's.
    """
    if group is not Group.NONE or not launch.agent_store or not is_ours(launch.address):
        yield 0
        return
    store = TCPStore(launch.address, 0, None, True, PATIENCE, wait_for_workers=False)
    yield store.port


def is_ours(address: str) -> bool:
    """Whether the address is one of this machine's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def open_sockets() -> set[int]:
    """The descriptors of this process's sockets. Linux only; elsewhere none are found."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                found.add(int(link.name))
    return found
