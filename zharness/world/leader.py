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
from zharness.world.deadline import GRACE_SECONDS
from zharness.world.launch import Launch
from zharness.world.launched_rank import (
    ANSWER_KEY,
    CLOCK_KEY,
    QUESTION_KEY,
    START_KEY,
    Assignment,
    ExitMessage,
    LaunchedRank,
    broken_group_key,
)
from zharness.world.messages import ShutdownMessage
from zharness.world.outcome import GroupOutcome, RankEnd, RankOutcome
from zharness.world.server import RankServer
from zharness.world.store import STORE_TIMEOUT, LaunchStore, StoreChannel, rank_outcome_key
from zharness.world.task import Group, RankTask
from zharness.world.witness import (
    FINAL_REPORT_SECONDS,
    LAUNCH_OVER_KEY,
    POLL_SECONDS,
    PROCESS_GONE_CAUSE,
    REPORT_WRITTEN_KEY,
    LaunchOver,
)

# Ends of a rank that no longer takes work.
LOST_ENDS = (RankEnd.SIGNALLED, RankEnd.EXITED, RankEnd.HUNG, RankEnd.STOPPED)
ATTACH_TIMEOUT = 300.0  # seconds for every rank to collect its tests, as long as torch waits for a rendezvous
WITNESS_REPORT_SECONDS = 3.0  # seconds for the witnesses to tell where their ranks stand, once the launch is over
SILENCE_TIMEOUT = (
    30.0  # seconds beyond its time-out after which nothing more is expected from a rank, nor from its witness
)
NO_REPORT_CAUSE = "nothing was heard of it, and nothing of its witness: its machine may be gone"


FinalReportWriter = Callable[["GroupOutcome | None", str], int]


class Leader(LaunchedRank, RankServer):
    """Rank 0: a rank server whose ranks are all the launch's, and which takes part itself.

    ``last_words(outcome, words)`` is called when the launch is over before its time: it writes what there is, in any
    thread, and returns the exit status. ``outcome`` is that of the work in hand, or None.
    """

    def __init__(
        self,
        launch: Launch,
        write_final_report: FinalReportWriter,
        inherited_function: Callable[..., Any] | None = None,
        capture_files: Mapping[str, IO[Any]] | None = None,
    ) -> None:
        LaunchedRank.__init__(self, launch, inherited_function, capture_files)
        self.follower_status = 3  # what the followers end with, unless somebody says otherwise
        self.task_title = ""  # of the work to come, for the messages
        self.is_group_broken = False  # whether a rank has left its peers in the middle of the last work
        self._write_final_report = write_final_report
        self._serial = 0
        self._group_size = 0  # the world size of the group that stands and may be kept
        self._current_assignment: Assignment | None = None
        self._is_guarding = True
        self._is_closed = False  # left, or leaving with its last words
        # Held by the main thread but while it runs work: whoever has it may write the report.
        self._report_lock = threading.Lock()
        self._report_lock.acquire()
        self._clock_offsets: dict[int, int] = {}
        self._signal_reader, self._signal_writer = socket.socketpair()
        self._signal_writer.setblocking(False)
        self._guard_thread = threading.Thread(target=self._run_guard, name="zharness guard", daemon=True)

    def ask_followers(self, question: object) -> dict[int, Any]:
        """Every follower's answer to one question before all work. Raises UsageError when one does not answer.

        All then read their clocks, so that times of several machines can be compared: within some 20 ms, which is less
        than the time that a failure takes to show on another rank.
        """
        self.store.post(QUESTION_KEY, question)
        answers = self._collect_from_followers(
            ANSWER_KEY, f"did not attach within {ATTACH_TIMEOUT:g} s; every rank has to run the same command"
        )
        self.store.post(START_KEY, True)
        here = time.monotonic_ns()
        clocks = self._collect_from_followers(CLOCK_KEY, "attached and fell silent")
        if not self.launch.is_single_machine:  # one machine has one clock
            self._clock_offsets = {rank: clock - here for rank, clock in clocks.items()}
        return answers

    def _collect_from_followers(self, key: str, failure: str) -> dict[int, Any]:
        """What every follower has put up under ``key``."""
        keys = {rank: f"{key}/{rank}" for rank in range(1, self.launch.world_size)}
        if not self.store.wait_for_keys(list(keys.values()), partial(operator.lt, ATTACH_TIMEOUT)):
            missing = [str(rank) for rank, one in keys.items() if not self.store.has_keys(one)]
            raise UsageError(f"rank {', '.join(missing)} {failure}")
        return {rank: self.store.read_value(one) for rank, one in keys.items()}

    def submit(self, task: RankTask) -> GroupOutcome:
        """The outcome of ``work`` on the first ranks of the launch. Does not return when one of them is lost."""
        if task.world_size > self.launch.world_size:
            raise WorldError(f"world size {task.world_size} on {self.launch.describe()}")
        keeps = task.group is Group.REUSED and self._group_size == task.world_size and dist.is_initialized()
        group = task.group if keeps or task.group is Group.NONE else Group.DEFAULT
        if not keeps:
            self.destroy_group()
        if self._guard_thread.ident is None:  # not before: servers are forked from this process until then
            self._start_guard()
        self._serial += 1
        assignment = Assignment(self._serial, replace(task, group=group), self.task_title or "the work")
        with open_task_store(self.launch, group) as port:
            assignment = replace(assignment, port=port)
            self._current_assignment = assignment
            self.store.post(f"work/{assignment.serial}", assignment)
            self._report_lock.release()
            try:
                channel = self.run_assignment(assignment)
                outcome = self._collect_outcomes(assignment, channel)
            finally:
                self._report_lock.acquire()  # for good, when the launch is over: another thread is writing then
        self._current_assignment = None
        if task.group is not Group.REUSED:
            self.destroy_group()  # this process does other things as well
        self._group_size = (
            task.world_size if all(rank.is_successful for rank in outcome.ranks) and group is not Group.NONE else 0
        )
        return outcome

    def close_pool(self, pool: str, world_size: int) -> GroupOutcome | None:
        """There are no pools: all ranks live on."""
        return None

    def close(self) -> None:
        """Let every follower leave with ``status``."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop_guard()
        if self._current_assignment is not None:  # an interrupt: the others are in the middle of something
            self.store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, "rank 0 was interrupted"))
            self.store.post(REPORT_WRITTEN_KEY, True)
        self.store.post(f"work/{self._serial + 1}", ExitMessage(self.follower_status))
        self._witness_pipe.send(ShutdownMessage())
        self.destroy_group()
        if not self.launch.uses_agent_store and self._current_assignment is None:  # the store is this process's
            key = f"work/{self._serial + 1}/read"
            self.store.wait_for_keys(
                [],
                lambda spent: (
                    spent > FINAL_REPORT_SECONDS or self.store.add_to_counter(key, 0) in (0, self._follower_count)
                ),
            )

    @property
    def _follower_count(self) -> int:
        return self.launch.world_size - 1

    def stop_guard(self) -> None:
        """From now on nobody but the main thread writes, whatever happens to the launch."""
        self._is_guarding = False
        if threading.current_thread() is not self._guard_thread and self._guard_thread.ident is not None:
            with suppress(OSError):
                self._signal_writer.send(b"\0")
            self._guard_thread.join()  # torch does not like threads that end with the process

    def _collect_outcomes(self, assignment: Assignment, channel: StoreChannel) -> GroupOutcome:
        """Every rank's end; a rank that was lost is the end of all."""
        began = time.monotonic()
        keys = [rank_outcome_key(f"work/{assignment.serial}", rank) for rank in range(assignment.task.world_size)]
        if channel.has_left and not self.store.wait_for_keys(keys, lambda spent: spent > GRACE_SECONDS):
            self.break_group(assignment.serial)
        busy, patience = self.store.add_to_counter("busy", 0), assignment.task.timeout + SILENCE_TIMEOUT
        while not self.store.wait_for_keys(keys, partial(operator.lt, patience)):
            busy, before, patience = self.store.add_to_counter("busy", 0), busy, SILENCE_TIMEOUT
            if busy == before:
                self.store.post_if_absent(
                    LAUNCH_OVER_KEY, LaunchOver(0, f"not every rank has told of the end of {assignment.title}")
                )
                self._end_launch(self.store)
        channel.delete_last_exchange()
        ranks = self._read_outcomes(self.store, assignment)
        if any(rank.end in LOST_ENDS for rank in ranks):
            self._end_launch(self.store)
        self.is_group_broken = self.store.has_keys(broken_group_key(assignment.serial))
        if self.is_group_broken:
            ranks = tuple(map(mark_peer_loss_as_stopped, ranks))
        self.store.delete_keys(*keys, broken_group_key(assignment.serial))
        return GroupOutcome(ranks, time.monotonic() - began)

    def _read_outcomes(self, store: LaunchStore, assignment: Assignment) -> tuple[RankOutcome, ...]:
        """What the witnesses have put up, with times as of this machine's clock."""
        ranks = []
        for rank in range(assignment.task.world_size):
            key = rank_outcome_key(f"work/{assignment.serial}", rank)
            if store.has_keys(key):
                ranks.append(shift_times(store.read_value(key), self._clock_offsets.get(rank, 0)))
            else:
                ranks.append(RankOutcome(rank, RankEnd.HUNG, time.monotonic_ns(), cause=NO_REPORT_CAUSE))
        return tuple(ranks)

    def _start_guard(self) -> None:
        """Have the guard hear SIGTERM, also while the main thread waits in a collective, where no handler would run."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=reset_signal_handling)
        self._guard_thread.start()

    def _run_guard(self) -> None:
        """In a thread of its own: hear of the launch's end while the main thread runs work, or is stuck in it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT})
        board = LaunchStore(self.launch)
        self._signal_reader.settimeout(POLL_SECONDS)
        while self._is_guarding:
            with suppress(TimeoutError):
                if signal.SIGTERM in self._signal_reader.recv(64):
                    board.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, "torchrun ended the ranks (SIGTERM)"))
            if self._is_guarding and board.has_keys(LAUNCH_OVER_KEY):
                self._end_launch(board)

    def _end_launch(self, store: LaunchStore) -> NoReturn:
        """Write what there is and end the process. Whoever comes second waits for the end."""
        self._report_lock.acquire(
            timeout=-1 if threading.current_thread() is threading.main_thread() else WITNESS_REPORT_SECONDS
        )
        self._is_guarding, self._is_closed, hand = False, True, self._current_assignment
        store.post_if_absent(LAUNCH_OVER_KEY, LaunchOver(0, ""))
        faulthandler.dump_traceback_later(FINAL_REPORT_SECONDS - WITNESS_REPORT_SECONDS, exit=True, file=2)
        outcome = None
        if hand is not None:
            keys = [rank_outcome_key(f"work/{hand.serial}", rank) for rank in range(hand.task.world_size)]
            store.wait_for_keys(keys, lambda spent: spent > WITNESS_REPORT_SECONDS)
            outcome = GroupOutcome(
                assign_blame(tuple(map(mark_peer_loss_as_stopped, self._read_outcomes(store, hand)))), 0.0
            )
        over: LaunchOver = store.read_value(LAUNCH_OVER_KEY)
        dead = outcome.cause if outcome is not None and outcome.cause is not None else None
        words = (
            dead.describe() if dead is not None and dead.end in (RankEnd.SIGNALLED, RankEnd.EXITED) else over.message
        )
        status = 3
        self.undo_redirection()
        try:
            status = self._write_final_report(
                outcome, f"{words}; torchrun's ranks cannot be replaced, so nothing more is run"
            )
        finally:
            store.post(REPORT_WRITTEN_KEY, True)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)


def reset_signal_handling() -> None:
    """In a child of rank 0: a signal to the child is none to rank 0."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shift_times(outcome: RankOutcome, offset_ns: int) -> RankOutcome:
    """The outcome with its times ``by`` nanoseconds earlier."""
    notes = tuple(replace(note, at_ns=note.at_ns - offset_ns) for note in outcome.notes)
    return replace(outcome, at_ns=outcome.at_ns - offset_ns, notes=notes)


# What gloo says on a rank whose peer has hung up, or died.
PEER_LOST_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "monitoredBarrier")


def mark_peer_loss_as_stopped(outcome: RankOutcome) -> RankOutcome:
    """A rank that raised because a peer had hung up on it was stopped."""
    if outcome.end is not RankEnd.RAISED or not any(words in outcome.cause for words in PEER_LOST_MESSAGES):
        return outcome
    return replace(outcome, end=RankEnd.STOPPED, cause="", exception="", traceback="")


def assign_blame(ranks: tuple[RankOutcome, ...]) -> tuple[RankOutcome, ...]:
    """Ranks that the launcher ended are consequences, unless nothing else is there to be one of."""
    causes = [
        rank
        for rank in ranks
        if not rank.is_successful and rank.end is not RankEnd.STOPPED and not rank.cause.startswith(PROCESS_GONE_CAUSE)
    ]
    if causes:
        gone = [rank.end is RankEnd.EXITED and rank.cause.startswith(PROCESS_GONE_CAUSE) for rank in ranks]
        return tuple(
            replace(rank, end=RankEnd.STOPPED, cause="") if lost else rank
            for rank, lost in zip(ranks, gone, strict=True)
        )
    return tuple(
        replace(rank, end=RankEnd.SIGNALLED) if rank.end is RankEnd.STOPPED and rank.cause else rank for rank in ranks
    )


@contextmanager
def open_task_store(launch: Launch, group: Group) -> Iterator[int]:
    """The port of a store for work that forms its own group by ``env://``: in the launch's, keys of the last one stay.

    0 where none is needed, and where the launch's address is not this machine's.
    """
    if group is not Group.NONE or not launch.uses_agent_store or not is_local_address(launch.address):
        yield 0
        return
    store = TCPStore(launch.address, 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
    yield store.port


def is_local_address(address: str) -> bool:
    """Whether the address is one of this machine's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
