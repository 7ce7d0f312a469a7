"""Rank 0 of a launch: it hands out work, hears how every rank ended it, and writes what there is when one is lost."""

from __future__ import annotations

import faulthandler
import operator
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # public in torch.distributed, but without a stub there

from zharness.errors import UsageError, WorldError
from zharness.world.attachment import ANSWER, CLOCK, QUESTION, START, Assignment, Attachment, Farewell, hung_key
from zharness.world.deadline import GRACE
from zharness.world.launched import Launch
from zharness.world.messages import Leave
from zharness.world.outcome import End, GroupOutcome, RankOutcome
from zharness.world.server import RankServer
from zharness.world.store import PATIENCE, Board, StoreChannel, ended_key
from zharness.world.witness import CLOSING, GONE, LOOK, OVER, TOLD, Over
from zharness.world.work import Group, Work

# Ends of a rank that no longer takes work.
LOST = (End.SIGNALLED, End.EXITED, End.HUNG, End.STOPPED)
ARRIVAL = 300.0  # seconds for every rank to collect its tests, as long as torch waits for a rendezvous
MARGIN = 3.0  # seconds for the witnesses to tell where their ranks stand, once the launch is over
SILENT = 30.0  # seconds beyond its time-out after which nothing more is expected from a rank, nor from its witness
NO_WORD = "nothing was heard of it, and nothing of its witness: its machine may be gone"


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
        self.hung_up = False  # whether a rank has left its peers in the middle of the last work
        self._last_words = last_words
        self._serial = 0
        self._formed = 0  # the world size of the group that stands and may be kept
        self._hand: Assignment | None = None
        self._armed = True
        self._closed = False  # left, or leaving with its last words
        # Held by the main thread but while it runs work: whoever has it may write the report.
        self._pen = threading.Lock()
        self._pen.acquire()
        self._zeros: dict[int, int] = {}
        self._heard, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self._thread = threading.Thread(target=self._guard, name="zharness guard", daemon=True)

    def meet(self, question: object) -> dict[int, Any]:
        """Every follower's answer to one question before all work. Raises UsageError when one does not answer.

        All then read their clocks, so that times of several machines can be compared: within some 20 ms, which is less
        than the time that a failure takes to show on another rank.
        """
        self.board.post(QUESTION, question)
        answers = self._each(ANSWER, f"did not attach within {ARRIVAL:g} s; every rank has to run the same command")
        self.board.post(START, True)
        here = time.monotonic_ns()
        clocks = self._each(CLOCK, "attached and fell silent")
        if not self.launch.on_one_machine:  # one machine has one clock
            self._zeros = {rank: clock - here for rank, clock in clocks.items()}
        return answers

    def _each(self, key: str, otherwise: str) -> dict[int, Any]:
        """What every follower has put up under ``key``."""
        keys = {rank: f"{key}/{rank}" for rank in range(1, self.launch.world_size)}
        if not self.board.await_all(list(keys.values()), partial(operator.lt, ARRIVAL)):
            missing = [str(rank) for rank, one in keys.items() if not self.board.has(one)]
            raise UsageError(f"rank {', '.join(missing)} {otherwise}")
        return {rank: self.board.read(one) for rank, one in keys.items()}

    def submit(self, work: Work) -> GroupOutcome:
        """The outcome of ``work`` on the first ranks of the launch. Does not return when one of them is lost."""
        if work.world_size > self.launch.world_size:
            raise WorldError(f"world size {work.world_size} on {self.launch.describe()}")
        keeps = work.group is Group.KEPT and self._formed == work.world_size and dist.is_initialized()
        group = work.group if keeps or work.group is Group.NONE else Group.DEFAULT
        if not keeps:
            self.part()
        if self._thread.ident is None:  # not before: servers are forked from this process until then
            self._listen()
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
        if work.group is not Group.KEPT:
            self.part()  # this process does other things as well
        self._formed = work.world_size if all(rank.sound for rank in outcome.ranks) and group is not Group.NONE else 0
        return outcome

    def dismiss(self, pool: str, world_size: int) -> GroupOutcome | None:
        """There are no pools: all ranks live on."""
        return None

    def close(self) -> None:
        """Let every follower leave with ``status``."""
        if self._closed:
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
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            with suppress(OSError):
                self._signals.send(b"\0")
            self._thread.join()  # torch does not like threads that end with the process

    def _gathered(self, task: Assignment, channel: StoreChannel) -> GroupOutcome:
        """Every rank's end; a rank that was lost is the end of all."""
        began = time.monotonic()
        keys = [ended_key(f"work/{task.serial}", rank) for rank in range(task.work.world_size)]
        if channel.left and not self.board.await_all(keys, lambda spent: spent > GRACE):
            self.hang_up(task.serial)
        busy, patience = self.board.count("busy", 0), task.work.timeout + SILENT
        while not self.board.await_all(keys, partial(operator.lt, patience)):
            busy, before, patience = self.board.count("busy", 0), busy, SILENT
            if busy == before:
                self.board.post_first(OVER, Over(0, f"not every rank has told of the end of {task.title}"))
                self._conclude(self.board)
        channel.tidy()
        ranks = self._told(self.board, task)
        if any(rank.end in LOST for rank in ranks):
            self._conclude(self.board)
        self.hung_up = self.board.has(hung_key(task.serial))
        if self.hung_up:
            ranks = tuple(map(cut_off, ranks))
        self.board.drop(*keys, hung_key(task.serial))
        return GroupOutcome(ranks, time.monotonic() - began)

    def _told(self, board: Board, task: Assignment) -> tuple[RankOutcome, ...]:
        """What the witnesses have put up, with times as of this machine's clock."""
        ranks = []
        for rank in range(task.work.world_size):
            key = ended_key(f"work/{task.serial}", rank)
            if board.has(key):
                ranks.append(shifted(board.read(key), self._zeros.get(rank, 0)))
            else:
                ranks.append(RankOutcome(rank, End.HUNG, time.monotonic_ns(), cause=NO_WORD))
        return tuple(ranks)

    def _listen(self) -> None:
        """Have the guard hear SIGTERM, also while the main thread waits in a collective, where no handler would run."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=deaf)
        self._thread.start()

    def _guard(self) -> None:
        """In a thread of its own: hear of the launch's end while the main thread runs work, or is stuck in it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
        board = Board(self.launch)
        self._heard.settimeout(LOOK)
        while self._armed:
            with suppress(TimeoutError):
                if signal.SIGTERM in self._heard.recv(64):
                    board.post_first(OVER, Over(0, "torchrun ended the ranks (SIGTERM)"))
            if self._armed and board.has(OVER):
                self._conclude(board)

    def _conclude(self, board: Board) -> NoReturn:
        """Write what there is and end the process. Whoever comes second waits for the end."""
        self._pen.acquire(timeout=-1 if threading.current_thread() is threading.main_thread() else MARGIN)
        self._armed, self._closed, hand = False, True, self._hand
        board.post_first(OVER, Over(0, ""))
        faulthandler.dump_traceback_later(CLOSING - MARGIN, exit=True, file=2)
        outcome = None
        if hand is not None:
            keys = [ended_key(f"work/{hand.serial}", rank) for rank in range(hand.work.world_size)]
            board.await_all(keys, lambda spent: spent > MARGIN)
            outcome = GroupOutcome(blamed(tuple(map(cut_off, self._told(board, hand)))), 0.0)
        over: Over = board.read(OVER)
        dead = outcome.cause if outcome is not None and outcome.cause is not None else None
        words = dead.words() if dead is not None and dead.end in (End.SIGNALLED, End.EXITED) else over.words
        status = 3
        self.undo_redirection()
        try:
            status = self._last_words(outcome, f"{words}; torchrun's ranks cannot be replaced, so nothing more is run")
        finally:
            board.post(TOLD, True)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)


def deaf() -> None:
    """In a child of rank 0: a signal to the child is none to rank 0."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shifted(outcome: RankOutcome, by: int) -> RankOutcome:
    """The outcome with its times ``by`` nanoseconds earlier."""
    notes = tuple(replace(note, at_ns=note.at_ns - by) for note in outcome.notes)
    return replace(outcome, at_ns=outcome.at_ns - by, notes=notes)


# What gloo says on a rank whose peer has hung up, or died.
CUT_OFF = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "monitoredBarrier")


def cut_off(outcome: RankOutcome) -> RankOutcome:
    """A rank that raised because a peer had hung up on it was stopped."""
    if outcome.end is not End.RAISED or not any(words in outcome.cause for words in CUT_OFF):
        return outcome
    return replace(outcome, end=End.STOPPED, cause="", exception="", traceback="")


def blamed(ranks: tuple[RankOutcome, ...]) -> tuple[RankOutcome, ...]:
    """Ranks that the launcher ended are consequences, unless nothing else is there to be one of."""
    causes = [
        rank for rank in ranks if not rank.sound and rank.end is not End.STOPPED and not rank.cause.startswith(GONE)
    ]
    if causes:
        gone = [rank.end is End.EXITED and rank.cause.startswith(GONE) for rank in ranks]
        return tuple(
            replace(rank, end=End.STOPPED, cause="") if lost else rank for rank, lost in zip(ranks, gone, strict=True)
        )
    return tuple(replace(rank, end=End.SIGNALLED) if rank.end is End.STOPPED and rank.cause else rank for rank in ranks)


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
